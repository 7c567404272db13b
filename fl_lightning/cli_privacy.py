"""`fl-lightning privacy epsilon`, `noise` and `plan`."""

import json
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from fl_lightning.cli_options import ConfigDir, ConfigFile, Debug, Overrides
from fl_lightning.errors import ConfigError

EPSILON_EXAMPLES = """\b
Examples:
  fl-lightning privacy epsilon --noise-multiplier 0.9 --steps 300 --rate 0.02
  fl-lightning privacy epsilon --noise-multiplier 1.1 --steps 145 --batch-size 64 --n 1797 --delta 1e-4 --accountant all
  fl-lightning privacy epsilon --noise-multiplier 35.35 --steps 200 --adjacency replace_one --json
"""

NOISE_EXAMPLES = """\b
Examples:
  fl-lightning privacy noise --target-epsilon 3 --steps 145 --batch-size 64 --n 1797 --delta 1e-4
  fl-lightning privacy noise --target-epsilon 2 --steps 200 --adjacency replace_one --json
"""

PLAN_EXAMPLES = """\b
Examples:
  fl-lightning privacy plan algorithm=dp_fedsam privacy.target_epsilon=4
  fl-lightning privacy plan experiment=sam_adpfl_cifar10
  fl-lightning privacy plan experiment=sam_adpfl_cifar10_sample --json
"""

privacy_app = typer.Typer(
    help="What a run would promise and cost: epsilon, noise, and whether it can learn, before any training.",
    rich_markup_mode=None,
)

Steps = Annotated[str, typer.Option("--steps", metavar="N", help="how many noised releases, such as local steps")]
Delta = Annotated[str, typer.Option("--delta", metavar="DELTA", help="below 1/n for n protected units")]
Rate = Annotated[
    str | None, typer.Option("--rate", metavar="Q", help="share of the units in each release; default 1, all of them")
]
Batch = Annotated[str | None, typer.Option("--batch-size", metavar="B", help="with --n, in place of --rate: B/n")]
Units = Annotated[str | None, typer.Option("--n", metavar="N", help="units that are drawn from, with --batch-size")]
Sampling = Annotated[
    str | None,
    typer.Option(
        "--sampling",
        metavar="full|poisson|without_replacement",
        help="how units enter a release; default: full at rate 1, else without_replacement at replace_one, poisson "
        "otherwise",
    ),
]
Adjacency = Annotated[
    str, typer.Option("--adjacency", metavar="add_remove|zero_out|replace_one", help="how neighbouring data differ")
]
Accountant = Annotated[
    str, typer.Option("--accountant", metavar="rdp|pld|all", help="rdp: the ledger's; pld: numerical, tighter; all")
]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON")]


@privacy_app.command(epilog=EPSILON_EXAMPLES)
def epsilon(
    noise_multiplier: Annotated[
        str, typer.Option("--noise-multiplier", metavar="Z", help="noise std / clip bound C, at every adjacency")
    ],
    steps: Steps,
    rate: Rate = None,
    batch_size: Batch = None,
    n: Units = None,
    sampling: Sampling = None,
    adjacency: Adjacency = "add_remove",
    delta: Delta = "1e-5",
    accountant: Accountant = "rdp",
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Epsilon from noise.

    What N Gaussian releases of clipped vectors cost, each noised with a standard deviation of Z times C.
    """
    z = _number("--noise-multiplier", noise_multiplier, zero=True)
    terms = _terms(steps, rate, batch_size, n, sampling, adjacency, delta, accountant)
    from fl_lightning.privacy.calculator import spent

    _show(spent(z, **terms), as_json)


@privacy_app.command(epilog=NOISE_EXAMPLES)
def noise(
    target_epsilon: Annotated[str, typer.Option("--target-epsilon", metavar="EPS", help="the budget, above 0")],
    steps: Steps,
    rate: Rate = None,
    batch_size: Batch = None,
    n: Units = None,
    sampling: Sampling = None,
    adjacency: Adjacency = "add_remove",
    delta: Delta = "1e-5",
    accountant: Accountant = "rdp",
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Noise from epsilon.

    The smallest noise multiplier at which N releases stay within a budget of EPS.
    """
    target = _number("--target-epsilon", target_epsilon)
    terms = _terms(steps, rate, batch_size, n, sampling, adjacency, delta, accountant)
    from fl_lightning.privacy.calculator import needed

    _show(needed(target, **terms), as_json)


@privacy_app.command(epilog=PLAN_EXAMPLES)
def plan(
    overrides: Overrides = None,
    config_file: ConfigFile = None,
    config_dir: ConfigDir = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """What a run would promise, and whether it can learn.

    Nothing is trained and nothing is recorded. Takes the arguments of `fl-lightning run`. Where the data are not
    there, their published size is dealt out evenly.
    """
    from fl_lightning.config import load_config

    config = load_config(overrides or [], config_file=config_file, config_dir=config_dir)
    from fl_lightning.foresight import foresight
    from fl_lightning.foresight_text import lines

    found = foresight(config)
    typer.echo(json.dumps(found, indent=1, allow_nan=False) if as_json else "\n".join(lines(found)))


def _terms(
    steps: str,
    rate: str | None,
    batch_size: str | None,
    n: str | None,
    sampling: str | None,
    adjacency: str,
    delta: str,
    accountant: str,
) -> dict[str, Any]:
    """The options that both calculators share, as numbers.

    Raises:
        ConfigError: naming the option, its value and the rule.
    """
    from fl_lightning.privacy.calculator import ACCOUNTANTS, SAMPLINGS
    from fl_lightning.records import REACH

    options = {"--sampling": (sampling, SAMPLINGS), "--adjacency": (adjacency, tuple(REACH))}
    for option, (value, known) in {**options, "--accountant": (accountant, ACCOUNTANTS)}.items():
        if value is not None and value not in known:
            raise ConfigError(f"{option}={value}: not known; use one of {', '.join(known)}")
    if rate is not None and (batch_size is not None or n is not None):
        raise ConfigError(f"--rate={rate}: contradicts --batch-size and --n, whose ratio it is; give one of the two")
    if (batch_size is None) != (n is None):
        raise ConfigError("--batch-size and --n: the rate is their ratio; give both, or --rate")
    share = 1.0 if rate is None else _number("--rate", rate)
    if batch_size is not None and n is not None:
        share = _whole("--batch-size", batch_size) / _whole("--n", n)
    small = _number("--delta", delta)
    if small >= 1:
        raise ConfigError(f"--delta={delta}: needs a number below 1, and below 1/n for n protected units")
    if sampling == "full" and share < 1:
        raise ConfigError(f"--rate={share:g}: would be ignored with --sampling=full; leave one of the two out")
    return {
        "steps": _whole("--steps", steps),
        "rate": share,
        "sampling": sampling,
        "adjacency": adjacency,
        "delta": small,
        "accountant": accountant,
    }


def _number(option: str, text: str, *, zero: bool = False) -> float:
    from fl_lightning.config.numbers import to_float

    rule = "needs a finite number of at least 0" if zero else "needs a finite number above 0"
    try:
        value = to_float(text)
    except ValueError:
        raise ConfigError(f"{option}={text}: {rule}") from None
    if not (0 <= value < float("inf")) or (value == 0 and not zero):
        raise ConfigError(f"{option}={text}: {rule}")
    return value


def _whole(option: str, text: str) -> int:
    from fl_lightning.config.numbers import to_int

    try:
        value = to_int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise ConfigError(f"{option}={text}: needs a whole number >= 1")
    return value


def _show(found: Mapping[str, Any], as_json: bool) -> None:
    typer.echo(json.dumps(found, indent=1, allow_nan=False) if as_json else "\n".join(_words(found)))


ACCOUNTANT_NAMES = {
    "rdp": "Renyi differential privacy (the ledger's)",
    "pld": "privacy loss distribution",
    "exact": "exact, of all units in every release",
}

NEIGHBOURS = {
    "add_remove": "one unit is added or removed",
    "zero_out": "one unit contributes nothing",
    "replace_one": "one unit is replaced by any other",
}

SAMPLING_WORDS = {
    "full": "all units in each",
    "poisson": "each unit in each by itself with probability q = {rate:.6g}",
    "without_replacement": "a share q = {rate:.6g} of the units in each, drawn anew",
}


def _words(found: Mapping[str, Any]) -> list[str]:
    """A paragraph and a small table."""
    from fl_lightning.terminal import epsilon_text

    def text(value: float | None) -> str:
        return epsilon_text(float("inf") if value is None else value)

    asked = f", for a budget of {found['target_epsilon']:g}" if "target_epsilon" in found else ""
    count = f"{found['steps']} Gaussian release{'s' if found['steps'] != 1 else ''}"
    z, counted = found["noise_multiplier"], found["accountant_multiplier"]
    doubled = (
        f"Replacing a unit can move a clipped vector by 2C, so accountants count noise / sensitivity = {counted:.5g}."
        if counted != z
        else "The sensitivity is C, so accountants count the same number."
    )
    lines = [
        f"epsilon {text(found['epsilon'])} at delta {found['delta']:g}{asked}",
        f"{count}, {SAMPLING_WORDS[found['sampling']].format(rate=found['rate'])}; neighbouring data differ in that "
        f"{NEIGHBOURS[found['adjacency']]} ({found['adjacency']}).",
        f"Noise multiplier {z:.5g}: the noise's standard deviation over the clip bound C. {doubled}",
    ]
    readings = {name: value for name, value in found["readings"].items() if value is not None or found["infinite"]}
    if found["infinite"]:
        return [*lines, "Without noise there is no privacy."]
    width = max(len(ACCOUNTANT_NAMES[name]) for name in readings)
    return [*lines, "", *(f"{ACCOUNTANT_NAMES[name]:<{width}}  {text(value)}" for name, value in readings.items())]

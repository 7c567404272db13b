"""The command line. Nothing heavy is imported before a command needs it: `--help` answers at once.

Exit codes: 0 done; 1 something broke; 2 the user's to mend, with one line `error: ...`; 130 interrupted.
"""

import os
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from fl_lightning import __version__
from fl_lightning.cli_compare import COMPARE_EXAMPLES, compare
from fl_lightning.cli_options import ConfigDir, ConfigFile, Debug, Output, Overrides, Quiet, Uri
from fl_lightning.cli_output import check_output, write_json
from fl_lightning.cli_privacy import privacy_app
from fl_lightning.cli_sweep import REPORT_EXAMPLES, SWEEP_EXAMPLES, report, sweep
from fl_lightning.cli_verify import VERIFY_EXAMPLES, verify
from fl_lightning.errors import ConfigError, FLError

RUN_EXAMPLES = """\b
Examples:
  fl-lightning run
  fl-lightning run algorithm=fedsam algorithm.local.rho=0.1 partition=dirichlet partition.alpha=0.1
  fl-lightning run data=fashion_mnist data.root=~/data fl.rounds=50 --output result.json
  fl-lightning run algorithm=dp_fedsam privacy.target_epsilon=8
  fl-lightning run experiment=sam_afl_cifar10 algorithm=fedavg

`fl-lightning config --keys` lists every key with its bounds and default.
"""

RESUME_EXAMPLES = """\b
Examples:
  fl-lightning resume 4f2c0a...
  fl-lightning resume 4f2c0a... --uri sqlite:///other/mlflow.db --output result.json

A checkpoint is written before the first round and every fl.checkpoint_every rounds, into mlruns/checkpoints/RUN_ID.
"""

CONFIG_EXAMPLES = """\b
Examples:
  fl-lightning config algorithm=fedsam > saved.yaml
  fl-lightning run --config saved.yaml seed=43
  fl-lightning config --keys privacy
"""

DATA_EXAMPLES = """\b
Examples:
  fl-lightning data prepare fashion_mnist
  fl-lightning data prepare cifar10 data.root=~/data
"""

UI_EXAMPLES = """\b
Examples:
  fl-lightning ui
  fl-lightning ui --uri sqlite:///other/mlflow.db --port 5001
"""

INTERRUPTED = 130
"""A shell's exit code for Ctrl-C."""

app = typer.Typer(
    name="fl-lightning",
    help="A laboratory for private federated learning.",
    epilog="\b\nStart with:\n  fl-lightning run\n  fl-lightning run --help",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
data_app = typer.Typer(help="Download and check data sets.", rich_markup_mode=None)
app.add_typer(data_app, name="data")
app.add_typer(privacy_app, name="privacy")


def _print_version(value: bool) -> None:
    if value:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", help="print the version", callback=_print_version)] = False,
    debug: Debug = False,
) -> None:
    """A laboratory for private federated learning."""


@app.command(epilog=RUN_EXAMPLES)
def run(
    overrides: Overrides = None,
    config_file: ConfigFile = None,
    config_dir: ConfigDir = None,
    output: Output = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Train one federation and record it in MLflow.

    GROUP=OPTION chooses a preset (groups: algorithm data partition model privacy engine experiment), KEY=VALUE sets a
    value, ~KEY returns one to its default.
    """
    from fl_lightning.config import load_config

    config = load_config(overrides or [], config_file=config_file, config_dir=config_dir)
    file = check_output(output)
    if not quiet:
        for note in config.notes:
            typer.echo(f"note: {note}", err=True)
    from fl_lightning.session import run as run_federation

    if quiet:
        result = run_federation(config)
    else:
        from fl_lightning.terminal import display

        with display(sys.stdout) as observer:
            result = run_federation(config, observers=[observer])
    if file is not None:
        write_json(file, result.to_dict())
        if not quiet:
            typer.echo(f"result: {file}")


@app.command(epilog=RESUME_EXAMPLES)
def resume(
    run_id: Annotated[str, typer.Argument(metavar="RUN_ID", help="as `fl-lightning run` printed it first")],
    uri: Uri = None,
    output: Output = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Go on with a run that was stopped or killed, from its last checkpoint, to the result it would have had."""
    file = check_output(output)
    from fl_lightning.session import resume as resume_federation

    if quiet:
        result = resume_federation(run_id, uri=uri)
    else:
        from fl_lightning.terminal import display

        with display(sys.stdout) as observer:
            result = resume_federation(run_id, uri=uri, observers=[observer])
    if file is not None:
        write_json(file, result.to_dict())
        if not quiet:
            typer.echo(f"result: {file}")


@app.command(epilog=CONFIG_EXAMPLES)
def config(
    overrides: Overrides = None,
    config_file: ConfigFile = None,
    config_dir: ConfigDir = None,
    keys: Annotated[
        bool, typer.Option("--keys", help="list the keys instead; arguments are the beginnings of those wanted")
    ] = False,
    debug: Debug = False,
) -> None:
    """Print the composed, validated configuration as YAML; `--config` loads it again."""
    if keys:
        from fl_lightning.config.listing import list_keys

        for line in list_keys(overrides or []):
            typer.echo(line)
        return
    import yaml

    from fl_lightning.config import load_config

    composed = load_config(overrides or [], config_file=config_file, config_dir=config_dir)
    typer.echo(yaml.safe_dump(composed.to_dict(), sort_keys=False, allow_unicode=True), nl=False)


app.command(epilog=SWEEP_EXAMPLES)(sweep)
app.command(epilog=REPORT_EXAMPLES)(report)
app.command(epilog=COMPARE_EXAMPLES)(compare)
app.command(epilog=VERIFY_EXAMPLES)(verify)


@data_app.command(epilog=DATA_EXAMPLES)
def prepare(
    name: Annotated[str, typer.Argument(metavar="NAME", help="a data set, as in data=NAME")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="data.root=DIR", help="where its files are or shall be")
    ] = None,
    debug: Debug = False,
) -> None:
    """Make a data set ready once, so that runs need no network."""
    from fl_lightning.config import load_config
    from fl_lightning.data import prepare as prepare_data

    for override in overrides or []:
        if not override.startswith("data.root="):
            raise ConfigError(f"{override}: would be ignored; only data.root=DIR matters here")
    root = getattr(load_config([f"data={name}", *(overrides or [])]).data, "root", Path.cwd())
    typer.echo(f"{name}: ready in {prepare_data(name, root)}; use it with data={name} data.root={root}")


@app.command(epilog=UI_EXAMPLES)
def ui(
    uri: Uri = None,
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="port on this machine")] = 5000,
    debug: Debug = False,
) -> None:
    """Serve the MLflow pages of the store; stop with Ctrl-C."""
    from fl_lightning.tracking import resolve_uri, ui_command, ui_environment

    command = ui_command(resolve_uri(uri), port)
    typer.echo(f"http://127.0.0.1:{port}")
    sys.stdout.flush()
    os.execvpe(command[0], command, ui_environment())


def invoke(arguments: Sequence[str]) -> int:
    """Runs one command line and returns its exit code; every failure becomes one line on stderr."""
    command = typer.main.get_command(app)
    try:
        code = command.main(args=list(arguments) or ["--help"], prog_name="fl-lightning", standalone_mode=False)
        sys.stdout.flush()
        if code == INTERRUPTED:  # typer may turn Ctrl-C into this code by itself
            raise KeyboardInterrupt
        return code if isinstance(code, int) else 0
    except FLError as error:
        return _fail("error: " + _one_line(error), 2)
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted", INTERRUPTED)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader left; nothing more to flush
        return 1
    except Exception as error:
        if hasattr(error, "format_message"):  # a usage error of typer or of the click it stands on
            return _fail(f"error: {_one_line(error.format_message())}; see `fl-lightning --help`", 2)
        return _fail(f"{type(error).__name__}: {_one_line(error)}", 1)


def _one_line(error: object) -> str:
    return " ".join(str(error).split()).rstrip(".")


def _fail(line: str, code: int) -> int:
    if os.environ.get("FL_DEBUG", "0") != "0":
        traceback.print_exc()
    print(line, file=sys.stderr, flush=True)
    return code


def main() -> NoReturn:
    """The console script."""
    if cache := os.environ.get("FL_CACHE_DIR"):
        os.environ["FL_CACHE_DIR"] = os.path.abspath(os.path.expanduser(cache))  # a sweep's workers start elsewhere
    code = invoke(sys.argv[1:])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is said: another Ctrl-C would only spoil the libraries' goodbyes
    sys.exit(code)


if __name__ == "__main__":
    main()

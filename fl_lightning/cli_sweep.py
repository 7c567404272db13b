"""`fl-lightning sweep` and `fl-lightning report`."""

from pathlib import Path
from typing import Annotated

import typer

from fl_lightning.cli_compare import FormatOption, Target, show
from fl_lightning.cli_options import ConfigDir, ConfigFile, Debug, Output, Overrides, Quiet, Uri
from fl_lightning.cli_output import check_output, write_json
from fl_lightning.errors import ConfigError

SWEEP_EXAMPLES = """\b
Examples:
  fl-lightning sweep sweep=demo
  fl-lightning sweep sweep=rho data=fashion_mnist fl.rounds=50 sweep.seeds=[42,43,44]
  fl-lightning sweep sweep=my_sweep.yaml sweep.resources.cpu=2 --output table.json
  fl-lightning sweep sweep=iso_budget privacy.target_epsilon=2 sweep.skip_hopeless=true
  fl-lightning sweep sweep=rho ray.address=auto sweep.storage=/shared/me sweep.resources.gpu=0.5
  fl-lightning sweep sweep=mine.yaml sweep.search=optuna sweep.num_samples=20 sweep.metric=[validation_accuracy,epsilon]
  fl-lightning sweep sweep=my_sweep.yaml sweep.num_samples=16 sweep.equal_budget=true
  fl-lightning sweep sweep=my_sweep.yaml sweep.scheduler=pbt sweep.num_samples=8 sweep.perturb_every=5
  fl-lightning sweep --resume 3f2a1b0c --output table.json

\b
A sweep file:
  space:
    algorithm: {grid: [fedavg, fedsam]}
    algorithm.local.lr: {loguniform: [0.001, 0.1]}
  seeds: [42, 43]
  num_samples: 4
  overrides: [partition=dirichlet, partition.alpha=0.1]
"""

REPORT_EXAMPLES = """\b
Examples:
  fl-lightning report 4f2c0a...
  fl-lightning report 4f2c0a... --out tables/ --target 0.8
  fl-lightning report 4f2c0a... --format html
  fl-lightning report 4f2c0a... --format latex > table.tex
"""


def sweep(
    overrides: Overrides = None,
    config_file: ConfigFile = None,
    config_dir: ConfigDir = None,
    resume: Annotated[
        str | None, typer.Option("--resume", metavar="SWEEP_ID", help="go on with a sweep that was stopped or killed")
    ] = None,
    uri: Annotated[
        str | None,
        typer.Option("--uri", help="with --resume: MLflow store; default MLFLOW_TRACKING_URI, else ./mlruns"),
    ] = None,
    output: Output = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Run many federations with Ray Tune: algorithms, settings, seeds.

    sweep=NAME or sweep=FILE.yaml says what varies, sweep.KEY=VALUE changes it; other arguments change the run that all
    trials start from. Every value is checked before the first trial starts, and every private cell's plan is shown:
    its promise, and whether it can learn. Private runs of different promises or budgets share no table and no figure.
    ray.address=auto runs the trials on a Ray cluster, whose nodes are looked at before.
    --resume repeats no finished trial, goes on with the others from their last round and tries failed ones again; of a
    sweep with nothing left to do it shows the table again. Exit code 1 if a trial failed.
    """
    file = check_output(output)
    if resume is not None:
        places = [item for item in overrides or [] if item.startswith("ray.")]
        others = [item for item in overrides or [] if item not in places]
        given = [*others, *(["--config"] if config_file else []), *(["--config-dir"] if config_dir else [])]
        if given:
            raise ConfigError(
                f"{given[0]}: would be ignored with --resume, for the sweep goes on as it began; remove it"
            )
        from fl_lightning.config import load_ray
        from tune.resuming import resume_sweep

        result = resume_sweep(resume, uri=uri, ray_config=load_ray(places), quiet=quiet)
    else:
        if uri is not None:
            raise ConfigError(f"--uri={uri}: would be ignored without --resume; set tracking.uri={uri}")
        from fl_lightning.config import load_sweep, validate_space

        config, base = load_sweep(overrides or [], config_dir=config_dir)
        cells = validate_space(base, config, config_file=config_file, config_dir=config_dir)
        from tune.launch import run_sweep

        result = run_sweep(cells[0].config, config, cells, quiet=quiet)
    if file is not None:
        write_json(file, result)
    if result["failed"]:  # run_sweep has said which and why
        raise typer.Exit(1)


def report(
    sweep_id: Annotated[str, typer.Argument(metavar="SWEEP_ID", help="as `fl-lightning sweep` printed it")],
    uri: Uri = None,
    experiment: Annotated[str | None, typer.Option("--experiment", help="MLflow experiment; default: all")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="folder for the files; default mlruns/reports/SWEEP_ID")
    ] = None,
    format: FormatOption = "md",
    target: Target = None,
    debug: Debug = False,
) -> None:
    """Compare a sweep's trials: tables over seeds with tests and costs as markdown and CSV, accuracy curves as PNG.

    --format latex adds booktabs tables, --format html one page with everything in it; --format chooses what is printed.
    The same files are kept with the sweep in MLflow.
    """
    from fl_lightning.analysis.report import make_report

    place = out.absolute() if out else None
    result = make_report(sweep_id, uri=uri, experiment=experiment, out=place, format=format, target=target)
    show(result, format)

"""The options that several commands share."""

import os
from pathlib import Path
from typing import Annotated

import typer


def _set_debug(value: bool) -> None:
    if value:
        os.environ["FL_DEBUG"] = "1"  # the environment reaches worker processes too


Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="OVERRIDE", help="GROUP=OPTION, KEY=VALUE or ~KEY", show_default=False),
]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", metavar="FILE.yaml", help="start from a saved full or partial configuration")
]
ConfigDir = Annotated[
    Path | None,
    typer.Option("--config-dir", metavar="DIR", help="folder of your own presets, algorithm/NAME.yaml"),
]
Output = Annotated[Path | None, typer.Option("--output", metavar="FILE.json", help="write the result as JSON")]
Quiet = Annotated[bool, typer.Option("--quiet", help="print errors only")]
Debug = Annotated[
    bool, typer.Option("--debug", help="show tracebacks; the same as FL_DEBUG=1", callback=_set_debug, is_eager=True)
]
Uri = Annotated[str | None, typer.Option("--uri", help="MLflow store; default MLFLOW_TRACKING_URI, else ./mlruns")]

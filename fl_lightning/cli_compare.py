"""`fl-lightning compare`, and the options it shares with `fl-lightning report`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from fl_lightning.cli_options import Debug, Uri

COMPARE_EXAMPLES = """\b
Examples:
  fl-lightning compare 4f2c0a... 91be77...
  fl-lightning compare 4f2c0a 91be77 03d1f9 --target 0.8 --format html

A run is named by its id, or by the beginning of its id.
"""

FormatOption = Annotated[
    Literal["md", "latex", "csv", "html"], typer.Option("--format", help="what is printed, or written and named")
]
Target = Annotated[
    float | None,
    typer.Option("--target", min=0.0, max=1.0, help="a test accuracy: adds rounds and seconds until it was reached"),
]


def compare(
    run_ids: Annotated[list[str], typer.Argument(metavar="RUN RUN ...", help="two or more runs")],
    uri: Uri = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="folder for the files; default mlruns/reports/compare-*")
    ] = None,
    format: FormatOption = "md",
    target: Target = None,
    debug: Debug = False,
) -> None:
    """Compare single runs: what differs in their configurations, their final numbers, costs, epsilons and curves.

    Runs of different promises or budgets share no table of results and no figure; every epsilon is shown with its unit.
    """
    from fl_lightning.analysis.compare import compare_runs

    place = out.absolute() if out else None
    show(compare_runs(run_ids, uri=uri, out=place, format=format, target=target), format)


def show(result: Mapping[str, Any], format: str) -> None:
    """Prints the format's text. Markdown is followed by the paths; a page is only named; else paths go to stderr."""
    key = {"md": "markdown"}.get(format, format)
    if format != "html":
        typer.echo(Path(result[key]).read_text(encoding="utf-8"), nl=format == "md")
    names = ["markdown", "csv", *(name for name in ("latex", "html") if name in result)]
    for name in (
        *names,
        *(key for key in result if key.startswith(("pareto", "curves", "validation", "epsilon", "costs"))),
    ):
        typer.echo(f"{name.replace('_', ' ')}: {result[name]}", err=format in ("latex", "csv"))

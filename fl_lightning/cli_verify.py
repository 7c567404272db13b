"""`fl-lightning verify`."""

import json
from typing import Annotated

import typer

from fl_lightning.cli_options import Debug
from fl_lightning.errors import ConfigError

VERIFY_EXAMPLES = """\b
Examples:
  fl-lightning verify
  fl-lightning verify fedsam
  fl-lightning verify engines --json
  fl-lightning verify quadratics

\b
NAME is a row of the table or a part of such names: an algorithm, by-hand,
engines, free, update, sample. quadratics is a table of its own.
"""

QUADRATICS = "quadratics"


def verify(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="rows to run; default: all identities", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the rows as JSON")] = False,
    debug: Debug = False,
) -> None:
    """Check the algorithms on this machine: identities between them, and each against its equations.

    Every row trains real federations in double precision and gives the largest difference found. Exit code 1 if a row
    fails. `verify quadratics` runs the clipping paper's examples until they settle, against their closed forms.
    """
    from fl_lightning.verify.checks import all_checks
    from fl_lightning.verify.quadratics import Claims
    from fl_lightning.verify.table import chosen, closing, heading, judged, line, report

    claims = Claims()
    checks = [*all_checks(), *claims.checks()] if name not in (None, QUADRATICS) else []
    if name is None:
        selected = all_checks()
    elif name == QUADRATICS:
        selected = claims.checks()
    elif not (selected := chosen(checks, name)):
        from fl_lightning.config.faults import nearest

        near = nearest(name, {QUADRATICS, *(part for check in checks for part in (check.name, *check.name.split("/")))})
        hint = f"did you mean {near}?" if near else "`fl-lightning verify` lists the rows"
        raise ConfigError(f"verify {name}: no such row; {hint}")
    width = max(len(check.name) for check in selected)
    if not as_json:
        typer.echo(heading(width))
    rows = []
    for row in judged(selected):
        rows.append(row)
        if not as_json:
            typer.echo(line(row, width))
    if as_json:
        found = report(rows)
        typer.echo(json.dumps(found | {"claim_2_3": claims.to_list()} if claims.settled else found, indent=1))
    else:
        if claims.settled:
            typer.echo("\n" + "\n".join(claims.table()) + "\n")
        typer.echo(closing(rows))
    if not all(row.passed for row in rows):
        raise typer.Exit(1)

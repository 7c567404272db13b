"""The final tables on a terminal or in a log."""

from collections.abc import Sequence

from fl_lightning.analysis.promises import Family, mismatch
from fl_lightning.analysis.report_text import rows_of, tables
from fl_lightning.analysis.tables import Own, Row, caption, cells, columns


def print_table(rows: Sequence[Row], own: Own, found: Sequence[Family]) -> None:
    """The settings' table with its caption: drawn on a terminal, markdown elsewhere; one for each promise and budget.

    Args:
        rows: from `settings_table`.
        own: as in `caption`.
        found: from `families`.
    """
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        print(tables(rows, found, own), flush=True)
        return
    if said := mismatch(found):
        console.print(said, highlight=False)
    for family in found:
        own_rows = rows_of(family, rows)
        headings = columns(own_rows)
        title = family.title(family.budgets[0] if len(family.budgets) == 1 else None) if len(found) > 1 else None
        table = Table(title=title, title_justify="left", box=None, header_style="bold")
        for heading in headings:
            table.add_column(heading, overflow="fold")
        for row in own_rows:
            table.add_row(*cells(row, headings))
        console.print(table)
        for line in caption(own_rows, own):
            console.print(line, style="dim", highlight=False)

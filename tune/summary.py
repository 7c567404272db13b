"""The final table on a terminal or in a log."""

from collections.abc import Sequence

from fl_lightning.analysis.tables import Own, Row, caption, cells, columns, settings_markdown


def print_table(rows: Sequence[Row], own: Own) -> None:
    """The settings' table with its caption: drawn on a terminal, markdown elsewhere."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        print(settings_markdown(rows, own), flush=True)
        return
    headings = columns(rows)
    table = Table(box=None, header_style="bold")
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*cells(row, headings))
    console.print(table)
    for line in caption(rows, own):
        console.print(line, style="dim", highlight=False)

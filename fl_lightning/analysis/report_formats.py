"""The formats of a report and the files they are written to."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from fl_lightning.analysis.document import Block, to_markdown

Format = Literal["md", "latex", "csv", "html"]
KEYS: dict[Format, str] = {"md": "markdown", "latex": "latex", "csv": "csv", "html": "html"}
"""Each format's key among the paths of a report."""


def written(blocks: Sequence[Block], out: Path, format: Format, caveats: Sequence[str] = ()) -> dict[str, Path]:
    """Writes report.md, and report.tex or report.html where asked for; their paths by key.

    Args:
        blocks: the document; its pictures lie in `out` or are embedded.
        out: the folder.
        format: "md" and "csv" ask for nothing more: a table of numbers is not made of texts.
        caveats: notes that a page shows so that they catch the eye.
    """
    texts = {"markdown": ("report.md", to_markdown(blocks))}
    if format == "latex":
        from fl_lightning.analysis.latex import to_latex

        texts["latex"] = ("report.tex", to_latex(blocks))
    if format == "html":
        from fl_lightning.analysis.page import to_html

        texts["html"] = ("report.html", to_html(blocks, caveats=caveats))
    for name, text in texts.values():
        (out / name).write_text(text, encoding="utf-8")
    return {key: out / name for key, (name, _) in texts.items()}

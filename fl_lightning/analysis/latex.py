r"""A report's tables as LaTeX: booktabs, every special character escaped, the best values of one promise in bold.

The file has no preamble: \input it in a document that has \usepackage{booktabs} and, for wide tables, graphicx.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from fl_lightning.analysis.document import Block, Heading, Notes, Table, Text

SPECIAL = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': "''",
    "\u00b1": r"$\pm$",
    "\u03b4": r"$\delta$",
    "\u03b5": r"$\varepsilon$",
    "\u2212": r"$-$",
    "\u00a0": "~",
}

HEAD = r"""% Needs \usepackage{booktabs,graphicx}; best values of one promise and budget are bold.
"""


def escape(text: str) -> str:
    r"""The text with everything that LaTeX would take for a command written out; line breaks become spaces.

    >>> escape("50% of p_k & {x}")
    '50\\% of p\\_k \\& \\{x\\}'
    """
    escaped = "".join(SPECIAL.get(character, character) for character in " ".join(text.split()))
    return escaped.replace("--", "-{}-")  # two hyphens would become one dash


@dataclass
class _Open:
    """A table whose notes may still come."""

    table: Table
    name: str
    notes: list[str] = field(default_factory=list)


def to_latex(blocks: Sequence[Block]) -> str:
    """The document's tables, each with its notes below it; headings and paragraphs are comments between them."""
    parts, last = [HEAD], ""
    opened: _Open | None = None
    for block in blocks:
        if opened is not None and isinstance(block, Notes):
            opened.notes += block.lines
            continue
        if opened is not None:
            parts.append(_table(opened))
            opened = None
        match block:
            case Heading(text, _):
                last = text
                parts.append(f"% {' '.join(text.split())}\n")
            case Text(text):
                parts.append(f"% {' '.join(text.split())}\n")
            case Notes(lines):
                parts += [f"% {' '.join(line.split())}\n" for line in lines]
            case Table():
                opened = _Open(block, block.name or last)
    if opened is not None:
        parts.append(_table(opened))
    return "\n".join(parts)


def _table(opened: _Open) -> str:
    table = opened.table
    lines = [r"\begin{table}[htbp]", r"  \centering", rf"  \caption{{{escape(opened.name)}}}"]
    lines += [r"  \resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%"]
    lines += [rf"  \begin{{tabular}}{{{'l' * len(table.headings)}}}", r"    \toprule"]
    lines += [_row([escape(heading) for heading in table.headings]), r"    \midrule"]
    for number, line in enumerate(table.lines):
        cells = [
            rf"\textbf{{{escape(cell)}}}" if (number, column) in table.best | table.marked else escape(cell)
            for column, cell in enumerate(line)
        ]
        lines.append(_row(cells))
    lines += [r"    \bottomrule", r"  \end{tabular}}"]
    if opened.notes:
        lines += [r"  \par\smallskip", r"  \begin{minipage}{\linewidth}\footnotesize"]
        lines += [rf"    {escape(note)}\par" for note in opened.notes]
        lines += [r"  \end{minipage}"]
    return "\n".join([*lines, r"\end{table}"]) + "\n"


def _row(cells: Sequence[str]) -> str:
    # A cell that begins with a bracket would be taken for an argument of the line break before it.
    safe = [f"{{}}{cell}" if cell.startswith(("[", "*")) else cell for cell in cells]
    return "    " + " & ".join(safe) + r" \\"

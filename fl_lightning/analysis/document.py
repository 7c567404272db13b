"""A report as blocks, whatever format they are written in; here as markdown."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fl_lightning.analysis.tables import markdown


@dataclass(frozen=True)
class Heading:
    """A heading of level 1 (the title) or below."""

    text: str
    level: int = 2


@dataclass(frozen=True)
class Text:
    """One paragraph."""

    text: str


@dataclass(frozen=True)
class Notes:
    """What must be said of the table above it, a sentence a line."""

    lines: Sequence[str]


@dataclass(frozen=True)
class Table:
    """A table of texts.

    Attributes:
        headings: one a column.
        lines: a row each, as many texts as headings.
        best: (row, column) of the cells that are the best among those that compare; bold where a format has it.
        name: what it shows, in a few words.
        marked: (row, column) of the cells of settings on a Pareto front; bold where a format has it, and no best.
    """

    headings: Sequence[str]
    lines: Sequence[Sequence[str]]
    best: frozenset[tuple[int, int]] = frozenset()
    name: str = ""
    marked: frozenset[tuple[int, int]] = frozenset()


@dataclass(frozen=True)
class Figure:
    """A picture, what it shows, and its caveats.

    Attributes:
        path: of the PNG file.
        words: what it shows.
        notes: sentences that belong to it and that the picture itself does not hold.
        extra: not part of the markdown report.
    """

    path: Path
    words: str
    notes: Sequence[str] = ()
    extra: bool = False


Block = Heading | Text | Notes | Table | Figure


def to_markdown(blocks: Sequence[Block]) -> str:
    """The document as markdown; figures lie beside it."""
    parts = []
    for block in blocks:
        match block:
            case Heading(text, level):
                parts.append(f"{'#' * level} {text}\n")
            case Text(text):
                parts.append(f"{text}\n")
            case Notes(lines):
                parts.append("\n".join(lines) + "\n")
            case Table(headings, lines):
                parts.append(markdown(headings, lines))
            case Figure(path, words, notes, False):
                parts.append(f"![{words}]({path.name})\n" + "".join(f"\n{note}\n" for note in notes))
    return "\n".join(parts)

"""A report as one HTML page that needs nothing else: styles inline, pictures inside, no script, no request."""

import base64
from collections.abc import Sequence
from html import escape

from fl_lightning.analysis.document import Block, Figure, Heading, Notes, Table, Text

STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, "Segoe UI", Helvetica, Arial, sans-serif; color: #111; background: #fff;
  max-width: 70rem; margin: 2rem auto; padding: 0 1.25rem; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 1rem; padding-bottom: .5rem; border-bottom: 2px solid #0072B2; }
h2 { font-size: 1.2rem; margin: 2.2rem 0 .6rem; }
h3 { font-size: 1.02rem; margin: 1.6rem 0 .5rem; }
p { max-width: 60rem; margin: .5rem 0; }
.scroll { overflow-x: auto; margin: .8rem 0 .3rem; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; vertical-align: top; padding: .34rem 1.1rem .34rem 0; }
td.short { white-space: nowrap; }
thead th { border-top: 2px solid #111; border-bottom: 1px solid #111; vertical-align: bottom; }
tbody tr + tr td { border-top: 1px solid #ddd; }
tbody tr:last-child td { border-bottom: 2px solid #111; }
.best, .front { font-weight: 700; }
.best::after { content: " \\2605"; font-size: .75em; }
.notes { font-size: .82rem; color: #333; margin: .2rem 0 1rem; padding: 0; list-style: none; max-width: 60rem; }
.notes li { margin: .15rem 0; }
.caveat { border-left: 4px solid #D55E00; padding-left: .6rem; font-weight: 600; }
figure { margin: 1.4rem 0; }
figure img { max-width: 100%; max-height: 36rem; height: auto; width: auto; display: block; }
figcaption { font-size: .85rem; color: #333; margin-top: .3rem; }
@page { margin: 15mm; }
@media print {
  html { font-size: 9.5pt; }
  body { max-width: none; margin: 0; padding: 0; font-size: 9.5pt; }
  .scroll { overflow: visible; }
  table { font-size: 8pt; width: 100%; }
  th, td { padding-right: .5rem; }
  td.short { white-space: normal; }
  h2, h3 { break-after: avoid; }
  tr, figure { break-inside: avoid; }
  thead { display: table-header-group; }
  figure img { max-height: 200mm; }
}
"""

BEST = "Bold with a star: the best mean of those with one promise and one budget."

SHORT = 30
"""Characters of a cell that is kept on one line."""

KINDS = {".png": "image/png", ".svg": "image/svg+xml"}
"""Of the pictures that are embedded, by the ends of their files' names."""

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
"""Enforced by the browser: the page can ask nobody for anything."""


def to_html(blocks: Sequence[Block], *, caveats: Sequence[str] = ()) -> str:
    """The document as a page; pictures are read from their files and embedded.

    Args:
        blocks: of the document.
        caveats: notes among them that must catch the eye.
    """
    title = next((block.text for block in blocks if isinstance(block, Heading)), "report")
    parts = [_block(block, frozenset(caveats)) for block in blocks]
    if any(isinstance(block, Table) and block.best for block in blocks):
        parts.append(f'<ul class="notes"><li>{BEST}</li></ul>')
    body = "\n".join(parts)
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _block(block: Block, caveats: frozenset[str]) -> str:
    match block:
        case Heading(text, level):
            return f"<h{level}>{escape(text)}</h{level}>"
        case Text(text):
            return f"<p>{escape(text)}</p>"
        case Notes(lines):
            return f'<ul class="notes">{"".join(_note(line, caveats) for line in lines)}</ul>'
        case Table():
            return _table(block)
        case Figure(path, words, notes, _):
            picture = base64.b64encode(path.read_bytes()).decode()
            said = f'<ul class="notes">{"".join(_note(note, caveats) for note in notes)}</ul>' if notes else ""
            return (
                f'<figure><img src="data:{KINDS[path.suffix]};base64,{picture}" alt="{escape(words)}">'
                f"<figcaption>{escape(words)}{said}</figcaption></figure>"
            )


def _note(text: str, caveats: frozenset[str]) -> str:
    return f'<li class="caveat">{escape(text)}</li>' if text in caveats else f"<li>{escape(text)}</li>"


def _table(table: Table) -> str:
    head = "".join(f'<th scope="col">{escape(heading)}</th>' for heading in table.headings)
    rows, marks = [], {"best": table.best, "front": table.marked}
    for number, line in enumerate(table.lines):
        own = [[mark for mark, at in marks.items() if (number, column) in at] for column in range(len(line))]
        cells = [_cell(cell, mark) for cell, mark in zip(line, own, strict=True)]
        rows.append(f"<tr>{''.join(cells)}</tr>")
    body = "\n".join(rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>'


def _cell(text: str, marks: Sequence[str]) -> str:
    classes = [*(["short"] if len(text) <= SHORT else []), *marks]
    return f'<td class="{" ".join(classes)}">{escape(text)}</td>' if classes else f"<td>{escape(text)}</td>"

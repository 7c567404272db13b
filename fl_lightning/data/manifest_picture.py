"""A partition as a picture: client sizes as bars above a map of each client's label mix, one column per client.

Written as SVG by hand: drawing it by matplotlib would take 0.6 s, a fifth of what a small federation trains for.
K clients, C classes; lengths in pixels.
"""

from collections.abc import Iterator
from html import escape
from typing import Any

import numpy as np

STOPS = np.array([[216, 231, 245], [148, 196, 223], [74, 152, 201], [23, 100, 171], [8, 48, 107]], dtype=float)
"""From light to dark in one hue, so that it reads without colour vision; white is a class that is absent."""

LEVELS = 32
LEFT, TOP, RIGHT, BOTTOM = 74, 62, 96, 52
BARS, GAP, CELL = 110, 14, 28
FEW = 20
"""Up to so many clients and classes each cell says its number."""
SEPARATE = 60
"""Up to so many clients there is a white line between two."""
MOST_TICKS = 21


def partition_svg(record: dict[str, Any]) -> str:
    """The picture of what `manifest` gives."""
    counts = np.array(record["label_histogram"])
    (clients, classes), sizes = counts.shape, counts.sum(axis=1)
    width, height = int(np.clip(CELL * 1.6 * clients, 470, 1000)), int(np.clip(CELL * classes, 200, 700))
    below = TOP + BARS + GAP
    total = (LEFT + width + RIGHT, below + height + BOTTOM)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total[0]} {total[1]}" width="{total[0]}" '
        f'height="{total[1]}" role="img" font-family="Helvetica, Arial, sans-serif" font-size="12" fill="#111">',
        f"<title>{escape(_heading(record)[0])}</title>",
        '<rect width="100%" height="100%" fill="#fff"/>',
        *(_text(LEFT, 22 + 18 * n, line, size=13 - n, anchor="start") for n, line in enumerate(_heading(record))),
        *_bars(sizes, width),
        *_map(counts, sizes, width, height, below),
        *_scale(LEFT + width + 18, below, height),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _heading(record: dict[str, Any]) -> tuple[str, str]:
    settings = ", ".join(f"{key}={value}" for key, value in record["parameters"].items() if key != "path")
    numbers, samples = record["heterogeneity"], sum(record["sizes"])
    kind = f"{record['kind']}{f' ({settings})' if settings else ''}"
    apart = f", {record['validation']['num_samples']} held out" if record["validation"] else ""
    return (
        f"{kind}: {record['num_clients']} clients, {samples} samples{apart}",
        f"mean EMD {numbers['mean_emd']:.2f} of 2, mean label entropy {numbers['mean_label_entropy']:.2f} of "
        f"{numbers['global_label_entropy']:.2f} nats, size Gini {numbers['size_gini']:.2f}",
    )


def _bars(sizes: np.ndarray, width: int) -> Iterator[str]:
    """Client sizes, their mean dashed."""
    step = _step(float(sizes.max()), 4)
    high = step * np.ceil(sizes.max() / step)
    base, one, wide = TOP + BARS, width / len(sizes), 0.8 if len(sizes) <= SEPARATE else 1.0
    for value in np.arange(0, high + step / 2, step):
        y = base - BARS * value / high
        yield f'<path d="M{LEFT} {y:.1f}h{width}" stroke="#ddd"/>'
        yield _text(LEFT - 8, y + 4, f"{value:.0f}", anchor="end")
    parts = [
        f"M{LEFT + one * (k + (1 - wide) / 2):.2f} {base}v{-BARS * size / high:.2f}h{one * wide:.2f}V{base}z"
        for k, size in enumerate(sizes)
    ]
    yield f'<path d="{"".join(parts)}" fill="#4c566a"/>'
    mean = base - BARS * sizes.mean() / high
    yield f'<path d="M{LEFT} {mean:.1f}h{width}" stroke="#000" stroke-dasharray="5 3"/>'
    yield _turned(20, TOP + BARS / 2, "samples (dashed: mean)")


def _map(counts: np.ndarray, sizes: np.ndarray, width: int, height: int, top: int) -> Iterator[str]:
    """Each client's share of each class, one path for each shade."""
    clients, classes = counts.shape
    shares = counts / sizes.clip(min=1)[:, None]  # a client may have nothing
    shades = np.where(counts > 0, (shares * (LEVELS - 1)).round().astype(int), -1)
    one = (width / clients, height / classes)
    yield f'<g transform="translate({LEFT} {top + height}) scale({one[0]:.5g} {-one[1]:.5g})">'
    for shade in np.unique(shades[shades >= 0]):
        cells = "".join(f"M{k} {c}h1v1h-1z" for k, c in np.argwhere(shades == shade).tolist())
        yield f'<path d="{cells}" fill="{_colour(shade)}" shape-rendering="crispEdges"/>'
    yield "</g>"
    if clients <= SEPARATE:
        edges = "".join(f"M{LEFT + one[0] * k:.2f} {top}v{height}" for k in range(1, clients))
        yield f'<path d="{edges}" stroke="#fff" stroke-width="2"/>'
    if clients <= FEW and classes <= FEW:
        for k, c in np.argwhere(counts > 0).tolist():
            ink = "#fff" if shares[k, c] > 0.58 else "#111"
            x, y = LEFT + one[0] * (k + 0.5), top + height - one[1] * (c + 0.5) + 4
            yield _text(x, y, str(counts[k, c]), size=10, fill=ink)
    yield f'<rect x="{LEFT}" y="{top}" width="{width}" height="{height}" fill="none" stroke="#111"/>'
    for k in _ticks(clients):
        yield _text(LEFT + one[0] * (k + 0.5), top + height + 17, str(k))
    for c in _ticks(classes):
        yield _text(LEFT - 8, top + height - one[1] * (c + 0.5) + 4, str(c), anchor="end")
    yield _text(LEFT + width / 2, top + height + 40, "client")
    yield _turned(20, top + height / 2, "class")


def _scale(x: int, top: int, height: int) -> Iterator[str]:
    """What the shades mean."""
    one = height / LEVELS
    for shade in range(LEVELS):
        y = top + height - one * (shade + 1)
        yield f'<rect x="{x}" y="{y:.2f}" width="14" height="{one + 0.5:.2f}" fill="{_colour(shade)}"/>'
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        yield _text(x + 20, top + height * (1 - share) + 4, f"{share:g}", anchor="start")
    yield _turned(x + 66, top + height / 2, "share of the client's samples")


def _colour(shade: int) -> str:
    place = shade / (LEVELS - 1) * (len(STOPS) - 1)
    red, green, blue = (np.interp(place, range(len(STOPS)), STOPS[:, part]) for part in range(3))
    return f"#{round(red):02x}{round(green):02x}{round(blue):02x}"


def _text(x: float, y: float, text: str, *, size: int = 12, anchor: str = "middle", fill: str = "") -> str:
    ink = f' fill="{fill}"' if fill else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}"{ink}>{escape(text)}</text>'


def _turned(x: float, y: float, text: str) -> str:
    place = f"translate({x:.1f} {y:.1f}) rotate(-90)"
    return f'<text transform="{place}" text-anchor="middle">{escape(text)}</text>'


def _ticks(count: int) -> range:
    """Whole numbers 0..count-1 at a round step, few enough to stand beside each other."""
    return range(0, count, int(_step(count - 1, MOST_TICKS - 1)))


def _step(high: float, most: int) -> float:
    """The smallest of 1, 2, 5, 10, 20 ... that reaches `high` in at most `most` steps."""
    return float(next(s * 10**p for p in range(20) for s in (1, 2, 5) if s * 10**p * most >= high))

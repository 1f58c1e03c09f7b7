"""Stretches of work as a picture: a lane per worker, time from left to right.

In: `Bar`s. Out: SVG as text, without anything but rectangles and text.
"""

from collections.abc import Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

_COLOURS = {
    "publish": "#8da0cb",
    "wait": "#d9d9d9",
    "pull": "#fc8d62",
    "experts": "#66c2a5",
    "first gemm": "#66c2a5",
    "second gemm": "#1b9e77",
    "combine": "#e78ac3",
}
_LANE, _BAR, _LEFT, _WIDTH, _TOP = 26, 20, 120, 1000, 56
_TICKS = 8


class Bar(NamedTuple):
    """One stretch of work in seconds. kind: a key of the legend."""

    lane: str
    label: str
    begin: float
    end: float
    kind: str


def timeline(bars: Sequence[Bar], title: str) -> str:
    """Lanes in the order of their first bar. Raises ValueError where there is nothing to draw."""
    if not bars:
        raise ValueError("timeline: expected at least one bar, got none")
    lanes = {lane: i for i, lane in enumerate(dict.fromkeys(bar.lane for bar in bars))}
    start, end = min(bar.begin for bar in bars), max(bar.end for bar in bars)
    scale = _WIDTH / max(end - start, 1e-12)
    bottom = _TOP + _LANE * len(lanes)
    parts = [_text(8, 18, title, size=14), *_legend([bar.kind for bar in bars])]
    for i in range(_TICKS + 1):
        x = _LEFT + _WIDTH * i / _TICKS
        parts.append(f'<rect x="{x:.1f}" y="{_TOP}" width="0.5" height="{bottom - _TOP}" fill="#bbb"/>')
        parts.append(_text(x, bottom + 14, f"{(end - start) * i / _TICKS * 1e6:.4g} us", anchor="middle"))
    parts += [_text(8, _TOP + _LANE * i + 15, lane) for lane, i in lanes.items()]
    for bar in bars:
        x, y = _LEFT + (bar.begin - start) * scale, _TOP + _LANE * lanes[bar.lane] + (_LANE - _BAR) / 2
        width = max((bar.end - bar.begin) * scale, 0.3)
        tip = f"{bar.kind} {bar.label}: {(bar.end - bar.begin) * 1e6:.4g} us"
        parts.append(
            f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_BAR}" fill="{_COLOURS[bar.kind]}">'
            f"<title>{escape(tip)}</title></rect>"
        )
        if width > 7 * len(bar.label) + 4:
            parts.append(_text(x + width / 2, y + 14, bar.label, anchor="middle"))
    size = f"{_LEFT + _WIDTH + 40} {bottom + 24}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" font-family="sans-serif">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="#fff"/>', *parts, "</svg>", ""])


def _legend(kinds: Sequence[str]) -> list[str]:
    parts, x = [], _LEFT
    for kind in (kind for kind in _COLOURS if kind in kinds):
        parts.append(f'<rect x="{x}" y="30" width="14" height="14" fill="{_COLOURS[kind]}"/>')
        parts.append(_text(x + 20, 41, kind))
        x += 34 + 8 * len(kind)
    return parts


def _text(x: float, y: float, text: str, *, size: int = 11, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y}" font-size="{size}" text-anchor="{anchor}" fill="#222">{escape(text)}</text>'

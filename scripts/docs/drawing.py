"""SVG drawings from boxes, arrows and text. Colours come from the page's theme: see ``static/site.css``."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

__all__ = ["Drawing"]


class Drawing:
    """A canvas. Coordinates are pixels of a wide page; ``kind`` names a colour: a, b, c, d, or n for none.

    Colours have the same meaning in all drawings: a is the query side or the input, b keys or weights, c values or
    results, d data in flight.
    """

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self.parts: list[str] = []

    def box(
        self, x: float, y: float, width: float, height: float, text: str = "", kind: str = "n", size: int = 13
    ) -> None:
        """Draw a rectangle with centred text; newlines separate lines."""
        self.parts.append(
            f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3"/>'
        )
        if text:
            self.text(x + width / 2, y + height / 2 + size * 0.36, text, size=size)

    def text(
        self, x: float, y: float, text: str, anchor: str = "middle", size: int = 13, soft: bool = False
    ) -> None:
        """Draw text whose lines are centred around the baseline ``y``."""
        lines = text.split("\n")
        top = y - (len(lines) - 1) * size * 0.62
        look = ' class="soft"' if soft else ""
        for i, line in enumerate(lines):
            at = f'x="{x:g}" y="{top + i * size * 1.24:g}" text-anchor="{anchor}" font-size="{size}"'
            self.parts.append(f"<text{look} {at}>{html.escape(line)}</text>")

    def arrow(self, x1: float, y1: float, x2: float, y2: float, text: str = "", dashed: bool = False) -> None:
        look = ' stroke-dasharray="4 3"' if dashed else ""
        self.parts.append(f'<line class="arrow" x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}"{look}/>')
        angle = math.degrees(math.atan2(y2 - y1, x2 - x1))
        place = f'transform="translate({x2:g} {y2:g}) rotate({angle:.1f})"'
        self.parts.append(f'<path class="tip" d="M1,0 L-8,-4 L-8,4 z" {place}/>')
        if text:
            self.text((x1 + x2) / 2, (y1 + y2) / 2 - 6, text, size=11, soft=True)

    def cells(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        texts: Sequence[str],
        kinds: str = "n",
        size: int = 11,
    ) -> None:
        """Draw a row of adjacent boxes; ``kinds`` has one colour for all, or one for each."""
        for i, text in enumerate(texts):
            self.box(x + i * width, y, width, height, text, kinds[i % len(kinds)], size)

    def svg(self) -> str:
        size = f'viewBox="0 0 {self.width} {self.height}" width="{self.width}" height="{self.height}"'
        return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{"".join(self.parts)}</svg>'

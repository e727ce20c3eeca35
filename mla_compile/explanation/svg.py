"""The few SVG shapes that the picture is made of. Units are pixels."""

from html import escape

SANS = "-apple-system, 'Segoe UI', 'Helvetica Neue', Helvetica, 'DejaVu Sans', Arial, sans-serif"
MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
INK, MUTED, LINE, CARD_FILL, CARD_EDGE = "#1f2328", "#59636e", "#6e7781", "#fbfcfd", "#d8dee4"

FILLS = {  # kind of box -> fill, edge
    "shared": ("#eef1f5", "#8c959f"),
    "decode": ("#dcf3ea", "#2a9d76"),
    "prefill": ("#fdebd5", "#d58530"),
    "opaque": ("#3b434d", "#3b434d"),
    "cache": ("#e9e6fa", "#7b70c9"),
    "absent": ("none", "#c4cbd3"),
}


class Canvas:
    """Collects shapes, the later ones on top."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.shapes: list[str] = []

    def render(self, height: float) -> str:
        marker = f'<path d="M0 0 L7 3.5 L0 7 z" fill="{LINE}"/>'
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {height:g}" '
                f'width="{self.width}" height="{height:g}" font-family="{SANS}">',
                '<defs><marker id="tip" markerWidth="7" markerHeight="7" refX="6.5" refY="3.5" orient="auto" '
                f'markerUnits="userSpaceOnUse">{marker}</marker></defs>',
                f'<rect width="{self.width}" height="{height:g}" fill="#ffffff"/>',
                *self.shapes,
                "</svg>\n",
            ]
        )

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        size: float = 13,
        color: str = INK,
        anchor: str = "start",
        bold: bool = False,
        mono: bool = False,
    ) -> None:
        style = (f' font-family="{MONO}"' if mono else "") + (' font-weight="600"' if bold else "")
        self.shapes.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" fill="{color}" text-anchor="{anchor}"{style}>'
            f"{escape(words)}</text>"
        )

    def labels(self, x: float, y: float, *lines: str, anchor: str = "start") -> None:
        """Shapes on an edge, one below the other, with a halo where they cross another edge."""
        halo = f'<g stroke="{CARD_FILL}" stroke-width="5" stroke-linejoin="round">'
        for group in (halo, "<g>"):  # not paint-order, which some renderers do not know
            self.shapes.append(group)
            for i, line in enumerate(lines):
                self.text(x, y + 15 * i, line, size=11.5, color=MUTED, anchor=anchor, mono=True)
            self.shapes.append("</g>")

    def card(self, x: float, y: float, width: float, height: float) -> None:
        self.shapes.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="12" fill="{CARD_FILL}" '
            f'stroke="{CARD_EDGE}"/>'
        )

    def box(
        self, x: float, y: float, width: float, height: float, kind: str, title: str, *lines: str
    ) -> None:
        """A rounded box with a bold title and lines below it, centred; shapes are set in mono."""
        fill, edge = FILLS[kind]
        dash = ' stroke-dasharray="5 4"' if kind == "absent" else ""
        self.shapes.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="8" fill="{fill}" '
            f'stroke="{edge}" stroke-width="1.4"{dash}/>'
        )
        self._inside(x + width / 2, y + height / 2, kind, title, lines)

    def swatch(self, x: float, y: float, kind: str) -> None:
        """A small square of the legend."""
        fill, edge = FILLS[kind]
        self.shapes.append(
            f'<rect x="{x:g}" y="{y:g}" width="16" height="16" rx="4" fill="{fill}" stroke="{edge}" '
            'stroke-width="1.4"/>'
        )

    def cylinder(self, x: float, y: float, width: float, height: float, title: str, *lines: str) -> None:
        """Storage: the cache."""
        fill, edge = FILLS["cache"]
        rx, ry = width / 2, 9
        body = f"M{x:g} {y + ry:g} v{height - 2 * ry:g} a{rx:g} {ry} 0 0 0 {width:g} 0 v{2 * ry - height:g}"
        self.shapes.append(f'<path d="{body}" fill="{fill}" stroke="{edge}" stroke-width="1.4"/>')
        self.shapes.append(
            f'<ellipse cx="{x + rx:g}" cy="{y + ry:g}" rx="{rx:g}" ry="{ry}" fill="{fill}" stroke="{edge}" '
            'stroke-width="1.4"/>'
        )
        self._inside(x + rx, y + height / 2 + ry / 2, "cache", title, lines)

    def _inside(self, x: float, middle: float, kind: str, title: str, lines: tuple[str, ...]) -> None:
        color = {"opaque": "#ffffff", "absent": MUTED}.get(kind, INK)
        faint = {"opaque": "#d0d7de"}.get(kind, MUTED)
        top = middle - 8 * len(lines) + 5
        self.text(x, top, title, size=13.5, color=color, anchor="middle", bold=kind != "absent")
        for i, line in enumerate(lines):
            below = top + 16.5 * (i + 1)
            self.text(x, below, line, size=12, color=faint, anchor="middle", mono=line.startswith(("[", "@")))

    def arrow(self, x: float, y: float, to_x: float, to_y: float, *, dashed: bool = False) -> None:
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.shapes.append(
            f'<path d="M{x:g} {y:g} L{to_x:g} {to_y:g}" fill="none" stroke="{LINE}" stroke-width="1.5"{dash} '
            'marker-end="url(#tip)"/>'
        )

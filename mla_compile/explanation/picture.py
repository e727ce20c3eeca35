"""The explanation as an SVG: for each kind of attention layer, its one opaque op and the segments made of it.

     before                               after
┌─────────────┐         ┌──────────── tokens of the batch ────────────┐
│  tokens     │           absorb         mla_append            cat
├─────────────┤             │                │                   │
│mla_attention│         mla_decode <──── kv_cache ──────> mla_prefill
└─────────────┘         up-project                               │
    o_proj              └───────────────── cat ──────────────────┘
"""

from torch import fx

from mla_compile.explanation.layers import Group, Layer, Layers
from mla_compile.explanation.svg import MUTED, Canvas

WIDTH, MARGIN = 1216, 24
BEFORE = 48, 226  # left edge and width of each column
DECODE = 348, 270
CACHE = 664, 200
PREFILL = 908, 260
TOKENS, FIRST, ATTEND, LAST, JOIN = 72, 196, 324, 422, 512  # top edges of the rows, within a panel
PANEL = 596
MAX_PANELS = 6


def draw(graphs: dict[str, fx.GraphModule], layers: Layers) -> str:
    """The SVG as text."""
    canvas = Canvas(WIDTH)
    _header(canvas, graphs, layers)
    top = 104.0
    for group in layers.groups[:MAX_PANELS]:
        _panel(canvas, top, group)
        top += PANEL + 20
    for line in _footer(graphs, layers):
        canvas.text(MARGIN + 4, top + 12, line, size=13, color=MUTED)
        top += 22
    return canvas.render(top + 12)


def _header(canvas: Canvas, graphs: dict[str, fx.GraphModule], layers: Layers) -> None:
    plural = "" if layers.calls == 1 else "s"
    canvas.text(MARGIN, 46, "What the passes make of mla_attention", size=23, bold=True)
    passes = ", ".join(list(graphs)[1:]) or "none"
    canvas.text(MARGIN, 74, f"{layers.calls} attention call{plural} · passes: {passes}", size=14, color=MUTED)
    legend = {
        "shared": "all tokens",
        "decode": "decode segment",
        "prefill": "prefill segment",
        "cache": "cache",
    }
    x = WIDTH - MARGIN - 500
    for (kind, words), width in zip(legend.items(), (112, 148, 150, 0), strict=True):
        canvas.swatch(x, 34, kind)
        canvas.text(x + 24, 47, words, size=13)
        x += width


def _footer(graphs: dict[str, fx.GraphModule], layers: Layers) -> list[str]:
    lines = []
    if not layers.groups:
        lines.append(layers.why_none)
    if len(layers.groups) > MAX_PANELS:
        lines.append(f"... and {len(layers.groups) - MAX_PANELS} more kinds of calls: print the explanation.")
    sizes = " → ".join(str(len(gm.graph.nodes)) for gm in graphs.values())
    return [*lines, f"Nodes in the graph, after each pass: {sizes}"]


def _panel(canvas: Canvas, top: float, group: Group) -> None:
    canvas.card(MARGIN, top, WIDTH - 2 * MARGIN, PANEL)
    canvas.text(BEFORE[0], top + 33, group.title, size=16, bold=True)
    canvas.text(BEFORE[0], top + TOKENS - 10, "before", size=12, color=MUTED)
    canvas.text(DECODE[0], top + TOKENS - 10, "after", size=12, color=MUTED)
    _before(canvas, top, group.layer)
    _tokens(canvas, top, group.layer)
    _cache(canvas, top, group.layer)
    _decode(canvas, top, group.layer)
    _prefill(canvas, top, group.layer)
    _join(canvas, top, group.layer)


def _before(canvas: Canvas, top: float, layer: Layer) -> None:
    x, width = BEFORE
    line = x + 40
    canvas.box(x, top + TOKENS, width, 52, "shared", f"{layer.tokens} tokens", "q_nope, q_pe, kv_c, k_pe")
    canvas.arrow(line, top + TOKENS + 52, line, top + FIRST)
    canvas.labels(line + 9, top + TOKENS + 78, f"q_nope {layer.q_nope}", f"kv_c {layer.kv_c}")
    height = LAST + 54 - FIRST
    lines = "one opaque op in the model", "writes and reads kv_cache"
    canvas.box(x, top + FIRST, width, height, "opaque", "mla_attention", *lines)
    canvas.arrow(line, top + LAST + 54, line, top + JOIN)
    canvas.labels(line + 9, top + LAST + 76, layer.out)
    canvas.box(x, top + JOIN, width, 60, "shared", "the rest of the layer", "o_proj, MLP or MoE")
    # From the op to its segments.
    arrow_y = top + (FIRST + LAST + 54) / 2
    canvas.arrow(x + width + 14, arrow_y, DECODE[0] - 16, arrow_y)
    canvas.text(x + width + 20, arrow_y - 10, "passes", size=12, color=MUTED)


def _tokens(canvas: Canvas, top: float, layer: Layer) -> None:
    """The packed tokens: decode rows first. A segment that the batch lacks has no part of the bar."""
    y = top + TOKENS
    right = sum(PREFILL)
    decode, prefill = layer.decode, layer.prefill
    middle = CACHE[0] + CACHE[1] / 2
    start, end = DECODE[0], right
    if decode:
        end_decode = middle - 3 if prefill else right
        words = f"rows of {decode.q_len} token" + ("" if decode.q_len == "1" else "s")
        canvas.box(
            start,
            y,
            end_decode - start,
            52,
            "decode",
            f"{decode.tokens} decode tokens",
            f"{decode.rows} {words}",
        )
    if prefill:
        start_prefill = middle + 3 if decode else start
        words = "prompt chunk" + ("" if prefill.chunks == "1" else "s")
        canvas.box(
            start_prefill,
            y,
            end - start_prefill,
            52,
            "prefill",
            f"{prefill.tokens} prefill tokens",
            f"{prefill.chunks} {words}",
        )


def _cache(canvas: Canvas, top: float, layer: Layer) -> None:
    x, width = CACHE
    middle = x + width / 2
    canvas.arrow(middle, top + TOKENS + 52, middle, top + FIRST)
    canvas.labels(middle + 9, top + TOKENS + 78, f"kv_c {layer.kv_c}", f"k_pe {layer.k_pe}")
    canvas.box(x, top + FIRST, width, 54, "shared", layer.append, "one write for all tokens")
    canvas.arrow(middle, top + FIRST + 54, middle, top + ATTEND - 8)
    canvas.cylinder(x, top + ATTEND - 8, width, 74, "kv_cache", layer.kv_cache)
    y = top + ATTEND + 29
    if layer.decode:
        canvas.arrow(x, y, sum(DECODE), y, dashed=True)
    if layer.prefill:
        canvas.arrow(x + width, y, PREFILL[0], y, dashed=True)


def _decode(canvas: Canvas, top: float, layer: Layer) -> None:
    x, width = DECODE
    decode = layer.decode
    if decode is None:
        _absent(canvas, top, DECODE, "decode")
        return
    side, line = x + 18, x + 158
    y = top + TOKENS + 52
    canvas.arrow(side, y, side, top + ATTEND)
    canvas.arrow(line, y, line, top + FIRST)
    canvas.labels(side + 9, top + FIRST - 40, f"q_pe {decode.q_pe}")
    canvas.labels(line + 9, top + FIRST - 14, f"q_nope {decode.q_nope}")
    canvas.box(x + 46, top + FIRST, width - 46, 54, "decode", "absorb", f"@ w_uk {layer.w_uk}")
    canvas.arrow(line, top + FIRST + 54, line, top + ATTEND)
    canvas.labels(line + 9, top + FIRST + 92, f"q_latent {decode.q_latent}")
    canvas.box(x, top + ATTEND, width, 58, "decode", "mla_decode", "attends in the latent space")
    canvas.arrow(line, top + ATTEND + 58, line, top + LAST)
    canvas.labels(line + 9, top + ATTEND + 82, decode.q_latent)
    canvas.box(x + 46, top + LAST, width - 46, 54, "decode", "up-project", f"@ w_uv {layer.w_uv}")
    canvas.arrow(line, top + LAST + 54, line, top + JOIN)
    canvas.labels(line + 9, top + LAST + 76, decode.out)


def _prefill(canvas: Canvas, top: float, layer: Layer) -> None:
    x, width = PREFILL
    prefill = layer.prefill
    if prefill is None:
        _absent(canvas, top, PREFILL, "prefill")
        return
    line = x + 60
    canvas.arrow(line, top + TOKENS + 52, line, top + FIRST)
    canvas.box(x, top + FIRST, width - 46, 54, "prefill", "cat", "q_nope beside q_pe")
    canvas.arrow(line, top + FIRST + 54, line, top + ATTEND)
    canvas.labels(line + 9, top + FIRST + 92, f"q {prefill.q}")
    keys = f"{prefill.keys} keys read from kv_cache"
    canvas.box(x, top + ATTEND, width, 58, "prefill", "mla_prefill", keys)
    canvas.arrow(line, top + ATTEND + 58, line, top + JOIN)
    canvas.labels(line + 9, top + LAST + 76, prefill.out)


def _absent(canvas: Canvas, top: float, column: tuple[int, int], name: str) -> None:
    x, width = column
    height = LAST + 54 - FIRST
    canvas.box(x, top + FIRST, width, height, "absent", f"no {name} tokens", "so no segment is built")


def _join(canvas: Canvas, top: float, layer: Layer) -> None:
    x, width = DECODE[0], sum(PREFILL) - DECODE[0]
    title = "cat" if layer.decode and layer.prefill else "nothing to join"
    canvas.box(
        x,
        top + JOIN,
        width,
        60,
        "shared",
        title,
        layer.out,
        "for one o_proj and the rest of the layer",
    )

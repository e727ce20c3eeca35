"""The explanation as an SVG: for each kind of attention layer, its unified op and the segments that replace it.

`picture.svg` is the picture of a layer with all parts. This module removes the parts that a layer lacks, and replaces
`$names` in its texts with shapes.
"""

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from string import Template
from xml.etree import ElementTree as ET

from torch import fx

from mla_compile.explanation.layers import Group, Layers
from mla_compile.explanation.text import counted

_SVG = "http://www.w3.org/2000/svg"
_FIRST_PANEL, _PANEL = 104, 616
"""The top edge of the first panel, and the distance between the top edges of two panels."""
_MAX_PANELS = 6


def draw(graphs: dict[str, fx.GraphModule], layers: Layers) -> str:
    """The SVG as text."""
    root = ET.parse(Path(__file__).with_suffix(".svg")).getroot()
    (panel,) = root.iterfind("*[@class='panel']")
    root.remove(panel)
    calls = counted(layers.calls, "attention call")
    _fill(root, {"calls": calls, "passes": ", ".join(list(graphs)[1:]) or "none"})
    top = _FIRST_PANEL
    for group in layers.groups[:_MAX_PANELS]:
        root.append(_panel(deepcopy(panel), group))
        root[-1].set("transform", f"translate(0 {top})")
        top += _PANEL
    for line in _footer(graphs, layers):
        ET.SubElement(root, f"{{{_SVG}}}text", {"x": "28", "y": str(top + 12)}).text = line
        top += 22
    root.set("height", str(top + 12))
    root.set("viewBox", f"0 0 {root.get('width')} {top + 12}")
    ET.register_namespace("", _SVG)
    return ET.tostring(root, encoding="unicode") + "\n"


def _footer(graphs: dict[str, fx.GraphModule], layers: Layers) -> list[str]:
    lines = []
    if not layers.groups:
        lines.append(layers.why_none)
    if len(layers.groups) > _MAX_PANELS:
        lines.append(
            f"... and {len(layers.groups) - _MAX_PANELS} more kinds of calls: print the explanation."
        )
    sizes = " → ".join(str(len(gm.graph.nodes)) for gm in graphs.values())
    return [*lines, f"Nodes in the graph, after each pass: {sizes}"]


def _panel(panel: ET.Element, group: Group) -> ET.Element:
    layer = group.layer
    decode, prefill = layer.decode, layer.prefill
    absent = {"no-decode" if decode else "decode", "no-prefill" if prefill else "prefill"}
    for part in panel.findall(f"{{{_SVG}}}g"):
        if part.get("class") in absent:
            panel.remove(part)
    join = "written to one tensor" if decode and prefill else "nothing to join"
    words = {**vars(layer), "title": group.title, "join": join}
    for kind, segment in (("decode", decode), ("prefill", prefill)):
        words |= {} if segment is None else {f"{kind}_{name}": size for name, size in vars(segment).items()}
    _fill(panel, words)
    return panel


def _fill(part: ET.Element, words: Mapping[str, object]) -> None:
    for text in part.iter(f"{{{_SVG}}}text"):
        text.text = Template(text.text or "").substitute(words)

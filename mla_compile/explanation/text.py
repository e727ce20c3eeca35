"""The explanation as text."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from torch import fx

from mla_compile.explanation.layers import Group, Layers
from mla_compile.passes.nodes import op_name


def describe(graphs: dict[str, fx.GraphModule], layers: Layers) -> str:
    """The text: a block for each group of layers, then one for the node counts."""
    passes = ", ".join(list(graphs)[1:]) or "none"
    head = [f"{counted(layers.calls, 'attention call')}; passes: {passes}"]
    if hints := [f"{name} = {hint}" for name, hint in layers.hints.items() if name.isalnum()]:
        head.append(f"dynamic sizes, with their values in this call: {', '.join(hints)}")
    groups: Sequence[Iterable[str]] = [_group(group) for group in layers.groups] or [[layers.why_none]]
    return "\n\n".join("\n".join(block) for block in (head, *groups, _counts(graphs))) + "\n"


def _group(group: Group) -> Iterator[str]:
    layer = group.layer
    decode, prefill = layer.decode, layer.prefill
    yield group.title
    parts = []
    if decode:
        parts.append(f"{decode.tokens} decode ({counted(decode.rows, 'row')} x q_len {decode.q_len})")
    if prefill:
        parts.append(f"{prefill.tokens} prefill ({counted(prefill.chunks, 'chunk')})")
    yield f"  tokens   {layer.tokens} = {' + '.join(parts)}"
    arguments = f"q_nope {layer.q_nope}, q_pe {layer.q_pe}, kv_c {layer.kv_c}, k_pe {layer.k_pe}"
    yield f"  before   mla_attention({arguments}) -> {layer.out}"
    yield f"  append   {layer.append}   kv_c {layer.kv_c}, k_pe {layer.k_pe} -> kv_cache {layer.kv_cache}"
    if decode and prefill:
        yield f"  split    q, kv into {decode.tokens} decode and {prefill.tokens} prefill tokens"
    if decode:
        yield f"  decode   absorb       q_nope {decode.q_nope} @ w_uk {layer.w_uk} -> q_latent {decode.q_latent}"
        yield f"           mla_decode   q_latent {decode.q_latent}, q_pe {decode.q_pe} -> {decode.q_latent}"
        yield f"           up-project   {decode.q_latent} @ w_uv {layer.w_uv} -> {decode.out}"
    if prefill:
        yield f"  prefill  mla_prefill  q {prefill.q}, {counted(prefill.keys, 'key')} read -> {prefill.out}"
    if decode and prefill:
        yield f"  join     mla_prefill  {decode.out} + {prefill.out} -> {layer.out}"


def _counts(graphs: dict[str, fx.GraphModule]) -> Iterator[str]:
    """A table of the ops whose number a pass has changed."""
    columns = [
        Counter(op_name(node) for node in gm.graph.nodes if node.op.startswith("call_"))
        for gm in graphs.values()
    ]
    names = list(dict.fromkeys(name for column in columns for name in column))
    changed = [name for name in names if len({column[name] for column in columns}) > 1]
    changed.sort(key=lambda name: (not name.startswith("mla_"), name))
    table = [["op", *graphs]]
    table += [[name, *(str(column[name] or "-") for column in columns)] for name in changed]
    table += [["all nodes", *(str(len(gm.graph.nodes)) for gm in graphs.values())]]
    widths = [max(map(len, cells)) for cells in zip(*table, strict=True)]
    yield "nodes after each pass"
    for name, *counts in table:
        cells = [count.rjust(width) for count, width in zip(counts, widths[1:], strict=True)]
        yield "  " + "  ".join([name.ljust(widths[0]), *cells])


def counted(number: int | str, noun: str) -> str:
    return f"{number} {noun}" + ("" if str(number) == "1" else "s")

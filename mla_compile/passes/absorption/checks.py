"""What speaks against absorbing MLA that was found: reasons, in words for the author of the model."""

import math

import torch
from torch import fx

from mla_compile.passes.absorption.cost import AttentionSizes, absorbing_pays
from mla_compile.passes.absorption.index_map import Sizes, same
from mla_compile.passes.absorption.joins import FILLS
from mla_compile.passes.absorption.match import RANK, Expansion, Keys, Match
from mla_compile.passes.absorption.products import SUMMED
from mla_compile.passes.absorption.trace import View, rereads
from mla_compile.passes.effects import may_write, writer_between
from mla_compile.passes.nodes import has_value, tensor_of, torch_name
from mla_compile.torch_internals import is_wrapper, size_hint

_MANY_KEYS = 4096
"""Taken for a number of keys that is unknown at compile time."""


def refusal(match: Match) -> str | None:
    """Why a match stays expanded; None where absorbing it is right and pays."""
    out = match.values.node
    if tensor_of(out).requires_grad:
        return "it needs a gradient: call the model under torch.no_grad() or torch.inference_mode()"
    entered = any(getattr(node.target, "__name__", "") == "_enter_autocast" for node in out.graph.nodes)
    if entered or torch.is_autocast_enabled(tensor_of(out).device.type):
        return "it runs under autocast: convert the model to the dtype instead"
    if match.values.weights.node is match.keys.node and not match.fused:
        return "there is no softmax between the two products"
    if any(is_wrapper(tensor_of(view.node)) for view in views_read(match)):
        return "the weight or the latents are a tensor subclass, quantised perhaps, which cannot be sliced"
    if not _covered(match):
        return "keys or values are broadcast over a dimension that queries lack"
    writer = first_write(match, views_read(match))
    if writer is not None:
        return (
            f"`{torch_name(writer) or writer.name}` writes in place between the expansion and the attention"
        )
    doomed = superseded(match)
    for expansion in expansions(match):
        if expansion.node not in doomed:
            user = _other_user(match, expansion.node, doomed)
            return f"the expanded keys or values are also used by `{user}`, so they must be computed anyway"
    sizes = cost_sizes(match)
    if sizes is None:
        return "the number of query tokens is unknown at compile time"
    if not absorbing_pays(sizes):
        return f"expanding costs less for {sizes}"
    return None


def _covered(match: Match) -> bool:
    """Whether every dimension of the two results comes from something that the absorbed form reads."""
    keys, values = match.keys, match.values
    scores, out = set(keys.query.labels), set(values.weights.labels)
    for expansion, labels in ((keys.expansions, scores), ([values.expansion], out)):
        labels.update(*(e.latent.labels | e.weight.labels for e in expansion))
    scores.update(*(view.labels for view in keys.shared))
    needed = ((keys.out_term, keys.sizes, scores), (values.out_term, values.sizes, out))
    return all(label in labels or same(sizes[label], 1) for term, sizes, labels in needed for label in term)


def expansions(match: Match) -> list[Expansion]:
    return [*match.keys.expansions, match.values.expansion]


def views_read(match: Match) -> list[View]:
    """Everything that the absorbed form reads, but for queries and attention weights."""
    both = [view for expansion in expansions(match) for view in (expansion.latent, expansion.weight)]
    return [*both, *match.keys.shared]


def first_write(match: Match, views: list[View]) -> fx.Node | None:
    """A node that writes to what `views` go through after it was first read and before the attention reads it again."""
    filling = {node for view in views for node, _ in view.steps if torch_name(node) in FILLS}
    for view in views:
        read_by = rereads(view)
        if not read_by:
            continue
        on_the_way = [view.node, *(node for step in view.steps for node in step)]
        writer = writer_between(min(read_by), match.values.node, on_the_way, filling)
        if writer is not None:
            return writer
    return None


def superseded(match: Match) -> set[fx.Node]:
    """The two products, and all nodes on the way to the latents that serve nothing else or nothing at all."""
    doomed = {match.keys.node, match.values.node}
    passed = _passed(match)
    unused = _unused(match.node.graph, passed)
    writes = {node for node in passed if torch_name(node) in FILLS}
    filled = {_filled_by(node) for node in writes}

    def only_writes(user: fx.Node) -> bool:
        return user in writes or (bool(user.users) and user.users.keys() <= writes)

    def is_dead(node: fx.Node) -> bool:
        if node in writes:
            return _filled_by(node) in doomed
        rest = [user for user in node.users if node not in filled or not only_writes(user)]
        return bool(rest) and all(user in doomed or user in unused for user in rest)

    while found := {node for node in passed - doomed if is_dead(node)}:
        doomed |= found
    for node in match.node.graph.nodes:
        if node in unused and any(source in doomed for source in node.all_input_nodes):
            doomed.add(node)
    return doomed


def _unused(graph: fx.Graph, passed: set[fx.Node]) -> set[fx.Node]:
    """Other nodes that only compute and that nothing uses: Dynamo leaves them in, as of `_, v = kv.chunk(2)`."""
    unused: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        computes = node.op.startswith("call_") and not may_write(node) and has_value(node)
        if computes and node not in passed and all(user in unused for user in node.users):
            unused.add(node)
    return unused


def _filled_by(write: fx.Node) -> fx.Node:
    """The tensor of which `x[..., a:b].copy_(y)` or `x[..., a:b] = y` fills a part."""
    target = write.args[0]
    assert isinstance(target, fx.Node)
    return target.all_input_nodes[0] if torch_name(write) == "copy_" else target


def _other_user(match: Match, node: fx.Node, doomed: set[fx.Node]) -> str:
    """What keeps an expansion alive."""
    passed, pending = _passed(match), [node]
    ignored = doomed | _unused(node.graph, passed)
    while pending:
        for user in pending.pop().users:
            if user in passed and user not in doomed:
                pending.append(user)
            elif user not in ignored:
                return torch_name(user) or user.name
    return node.name


def _passed(match: Match) -> set[fx.Node]:
    """The nodes between what is read and the two products, the ones that fill a tensor included."""
    views = views_read(match)
    return {node for view in views for step in view.steps for node in step} - {view.node for view in views}


def cost_sizes(match: Match) -> AttentionSizes | None:
    """Sizes as this compile's example has them; None where the number of query tokens has no example."""
    keys, values = match.keys, match.values
    expansion = keys.expansions[0]
    heads = expansion.weight.labels - {SUMMED, RANK}
    (key,) = set(keys.out_term) - set(keys.query_term)
    rows = expansion.latent.labels - {key, RANK}
    tokens = set(keys.query_term) - heads - rows - {SUMMED}
    q_len = _count(keys.sizes, tokens)
    rank = size_hint(expansion.rank)
    (feature,) = set(values.out_term) - set(values.weights_term)
    if q_len is None or rank is None:
        return None
    return AttentionSizes(
        batch=_count(keys.sizes, rows) or 1,
        heads=_count(keys.sizes, heads) or 1,
        q_len=q_len,
        keys=_count(keys.sizes, {key}) or _MANY_KEYS,
        kv_lora_rank=rank,
        qk_nope_head_dim=_width(keys, of=Expansion),
        qk_rope_head_dim=_width(keys, of=View),
        v_head_dim=_count(values.sizes, {feature}) or 1,
    )


def _width(keys: Keys, of: type) -> int:
    return sum(size_hint(part.size) or 0 for part in keys.parts if isinstance(part.source, of))


def _count(sizes: Sizes, labels: set[str]) -> int | None:
    hints = [size_hint(sizes[label]) for label in labels]
    return None if None in hints else math.prod(hint for hint in hints if hint is not None)

"""Rewrite MLA attention that is written in its expanded form, in plain PyTorch, to the absorbed form where it pays.

    before                                          after

    kv_c ─> kv_b_proj ─> split ─┬─> v ──────┐       q_nope ─> w_uk ─> (· kv_c) ─┐
                       k_nope <─┘           │       q_pe ───────────> (· k_pe) ─┴─> scores ─> mask ─> softmax ─┐
    k_pe ─> expand ─> cat ─> k ─> attention ┴─> o                    o <─ w_uv <─ (weights · kv_c) <───────────┘
                               q ──┘

In `absorption/`, `pattern` finds it, `trace` and `index_map` see through the way it is written, and `cost` says where
it pays: for decode, not for prefill. The rewrite moves brackets in products of matrices, so it holds for any mask; what
lies between the two products of an attention spelled out stays as it is. A fused attention becomes one
`mla_masked_decode` on the latents under the mask as it was.

The log, `TORCH_LOGS="+mla_compile"`, says what was absorbed, and why other attention that looks like MLA was not.
"""

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from mla_compile.ops.masked_decode import masked_decode_op
from mla_compile.passes.absorption.cost import AttentionSizes, absorbing_pays
from mla_compile.passes.absorption.pattern import Attention, find
from mla_compile.passes.absorption.products import RANK, SUMMED
from mla_compile.passes.absorption.trace import CATS, Reader, joined_parts
from mla_compile.passes.effects import erase_dead, live_nodes, writer_between
from mla_compile.passes.emit import counting, inline
from mla_compile.passes.nodes import argument, is_tensor, tensor_of, torch_name
from mla_compile.passes.provenance import where
from mla_compile.torch_internals import is_wrapper, size_hint

log = logging.getLogger(__name__)

_MANY_KEYS = 4096
"""Taken for a number of keys that is unknown at compile time."""


def absorb_mla(gm: fx.GraphModule, example_inputs: Sequence[Any] = ()) -> fx.GraphModule:
    """Rewrite `gm` in place and return it; a graph without MLA in expanded form is left untouched."""
    dead: set[fx.Node] | None = None
    absorbed = False
    for node, found in find(gm.graph):
        if dead is None:
            dead = {*gm.graph.nodes} - live_nodes(gm.graph)
        reason = found if isinstance(found, str) else _refusal(found, dead)
        if isinstance(found, str) or reason is not None:
            log.info("not absorbed: %s: %s", where(node), reason)
            continue
        how = "attention on masked latents" if found.fused else "two products"
        log.info("absorbed: %s: %s, for %s", where(node), how, _sizes(found))
        scores = found.keys.scores
        old = {*found.passed, scores.node, node}
        # The new nodes replace ones that need no gradient, whatever the mode is now.
        with torch.no_grad():
            _emit_fused(found) if found.fused else _emit_products(found)
        if torch_name(scores.operands[0]) in CATS:
            old.add(scores.operands[0])  # queries that are now read part by part
        for replaced in sorted(old, reverse=True):
            if not replaced.users:
                gm.graph.erase_node(replaced)
        absorbed = True
    if absorbed:
        erase_dead(gm.graph)
    return gm


def _refusal(found: Attention, dead: set[fx.Node]) -> str | None:
    """Why an attention stays expanded, in words for the author of the model; None where absorbing is right and pays."""
    node, read = tensor_of(found.node), [reader.node for reader in found.readers]
    if node.requires_grad:
        return "it needs a gradient: call the model under torch.no_grad() or torch.inference_mode()"
    entered = any(getattr(n.target, "__name__", "") == "_enter_autocast" for n in found.node.graph.nodes)
    if entered or torch.is_autocast_enabled(node.device.type):
        return "it runs under autocast: convert the model to the dtype instead"
    if any(is_wrapper(tensor_of(n)) for n in read):
        return "the weight or the latents are a tensor subclass, quantised perhaps, which cannot be sliced"
    passed = found.passed
    tensors = [n for n in (*passed, *read) if is_tensor(n)]
    writer = writer_between(min(passed), found.node, tensors, passed)
    if writer is not None:
        name = torch_name(writer) or writer.name
        return f"`{name}` writes in place between the expansion and the attention"
    user = _other_user(found, dead)
    if user is not None:
        name = torch_name(user) or user.name
        return f"the expanded keys or values are also used by `{name}`, so they must be computed anyway"
    sizes = _sizes(found)
    if sizes is None:
        return "the number of query tokens is unknown at compile time"
    return None if absorbing_pays(sizes) else f"expanding costs less for {sizes}"


def _other_user(found: Attention, dead: set[fx.Node]) -> fx.Node | None:
    """What else reads the expansions, or what is made of them."""
    passed, pending = found.passed, [found.keys.expansion.node, found.values.node]
    while pending:
        for user in pending.pop().users:
            if user in passed:
                pending.append(user)
            elif user not in dead and user not in (found.keys.scores.node, found.node):
                return user
    return None


def _sizes(found: Attention) -> AttentionSizes | None:
    """Sizes as this compile's example has them; None where the number of query tokens has no example."""
    keys, values = found.keys, found.values
    scores, expansion = keys.scores, keys.expansion
    (key,) = set(scores.out) - set(scores.terms[0])
    (feature,) = set(found.output.out) - set(found.output.terms[0])

    def count(labels: str) -> int | None:
        hints = [size_hint(expansion.sizes[label]) for label in labels]
        return None if None in hints else math.prod(hint for hint in hints if hint is not None)

    q_len = count("".join(set(scores.terms[0]) - {*expansion.heads, *expansion.rows, SUMMED}))
    if q_len is None:
        return None
    return AttentionSizes(
        batch=count(expansion.rows) or 1,
        heads=count(expansion.heads) or 1,
        q_len=q_len,
        keys=count(key) or _MANY_KEYS,
        kv_lora_rank=count(RANK) or 1,
        qk_nope_head_dim=keys.nope.size,
        qk_rope_head_dim=keys.rope.size if keys.rope else 0,
        v_head_dim=values.sizes[feature],
    )


def _emit_fused(found: Attention) -> None:
    node, scale = found.node, argument(found.node, 6, "scale")
    scale = float(found.keys.scores.sizes[SUMMED] ** -0.5 if scale is None else scale)
    causal = argument(node, 5, "is_causal", False)

    def attend(read: Sequence[Any], mask: Any) -> Any:
        kv_c, w_uk, w_uv, k_pe, q_nope, q_pe = read
        if causal:
            query, key = (counting(kv_c, 0, n, torch.int64) for n in (q_nope.shape[2], kv_c.shape[1]))
            mask = key <= query[:, None]
        q_latent = torch.einsum("bhqn,hrn->bhqr", q_nope, w_uk)
        out = masked_decode_op(q_latent, q_pe, kv_c, k_pe, mask, scale)
        return torch.einsum("bhqr,hrv->bhqv", out, w_uv)

    _replace(node, attend, [*found.readers, *_queries(found)], argument(node, 3, "attn_mask"))


def _emit_products(found: Attention) -> None:
    keys, values, output = found.keys, found.values, found.output
    scores, latent, weight = keys.scores, keys.expansion.latent.term, keys.expansion.weight.term

    def score(read: Sequence[Any]) -> Any:
        kv_c, w_uk, q_nope, *others = read
        query = scores.terms[0]
        absorbed = query.replace(SUMMED, RANK)
        total = torch.einsum(f"{query},{weight}->{absorbed}", q_nope, w_uk)
        total = torch.einsum(f"{absorbed},{latent}->{scores.out}", total, kv_c)
        if keys.shared is not None:
            q_pe, k_pe = others
            total = total + torch.einsum(f"{query},{keys.shared.term}->{scores.out}", q_pe, k_pe)
        return total

    def weigh(read: Sequence[Any], weights: Any) -> Any:
        term = output.terms[0]
        absorbed = term.replace(SUMMED, RANK)
        out = torch.einsum(f"{term},{values.latent.term}->{absorbed}", weights, read[0])
        return torch.einsum(f"{absorbed},{values.weight.term}->{output.out}", out, read[1])

    shared = [keys.shared] if keys.shared is not None else []
    _replace(scores.node, score, [keys.expansion.latent, keys.expansion.weight, *_queries(found), *shared])
    _replace(found.node, weigh, [values.latent, values.weight], output.operands[0])


def _replace(node: fx.Node, emit: Callable[..., Any], readers: Sequence[Reader], *others: Any) -> None:
    """Put `emit(what is read, *others)` in the place of a node, with its order of dimensions in memory: a later `view`
    counts on it."""
    strides = [size_hint(stride) or 0 for stride in tensor_of(node).stride()]
    order = sorted(range(len(strides)), key=lambda dim: -strides[dim])

    def call(sources: Sequence[Any], *others: Any) -> Any:
        out = emit([reader(source) for reader, source in zip(readers, sources)], *others)
        return out.permute(order).contiguous().permute([order.index(dim) for dim in range(len(order))])

    node.replace_all_uses_with(inline(node, call, ([reader.node for reader in readers], *others)))


def _queries(found: Attention) -> list[Reader]:
    """The queries that meet each part of the keys: operands of the `cat` that joined them, or slices."""
    keys, scores = found.keys, found.keys.scores
    node, term = scores.operands[0], scores.terms[0]
    dim = term.index(SUMMED)
    along, joined = joined_parts(node) or (dim, [])
    operands, low = {}, 0
    for operand, filled_by in joined if along == dim else []:
        width = tensor_of(operand).shape[dim]
        if not filled_by and writer_between(node, found.node, [node, operand]) is None:
            operands[low, width] = operand
        low += width
    readers = []
    for part in (keys.nope, keys.rope) if keys.rope is not None else (keys.nope,):
        cut = part.size < scores.sizes[SUMMED] and (part.start, part.size) not in operands
        steps = (("narrow", dim, part.start, part.size),) if cut else ()
        readers.append(Reader(operands.get((part.start, part.size), node), steps, term))
    return readers

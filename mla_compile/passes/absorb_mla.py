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

The log, `TORCH_LOGS="+mla_compile"`, says what was fused so, and why other attention that looks like MLA was not.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from mla_compile.ops.masked_decode import masked_decode_op
from mla_compile.passes.absorption.cost import AttentionSizes, absorbing_pays
from mla_compile.passes.absorption.pattern import Attention, attention_of, may_be_attention
from mla_compile.passes.absorption.products import RANK, SUMMED
from mla_compile.passes.absorption.trace import Reader, joined_parts
from mla_compile.passes.effects import writer_between
from mla_compile.passes.emit import counting, inline
from mla_compile.passes.nodes import argument, is_tensor, tensor_of, torch_name
from mla_compile.passes.rewrite import Refusal, rewrite
from mla_compile.torch_internals import is_wrapper, size_hint

_MANY_KEYS = 4096
"""Taken for a number of keys that is unknown at compile time."""


def absorb_mla(gm: fx.GraphModule, example_inputs: Sequence[Any] = ()) -> fx.GraphModule:
    """Rewrite `gm` in place and return it; a graph without attention is left untouched."""
    rewrite(gm.graph, may_be_attention, _absorb)
    return gm


def _absorb(node: fx.Node) -> str | None:
    found = attention_of(node)
    if found is None:
        return None
    _check(found)
    sizes = _sizes(found)
    if sizes is None:
        raise Refusal("the number of query tokens is unknown at compile time")
    if not absorbing_pays(sizes):
        raise Refusal(f"expanding costs less for {sizes}")
    _emit_fused(found) if found.fused else _emit_products(found)
    how = "attention on masked latents" if found.fused else "two products"
    return f"{how}, for {sizes}"


def _check(found: Attention) -> None:
    """Raises `Refusal` where absorbing is not right, in words for the author of the model."""
    node, read = tensor_of(found.node), [reader.node for reader in found.readers]
    if node.requires_grad:
        raise Refusal("it needs a gradient: call the model under torch.no_grad() or torch.inference_mode()")
    entered = any(getattr(n.target, "__name__", "") == "_enter_autocast" for n in found.node.graph.nodes)
    if entered or torch.is_autocast_enabled(node.device.type):
        raise Refusal("it runs under autocast: convert the model to the dtype instead")
    if any(is_wrapper(tensor_of(n)) for n in read):
        raise Refusal(
            "the weight or the latents are a tensor subclass, quantised perhaps, which cannot be sliced"
        )
    passed = found.passed
    tensors = [n for n in (*passed, *read) if is_tensor(n)]
    writer = writer_between(min(passed), found.node, tensors, passed)
    if writer is not None:
        name = torch_name(writer) or writer.name
        raise Refusal(f"`{name}` writes in place between the expansion and the attention")
    user = _other_user(found)
    if user is not None:
        name = torch_name(user) or user.name
        raise Refusal(
            f"the expanded keys or values are also used by `{name}`, so they must be computed anyway"
        )


def _other_user(found: Attention) -> fx.Node | None:
    """What else reads the expansions, or what is made of them."""
    passed, pending = found.passed, [found.keys.node, found.values.node]
    while pending:
        for user in pending.pop().users:
            if user in passed:
                pending.append(user)
            elif user not in (found.scores.node, found.node):
                return user
    return None


def _sizes(found: Attention) -> AttentionSizes | None:
    """Sizes as this compile's example has them; None where the number of query tokens has no example."""
    rows, heads, q_len, keys = (size_hint(found.scores.sizes[label]) for label in "abcd")
    if q_len is None:
        return None
    return AttentionSizes(
        batch=rows or 1,
        heads=heads or 1,
        q_len=q_len,
        keys=keys or _MANY_KEYS,
        kv_lora_rank=size_hint(found.keys.sizes[RANK]) or 1,
        qk_nope_head_dim=found.nope.size,
        qk_rope_head_dim=found.rope.size,
        v_head_dim=found.values.sizes["d"],
    )


def _emit_fused(found: Attention) -> None:
    node, scale = found.node, argument(found.node, 6, "scale")
    scale = float(found.scores.sizes[SUMMED] ** -0.5 if scale is None else scale)
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
    keys, values = found.keys, found.values

    def score(read: Sequence[Any]) -> Any:
        kv_c, w_uk, k_pe, q_nope, q_pe = read
        absorbed = torch.einsum("abcz,brz->abcr", q_nope, w_uk)
        scores = torch.einsum("abcr,adr->abcd", absorbed, kv_c)
        return scores + torch.einsum("abcz,adz->abcd", q_pe, k_pe)

    def weigh(read: Sequence[Any], weights: Any) -> Any:
        out = torch.einsum("abcz,azr->abcr", weights, read[0])
        return torch.einsum("abcr,brd->abcd", out, read[1])

    _replace(found.scores.node, score, [keys.latent, keys.weight, found.shared, *_queries(found)])
    _replace(found.node, weigh, [values.latent, values.weight], found.output.operands[0])


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
    node = found.scores.operands[0]
    along, joined = joined_parts(node) or (3, [])
    operands, low = {}, 0
    for operand, filled_by in joined if along == 3 else []:
        width = tensor_of(operand).shape[3]
        if not filled_by and writer_between(node, found.node, [node, operand]) is None:
            operands[low, width] = operand
        low += width
    readers = []
    for part in (found.nope, found.rope):
        place = part.start, part.size
        steps = () if place in operands else (("narrow", 3, *place),)
        readers.append(Reader(operands.get(place, node), steps))
    return readers

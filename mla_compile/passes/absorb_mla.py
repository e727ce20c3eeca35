"""Rewrite expanded MLA attention in plain PyTorch to the absorbed form, where that is cheaper.

    before                                          after

    kv_c ─> kv_b_proj ─> split ─┬─> v ──────┐       q_nope ─> w_uk ─> (· kv_c) ─┐
                       k_nope <─┘           │       q_pe ───────────> (· k_pe) ─┴─> scores ─> mask ─> softmax ─┐
    k_pe ─> expand ─> cat ─> k ─> attention ┴─> o                    o <─ w_uv <─ (weights · kv_c) <───────────┘
                               q ──┘

In `absorption/`, `pattern` matches the attention and `layout` traces its keys and values through views and copies. The
absorbed form is cheaper for decode, not for prefill. The rewrite reassociates matrix products, so it holds for any
mask. In attention written as two products, the nodes between these products stay. A fused attention becomes one
`mla_masked_decode` on the latents under the same mask.

`TORCH_LOGS="+mla_compile"` logs each rewrite, and the reason for each attention that resembles MLA but stays expanded.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from mla_compile.ops.attention.masked_decode import masked_decode_op
from mla_compile.passes.absorption.pattern import Attention, attention_of, may_be_attention
from mla_compile.passes.effects import writer_between
from mla_compile.passes.emit import inline
from mla_compile.passes.nodes import argument, is_tensor, tensor_of, torch_name
from mla_compile.passes.rewrite import Refusal, rewrite
from mla_compile.passes.strides import laid_out_as
from mla_compile.torch_internals import is_wrapper, size_hint

_MANY_KEYS = 4096
"""The assumed number of keys if it is unknown at compile time."""


def absorb_mla(gm: fx.GraphModule, example_inputs: Sequence[Any] = ()) -> fx.GraphModule:
    """Rewrite `gm` in place and return it; a graph without attention is left untouched."""
    rewrite(gm.graph, may_be_attention, _absorb)
    return gm


def _absorb(node: fx.Node) -> str | None:
    found = attention_of(node)
    if found is None:
        return None
    _check(found)
    tokens = tensor_of(found.query).shape[2]
    q_len = size_hint(tokens)
    rank = size_hint(tensor_of(found.keys.latents).shape[-1])
    keys = size_hint(found.shared.sizes[2]) or _MANY_KEYS
    if q_len is None or rank is None:
        raise Refusal("the number of query tokens is unknown at compile time")
    sizes = f"{q_len} query token{'s' if q_len > 1 else ''} over {keys} keys"
    # A symbolic number is compared with a guard: torch compiles again for as many tokens as need the other form.
    if not absorbing_pays(tokens, keys, rank, found.nope[1], found.rope[1], found.values.width):
        raise Refusal(f"expanding costs less for {sizes}")
    _emit_fused(found) if found.fused else _emit_products(found)
    how = "attention on masked latents" if found.fused else "two products"
    return f"{how}, for {sizes}"


def absorbing_pays(
    q_len: int | torch.SymInt, keys: int, rank: int, nope: int, rope: int, v: int
) -> bool | torch.SymBool:
    """Whether the absorbed form takes fewer multiplications, for each row and head.

    rank, nope, rope, v: widths of latents, of both parts of the keys, and of values. With the widths of DeepSeek-V3 and
    many keys, the limit is some 170 query tokens. Beyond it, the wider products (2 * 512 + 64 instead of
    128 + 64 + 128) cost more than the expansion of the keys.
    """
    expanded = keys * rank * (nope + v) + q_len * keys * (nope + rope + v)
    absorbed = q_len * rank * (nope + v) + q_len * keys * (2 * rank + rope)
    return absorbed < expanded


def _check(found: Attention) -> None:
    """Raises `Refusal` if absorbing would change the result, with a reason for the author of the model."""
    node, read = tensor_of(found.node), _read(found)
    if node.requires_grad:
        raise Refusal("it needs a gradient: call the model under torch.no_grad() or torch.inference_mode()")
    entered = any(getattr(n.target, "__name__", "") == "_enter_autocast" for n in found.node.graph.nodes)
    if entered or torch.is_autocast_enabled(node.device.type):
        raise Refusal("it runs under autocast: convert the model to the dtype instead")
    if any(is_wrapper(tensor_of(n)) for n in read):
        raise Refusal(
            "the weight or the latents are a tensor subclass (for example quantised), which cannot be sliced"
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
    """Another node that reads the expanded keys or values, or a tensor computed from them."""
    passed, pending = found.passed, [found.keys.node, found.values.node]
    while pending:
        for user in pending.pop().users:
            if user in passed:
                pending.append(user)
            elif user not in (found.scores, found.node):
                return user
    return None


def _emit_fused(found: Attention) -> None:
    node, scale = found.node, argument(found.node, 6, "scale")
    scale = float(tensor_of(found.query).shape[3] ** -0.5 if scale is None else scale)
    causal = argument(node, 5, "is_causal", False)

    def attend(read: Sequence[Any], q_nope: Any, q_pe: Any, mask: Any) -> Any:
        kv_c, w_uk, w_uv, k_pe = _parts(found, read)
        if causal:
            mask = q_nope.new_ones((q_nope.shape[2], kv_c.shape[1]), dtype=torch.bool).tril()
        q_latent = torch.einsum("bhqn,hrn->bhqr", q_nope, w_uk)
        out = masked_decode_op(q_latent, q_pe, kv_c, k_pe, mask, scale)
        return torch.einsum("bhqr,hrv->bhqv", out, w_uv)

    _replace(node, attend, _read(found), *_queries(found), argument(node, 3, "attn_mask"))


def _emit_products(found: Attention) -> None:
    def score(read: Sequence[Any], q_nope: Any, q_pe: Any) -> Any:
        kv_c, w_uk, _, k_pe = _parts(found, read)
        absorbed = torch.einsum("abcz,brz->abcr", q_nope, w_uk)
        scores = torch.einsum("abcr,adr->abcd", absorbed, kv_c)
        return scores + torch.einsum("abcz,adz->abcd", q_pe, k_pe)

    def weigh(read: Sequence[Any], weights: Any) -> Any:
        kv_c, _, w_uv, _ = _parts(found, read)
        out = torch.einsum("abcz,azr->abcr", weights, kv_c)
        return torch.einsum("abcr,brd->abcd", out, w_uv)

    _replace(found.scores, score, _read(found), *_queries(found))
    _replace(found.node, weigh, _read(found), argument(found.node, 0, "input"))


def _read(found: Attention) -> list[fx.Node]:
    """The nodes that the absorbed form reads instead of keys and values."""
    return [found.keys.latents, found.keys.weight, found.values.weight, found.shared.node]


def _parts(found: Attention, read: Sequence[Any]) -> tuple[Any, Any, Any, Any]:
    """Latents, both weights and the shared part of the keys, in the dimensions of the products."""
    kv_c, w_uk, w_uv, k_pe = read
    weights = found.keys.read_weight(w_uk), found.values.read_weight(w_uv)
    return found.keys.read_latents(kv_c), *weights, found.read_shared(k_pe)


def _replace(node: fx.Node, emit: Callable[..., Any], *arguments: Any) -> None:
    """Replace a node with `emit(*arguments)`."""

    def call(*arguments: Any) -> Any:
        return laid_out_as(tensor_of(node), emit(*arguments))

    node.replace_all_uses_with(inline(node, call, arguments))


def _queries(found: Attention) -> list[fx.Node]:
    """The queries for each part of the keys: the operands of the `cat` that joined them, or slices."""
    query, places = found.query, (found.nope, found.rope)
    joined = torch_name(query) == "cat" and argument(query, 1, "dim", 0) in (3, -1)
    operands = argument(query, 0, "tensors") if joined else ()
    alike = [tensor_of(operand).shape[3] for operand in operands] == [width for _, width in sorted(places)]
    if alike and writer_between(query, found.node, [query, *operands]) is None:
        return [operands[begin > 0] for begin, _ in places]
    return [inline(found.scores, lambda q, place=place: q.narrow(3, *place), (query,)) for place in places]

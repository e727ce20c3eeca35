"""The absorbed form as nodes: re-bracketed products, `mla_masked_decode`.

All but the two ops is plain torch on proxies (`emit.inline`), so that Inductor fuses it with what surrounds it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from mla_compile.ops.masked_decode import masked_decode_op
from mla_compile.ops.paging import accumulate_dtype
from mla_compile.passes.absorption.index_map import Index, Sizes, furthest, same
from mla_compile.passes.absorption.trace import View
from mla_compile.passes.emit import counting
from mla_compile.passes.nodes import tensor_of
from mla_compile.torch_internals import size_hint

Step = Callable[[Any], Any]


@dataclass(frozen=True)
class Reader:
    """A tensor that is read: `steps` on `node` give one dimension for each letter of `term`."""

    node: fx.Node
    term: str
    steps: tuple[Step, ...]
    indices: tuple[Index, ...] = ()
    """The indices into `node`, in letters of `term`, where the reader was made for a view."""

    def __call__(self, x: Any) -> Any:
        for step in self.steps:
            x = step(x)
        return x


def reader_of(view: View, sizes: Sizes, term: str | None = None) -> Reader | None:
    """Read a view with its dimensions in the order of `term`, by default that of the alphabet.

    A letter that the view does not depend on has size 1. None where slicing and `unflatten` cannot do it.
    """
    term = "".join(sorted(view.labels)) if term is None else term
    steps: list[Step] = []
    found: list[str] = []
    for dim in range(len(view.indices) - 1, -1, -1):
        taken = _take(dim, view.indices[dim], tensor_of(view.node).shape[dim], sizes)
        if taken is None:
            return None
        steps += taken[0]
        found = taken[1] + found
    if len(set(found)) != len(found) or not set(found) <= set(term):
        return None
    order = [found.index(label) for label in term if label in found]
    if order != sorted(order):
        steps.append(lambda x: x.permute(order))
    steps += [_unsqueeze(dim) for dim, label in enumerate(term) if label not in found]
    return Reader(view.node, term, tuple(steps), view.indices)


def _unsqueeze(dim: int) -> Step:
    return lambda x: x.unsqueeze(dim)


def _take(dim: int, index: Index, size: Any, sizes: Sizes) -> tuple[list[Step], list[str]] | None:
    """Steps that leave of one dimension what `index` reads, as one dimension for each of its labels, and the labels.

    `24 * head + feature` becomes `unflatten(dim, (heads, 24))` with the features cut out of the 24.
    """
    if not index.terms:
        return [lambda x: x.select(dim, index.offset)], []
    (label, step), *rest = sorted(index.terms, key=lambda term: -term[1])
    count = sizes[label]
    if step == 1 and not rest and index.offset == 0 and same(count, size):
        return [], [label]
    if step < 1 or not isinstance(count, int) or not isinstance(size, int):
        return None
    inner = Index(index.offset % step, tuple(rest))
    first = index.offset - inner.offset
    beyond = furthest(inner, sizes)
    if beyond is None or beyond >= step or first + count * step > size:
        return None
    cut: list[Step] = [] if count * step == size else [lambda x: x.narrow(dim, first, count * step)]
    if step == 1:
        return cut, [label]
    below = _take(dim + 1, inner, step, sizes)
    return below and ([*cut, lambda x: x.unflatten(dim, (count, step)), *below[0]], [label, *below[1]])


def laid_out_like(value: torch.Tensor, x: Any) -> Any:
    """`x` with its dimensions in memory in the order of `value`'s: a later `view` counts on it."""
    order = _memory_order(value)
    if order == _memory_order(tensor_of(x.node)):
        return x
    return x.permute(order).contiguous().permute([order.index(dim) for dim in range(len(order))])


def _memory_order(value: torch.Tensor) -> list[int]:
    """Dimensions from the slowest to the fastest; one of size 1 stays at its place, whatever its stride."""
    strides = [size_hint(stride) or 0 for stride in value.stride()]
    ones = [dim for dim in range(value.dim()) if same(value.shape[dim], 1)]
    order = sorted((dim for dim in range(value.dim()) if dim not in ones), key=lambda dim: -strides[dim])
    for dim in ones:
        order.insert(dim, dim)
    return order


def rebracket(left: str, inner: str, outer: str, out: str, summed: str) -> tuple[str, str]:
    """Equations of the sum over `summed` and r of left * inner * outer, that with `inner` first.

    rebracket("abcz", "brz", "adr", "abcd", "z") == ("abcz,brz->abcr", "abcr,adr->abcd")
    """
    kept = left.replace(summed, "") + "r" + "".join(label for label in inner if label not in left + "r")
    return f"{left},{inner}->{kept}", f"{kept},{outer}->{out}"


Scored = tuple[Any, Any, Any]
"""Queries, the weight that takes them to the latents or None, and what they meet: latents, shared keys, or None for
the latents that the values are made of."""


def fused_attention(
    parts: Sequence[Scored], kv_c: Any, w_uv: Any, mask: Any, scale: float, causal: bool, like: torch.Tensor
) -> Any:
    """What `scaled_dot_product_attention` gives, computed on latents: `[rows, heads, q_len, v_head_dim]`.

    Args:
        parts: summands of the scores: queries `[rows, heads, q_len, width]`, w_uk `[heads, width, rank]` or None,
            latents or shared keys `[rows or 1, keys, rank or width]`. Latents that are None are `kv_c`.
        kv_c: `[rows or 1, keys, rank]`.
        w_uv: `[heads, rank, v_head_dim]`.
        mask, scale, causal: `attn_mask`, `scale` and `is_causal`.
        like: a tensor of the dtype and on the device of all.
    """
    q_len, keys = parts[0][0].shape[2], kv_c.shape[1]
    if causal:
        query, key = (counting(kv_c, 0, size, torch.int64) for size in (q_len, keys))
        mask = key <= query[:, None]
    absorbed = [q if w_uk is None else torch.einsum("bhqn,hnr->bhqr", q, w_uk) for q, w_uk, _ in parts]
    on_latents = [i for i, (_, _, met) in enumerate(parts) if met is None]
    on_shared = [i for i, (_, w_uk, _) in enumerate(parts) if w_uk is None]
    if len(on_latents) == len(on_shared) == 1 and len(parts) == 2:
        (i,), (j,) = on_latents, on_shared
        out = masked_decode_op(absorbed[i], absorbed[j], kv_c, parts[j][2], mask, scale)
    else:
        met_by_each = [kv_c if met is None else met for _, _, met in parts]
        out = _masked_attention(list(zip(absorbed, met_by_each)), kv_c, mask, scale, like)
    return torch.einsum("bhqr,hrv->bhqv", out, w_uv)


def _masked_attention(
    parts: Sequence[tuple[Any, Any]], kv_c: Any, mask: Any, scale: float, like: torch.Tensor
) -> Any:
    """`mla_masked_decode` for any number of summands of the scores, each of queries and what they meet.

    Heads and query tokens are one dimension of the products, so a row's latents are read once for all of them.
    """
    rows, heads, q_len, _ = parts[0][0].shape
    keys, rank = kv_c.shape[1], kv_c.shape[2]
    scores: Any = None
    for query, met in parts:
        flat = query.reshape(rows, heads * q_len, met.shape[2])
        part = _scores(flat, _for_rows(met, rows).transpose(1, 2), like)
        scores = part if scores is None else scores + part
    weights = _masked_softmax(scores.view(rows, heads, q_len, keys) * scale, mask).to(like.dtype)
    out = torch.bmm(weights.view(rows, heads * q_len, keys), _for_rows(kv_c, rows))
    return out.view(rows, heads, q_len, rank)


def _for_rows(latents: Any, rows: Any) -> Any:
    """Latents that all rows share are given to each: `bmm` does not broadcast."""
    one = isinstance(rows, int) and rows == 1
    given = not isinstance(latents.shape[0], int) or latents.shape[0] != 1
    return latents if one or given else latents.expand(rows, -1, -1)


def _scores(queries: Any, keys: Any, like: torch.Tensor) -> Any:
    """`queries @ keys` as attention kernels compute it: in float32 where the operands are of a half type."""
    wide = accumulate_dtype(like.dtype)
    if like.dtype == wide:
        return torch.bmm(queries, keys)
    # With a symbolic size the meta function of `bmm` with `out_dtype` fails an internal assertion (torch 2.11 to 2.13).
    sizes = [size for x in (queries, keys) for size in tensor_of(x.node).shape]
    if like.device.type == "cuda" and all(isinstance(size, int) for size in sizes):
        return torch.bmm(queries, keys, out_dtype=wide)
    return torch.bmm(queries.to(wide), keys.to(wide))


def _masked_softmax(scores: Any, mask: Any) -> Any:
    """0 for a query that sees no key, as `scaled_dot_product_attention` has it."""
    if mask is None:
        return torch.softmax(scores, -1)
    boolean = tensor_of(mask.node).dtype == torch.bool
    scores = torch.where(mask, scores, -torch.inf) if boolean else scores + mask
    unseen = (scores == -torch.inf).all(-1, keepdim=True)
    return torch.where(unseen, 0.0, torch.softmax(scores, -1))

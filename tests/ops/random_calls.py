"""Random calls of all ops, each with the check of its result against the definition in float64.

`OPS` has a function for each op that makes a call from a `Draw`, of tensors on the CPU and sizes for it or for a GPU.
What kernels are compiled for (dtypes, sizes, layouts) comes from `draw.block`: on a GPU the calls of a block share it.
Tensors have any strides that the op takes, and NaN in memory that is not theirs or no row's. A check takes the
arguments before and after the call, which may have been changed since they were drawn, and the result, on the CPU.
"""

import inspect
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mla_compile import mla_append, mla_attention, mla_decode, mla_prefill
from mla_compile.latents import FP8, pack, unpack
from mla_compile.ops.attention.masked_decode import mla_masked_decode
from mla_compile.ops.attention.metadata import mla_decode_metadata
from mla_compile.ops.attention.norm_rope import mla_norm_rope_append, mla_rotate_queries
from mla_compile.ops.attention.operands import NormRopeAppendOperands
from mla_compile.ops.attention.select_keys import mla_decode_select
from mla_compile.ops.attention.sparse import mla_sparse_attention
from mla_compile.ops.experts.moe import _experts
from mla_compile.ops.experts.routing import choose_experts, moe_router
from mla_compile.ops.linear.fp8_linear import fp8_linear
from mla_compile.ops.linear.matmul import batch_invariant_matmul, fused_linear, matmul_by_head
from mla_compile.ops.linear.norm_linear import norm_linear
from mla_compile.ops.norm.rms_norm import fused_add_rms_norm, fused_rms_norm
from mla_compile.ops.reductions.last_dim import batch_invariant_sum, row_argmax
from mla_compile.ops.sampling.sample import sample_tokens
from stress.runner import Draw
from tests import kernel_cases
from tests.cases import make_case
from tests.fp8_cases import fp8_weight, values_of
from tests.kernel_cases import TOLERANCE, DecodeCase, MoeCase, decode_case, decode_reference
from tests.ops.rotate_queries import rotation_case
from tests.ops.sample_tokens import PARAMETERS
from tests.ops.sample_tokens import check as check_samples
from tests.reference import attend_one, mla_attention_reference

Args = dict[str, Any]


class Call(NamedTuple):
    """A call of an op. check: takes the arguments before and after the call, and its result."""

    function: Callable[..., Any]
    args: Args
    check: Callable[[Args, Args, Any], None]
    mutates: tuple[str, ...] = ()
    op: str = ""

    @property
    def name(self) -> str:
        return self.op or self.function.__name__


OPS: list[Callable[[Draw, str], Call]] = []


def case_of(make: Callable[[Draw, str], Call]) -> Callable[[Draw, str], Call]:
    OPS.append(make)
    return make


def dtype_of(draw: Draw, device: str) -> torch.dtype:
    exact = [torch.float32, torch.float64]
    return draw.block.choice(
        [torch.float32, torch.bfloat16, torch.float16] if device == "cuda" else [*exact, *TOLERANCE]
    )


def seed_of(draw: Draw) -> int:
    return draw.randrange(2**16)


def size(draw: Draw, device: str, few: tuple[int, ...], most: int, least: int = 1) -> int:
    """One of few sizes on a GPU, where each compiles a kernel; any up to `most` on a CPU."""
    return draw.block.choice(few) if device == "cuda" else draw.randint(least, most)


def randn(draw: Draw, dtype: torch.dtype, *shape: int) -> Tensor:
    g = torch.Generator().manual_seed(seed_of(draw))
    return torch.randn(shape, generator=g).to(dtype)


def strided(draw: Draw, x: Tensor) -> Tensor:
    """The same values, perhaps as a view of a tensor that is NaN elsewhere, or laid out in another order."""
    draw = draw.block
    kind = draw.randrange(4)
    if kind == 0 or x.dim() == 0 or x.dtype == torch.bool or not x.dtype.is_floating_point:
        return x
    if kind == 1 and x.dim() > 1:
        i, j = draw.sample(range(x.dim()), 2)
        return x.transpose(i, j).clone(memory_format=torch.contiguous_format).transpose(i, j)
    dim, before, after = draw.randrange(x.dim()), draw.randrange(4), draw.randrange(4)
    shape = list(x.shape)
    shape[dim] += before + after
    wide = torch.full(shape, torch.nan, dtype=torch.float32, device=x.device).to(x.dtype)
    return wide.narrow(dim, before, x.shape[dim]).copy_(x)


def near(
    got: Tensor,
    expected: Tensor,
    dtype: torch.dtype,
    units: float = 2.0,
    scale: Tensor | None = None,
    least: float = 1e-2,
) -> None:
    """Each last dimension on its own scale, or that of `scale`; NaN and infinities are where they are expected.

    least: of a scale. A result that follows from a few numbers may cancel to almost nothing.
    """
    assert got.shape == expected.shape, f"shape {list(got.shape)}, expected {list(expected.shape)}"
    got, expected = got.double(), expected.double()
    finite = expected.isfinite()
    if not torch.equal(got[~finite], expected[~finite]):
        torch.testing.assert_close(got[~finite], expected[~finite], equal_nan=True)
    got, expected = got.masked_fill(~finite, 0), expected.masked_fill(~finite, 0)
    if got.numel():
        assert got.isfinite().all(), "NaN or an infinity where a number is expected"
        scale = expected.abs().amax(-1, keepdim=True) if scale is None else scale
        error = float(((got - expected).abs() / scale.clamp(min=least)).max())
        assert error <= units * TOLERANCE[dtype], f"error {error:.2e} for {dtype}"


def check_result(
    got: Tensor,
    dtype: torch.dtype,
    expected: Tensor,
    units: float = 2.0,
    scale: Tensor | None = None,
    least: float = 1e-2,
) -> None:
    assert got.dtype == dtype, f"{got.dtype}, expected {dtype}"
    near(got, expected, dtype, units, scale, least)


def check_products(
    got: Tensor, dtype: torch.dtype, x: Tensor, weights: list[Tensor], units: float = 2.0
) -> None:
    """Of float64 x and weights; a sum on the scale of its terms."""
    w = torch.cat(weights).double().T
    check_result(got, dtype, x @ w, units, x.abs() @ w.abs())


def columns_for(draw: Draw, lengths: list[int], page_size: int) -> int:
    return max([1, *(-(-n // page_size) for n in lengths)]) + draw.choice((0, 0, 3))


@case_of
def decode(draw: Draw, device: str) -> Call:
    on_gpu, block = device == "cuda", draw.block
    fp8, rows, q_len = block.random() < 0.15, draw.randint(0, 4), block.randint(1, 4)
    lengths = [
        draw.choice([0, 1, draw.randint(0, 20), draw.randint(0, 300 if on_gpu else 40)]) for _ in range(rows)
    ]
    q_lens = block.choice([None, [draw.randint(0, q_len) for _ in range(rows)]])
    page_size = size(draw, device, (1, 16, 48, 64), 9)
    case = decode_case(
        lengths,
        q_len=q_len,
        q_lens=q_lens,
        heads=block.choice((1, 4, 16, 20)) if on_gpu else draw.randint(1, 5),
        rank=block.choice((128, 512) if fp8 or on_gpu else (1, 4, 7, 32)) if not fp8 or on_gpu else 128,
        rope=block.choice((64,) if on_gpu else (2, 6, 16)),
        page_size=page_size,
        columns=columns_for(draw, lengths, page_size),
        dtype=dtype_of(draw, device),
        seed=seed_of(draw),
        fp8=fp8,
    )
    args = {field.name: getattr(case, field.name) for field in fields(case)}
    args |= {name: strided(draw, args[name]) for name in ("q_latent", "q_pe")}
    args |= {"backend": None, "batch_invariant": block.random() < 0.3}
    draw.note("lengths", lengths, "q_lens", q_lens)

    def check(before: Args, _: Args, result: Any) -> None:
        out, lse = result
        case = DecodeCase(**{field.name: before[field.name] for field in fields(DecodeCase)})
        expected, expected_lse = decode_reference(case) if len(case.seq_lens) else (out, lse)
        check_result(out, case.q_latent.dtype, expected)
        assert out.is_contiguous() and lse.is_contiguous()
        assert lse.shape == out.shape[:2]
        torch.testing.assert_close(lse.double(), expected_lse.double(), rtol=1e-5, atol=1e-4, equal_nan=True)

    return Call(mla_decode, args, check)


def drawn_chunks(draw: Draw) -> list[tuple[int, int]]:
    return [(draw.randint(1, 6), draw.choice((0, draw.randint(0, 20)))) for _ in range(draw.randint(1, 3))]


@case_of
def attention(draw: Draw, device: str) -> Call:
    q_len = draw.randint(1, 3)
    decoded = [draw.randint(0, 12) for _ in range(draw.randint(0, 3))]
    chunks = drawn_chunks(draw) if not decoded or draw.random() < 0.5 else []
    q_lens = draw.choice((None, [draw.randint(0, q_len) for _ in decoded]))
    sizes = {"heads": draw.randint(1, 3), "rank": draw.randint(1, 9), "rope": 2 * draw.randint(1, 3)}
    sizes |= {"nope": draw.randint(1, 6), "v": draw.randint(1, 6), "page_size": draw.randint(1, 8)}
    case = make_case(
        decoded,
        chunks,
        q_len=q_len,
        q_lens=q_lens if decoded else None,
        dtype=dtype_of(draw, "cpu"),
        seed=seed_of(draw),
        **sizes,
    )
    draw.note("decode", decoded, "q_lens", q_lens, "prefill", chunks, sizes)
    args = vars(case)
    args |= {name: strided(draw, args[name]) for name in ("q_nope", "q_pe", "kv_c", "k_pe", "w_uk", "w_uv")}

    def check(before: Args, after: Args, result: Tensor) -> None:
        expected = mla_attention_reference(**before)  # it writes the latents
        least = 0.5 if min(sizes["rank"], sizes["v"]) < 4 else 1e-2
        check_result(result, before["q_nope"].dtype, expected, units=6, least=least)
        assert torch.equal(before["kv_cache"].nan_to_num(7), after["kv_cache"].nan_to_num(7))

    return Call(mla_attention, args, check, ("kv_cache",))


@case_of
def append(draw: Draw, device: str) -> Call:
    fp8 = draw.block.random() < 0.3
    tokens, pages, page_size = draw.randint(0, 6), draw.randint(1, 4), size(draw, device, (16,), 6)
    rank, rope = (128 if fp8 else draw.randint(1, 9)), 2 * draw.randint(1, 3)
    if device == "cuda":
        rank, rope = 512, 64
    dtype = dtype_of(draw, device)
    slots = draw.sample(range(pages * page_size), min(tokens, pages * page_size))
    slots = [-1 if draw.random() < 0.2 else slot for slot in slots] + [-1] * (tokens - len(slots))
    args = {
        name: strided(draw, randn(draw, dtype, tokens, n)) for name, n in (("kv_c", rank), ("k_pe", rope))
    }
    cache = torch.full((pages, page_size, rank + rope), torch.nan, dtype=dtype)
    args["kv_cache"] = kernel_cases.fp8_cache(cache, rank) if fp8 else cache
    args["slot_mapping"] = torch.tensor(slots, dtype=torch.int64)

    def check(before: Args, after: Args, _: Any) -> None:
        expected = before["kv_cache"].flatten(0, 1)
        latents = torch.cat([before["kv_c"], before["k_pe"]], -1)
        latents = pack(before["kv_c"], before["k_pe"]) if expected.dtype == FP8 else latents
        for slot, latent in zip(before["slot_mapping"].tolist(), latents, strict=True):
            if slot >= 0:
                expected[slot] = latent
        same_bits(after["kv_cache"].flatten(0, 1), expected)

    return Call(mla_append, args, check, ("kv_cache",))


@case_of
def norm_rope_append(draw: Draw, device: str) -> Call:
    case = kernel_cases.norm_rope_append_case(
        draw.randint(0, 6),
        *((512, 64) if device == "cuda" else (draw.randint(1, 9), 2 * draw.randint(1, 4))),
        interleaved_in=draw.block.random() < 0.5,
        interleaved_out=draw.block.random() < 0.5,
        per_column=draw.block.random() < 0.3,
        heads=draw.block.choice((0, 0, 2)),
        angles=draw.block.choice((torch.float32, torch.float64, torch.bfloat16)),
        dtype=dtype_of(draw, device),
        seed=seed_of(draw),
    )

    def check(before: Args, after: Args, _: Any) -> None:
        if not len(before["kv_a"]):
            same_bits(after["kv_cache"], before["kv_cache"])
            return
        appended = NormRopeAppendOperands(**before | {"kv_cache": after["kv_cache"]})
        kernel_cases.check_norm_rope_append(appended, before["kv_cache"], units=4)
        if before["q_pe"] is not None:
            check_rotated(before, after)

    return Call(mla_norm_rope_append, case._asdict(), check, ("kv_cache", "q_pe"))


def check_rotated(before: Args, after: Args) -> None:
    """By the definition, a pair at a time."""
    x, cos, sin = (before[name].double() for name in ("q_pe", "cos", "sin"))
    half = x.shape[-1] // 2

    def columns(interleaved: bool, pair: int) -> tuple[int, int]:
        return (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + half)

    out = torch.empty_like(x)
    for pair in range(half):
        a, b = (x[..., column] for column in columns(before["interleaved_in"], pair))
        first, second = columns(before["interleaved_out"], pair)
        other = pair + cos.shape[1] - half
        out[..., first] = a * cos[:, pair, None] - b * sin[:, pair, None]
        out[..., second] = a * sin[:, other, None] + b * cos[:, other, None]
    check_result(after["q_pe"], before["q_pe"].dtype, out, units=4)


@case_of
def rotate_queries(draw: Draw, device: str) -> Call:
    *tensors, one, other = rotation_case(
        draw.randint(0, 5),
        draw.block.randint(1, 4),
        64 if device == "cuda" else 2 * draw.randint(1, 6),
        draw.block.randint(0, 5),
        interleaved_in=draw.block.random() < 0.5,
        interleaved_out=draw.block.random() < 0.5,
        per_column=draw.block.random() < 0.3,
        dtype=dtype_of(draw, device),
        angles=draw.block.choice((torch.float32, torch.float64, torch.bfloat16)),
        seed=seed_of(draw),
    )
    args = dict(zip(("q_pe", "cos", "sin"), tensors)) | {"interleaved_in": one, "interleaved_out": other}
    return Call(mla_rotate_queries, args, lambda before, after, _: check_rotated(before, after), ("q_pe",))


@case_of
def masked_decode(draw: Draw, device: str) -> Call:
    keys, rows = draw.randint(1, 200 if device == "cuda" else 30), draw.randint(1, 3)
    case = kernel_cases.masked_case(
        [draw.randint(0, keys) for _ in range(rows)],
        masked=draw.block.choice(("none", "bool", "float", "heads")),
        q_len=draw.block.randint(1, 3),
        keys=keys,
        shared=draw.block.random() < 0.3,
        heads=draw.block.randint(1, 4),
        rank=size(draw, device, (128,), 9),
        rope=size(draw, device, (64,), 6),
        dtype=dtype_of(draw, device),
        seed=seed_of(draw),
    )

    def check(before: Args, _: Args, result: Tensor) -> None:
        expected = kernel_cases.masked_reference(kernel_cases.MaskedCase(**before))
        check_result(result, before["q_latent"].dtype, expected, least=0.1)  # one column may cancel

    args = {field.name: getattr(case, field.name) for field in fields(case)}
    args["q_latent"] = strided(draw, args["q_latent"])
    return Call(mla_masked_decode, args, check)


@case_of
def prefill(draw: Draw, device: str) -> Call:
    chunks, fp8 = drawn_chunks(draw), draw.block.random() < 0.15
    sizes = {"heads": draw.randint(1, 3), "rank": draw.randint(1, 9), "rope": 2 * draw.randint(1, 3)}
    sizes |= {"nope": draw.randint(1, 6), "v": draw.randint(1, 6)}
    if device == "cuda":
        heads, rank, nope, v = map(draw.block.choice, ((1, 2, 4), (256, 512), (64, 128), (64, 128)))
        sizes = {"heads": heads, "rank": rank, "rope": 64, "nope": nope, "v": v}
    if fp8:
        sizes["rank"] = 128 if device == "cpu" else 512
    page_size = size(draw, device, (16,), 8)
    made = make_case(
        prefill=chunks, page_size=page_size, dtype=dtype_of(draw, device), seed=seed_of(draw), **sizes
    )
    names = [
        name
        for name in inspect.signature(mla_prefill).parameters
        if name not in ("before", "batch_invariant")
    ]
    args = dict(zip(names, kernel_cases.prefill_args(made), strict=True))
    args["kv_cache"] = kernel_cases.fp8_cache(args["kv_cache"], sizes["rank"]) if fp8 else args["kv_cache"]
    args["q"] = strided(draw, args["q"])
    args |= {"before": None, "batch_invariant": draw.block.random() < 0.3}
    if draw.block.random() < 0.3:
        args["before"] = randn(draw, args["q"].dtype, draw.randint(0, 3), sizes["heads"], sizes["v"])
    draw.note("chunks", chunks, sizes)
    return Call(mla_prefill, args, check_prefill)


def check_prefill(before: Args, _: Args, result: Tensor) -> None:
    q, w_uk, w_uv = before["q"], before["w_uk"].double(), before["w_uv"].double()
    cache = before["kv_cache"]
    cache = unpack(cache, w_uv.shape[1], torch.float64) if cache.dtype == FP8 else cache
    flat, starts = cache.flatten(0, 1), before["cu_seqlens_q"].tolist()
    cuts = before["cu_seqlens_k"].tolist()
    outs = [] if before["before"] is None else list(before["before"].double())
    for row in range(len(starts) - 1):
        parts = [slots[cut[row] : cut[row + 1]] for slots, cut in zip(before["key_slots"], cuts)]
        latents, n = flat[torch.cat(parts)], starts[row + 1] - starts[row]
        for j in range(n):
            halves = q[starts[row] + j].split([w_uk.shape[1], q.shape[2] - w_uk.shape[1]], -1)
            seen = latents[: max(0, len(latents) - n + j + 1)]
            outs.append(attend_one(*halves, seen, w_uk, w_uv, before["softmax_scale"])[0])
    assert len(outs) <= len(result), "tokens are missing"
    check_result(result[: len(outs)], q.dtype, torch.stack(outs) if outs else result[:0].double(), units=6)


@case_of
def decode_metadata(draw: Draw, device: str) -> Call:
    rows, columns, q_len, page_size = (
        draw.randint(0, 4),
        draw.randint(1, 4),
        draw.block.randint(1, 4),
        draw.block.randint(1, 6),
    )

    def ints(*shape: int, high: int, low: int = 0) -> Tensor:
        values = [draw.randint(low, high) for _ in range(torch.Size(shape).numel())]
        return torch.tensor(values, dtype=torch.int32).view(shape)

    args: Args = {
        "num_cached": ints(rows, high=columns * page_size + 1),
        "block_table": ints(rows, columns, high=2**31 - 1),
    }
    args["q_lens"] = draw.block.choice((None, ints(rows, high=q_len)))
    return Call(mla_decode_metadata, args | {"q_len": q_len, "page_size": page_size}, check_decode_metadata)


def check_decode_metadata(before: Args, _: Args, result: tuple[Tensor, ...]) -> None:
    q_len, page_size, lens, positions, slots = before["q_len"], before["page_size"], [], [], []
    cached, table = before["num_cached"].tolist(), before["block_table"].tolist()
    valid = [q_len] * len(cached) if before["q_lens"] is None else before["q_lens"].tolist()
    for held, pages, n in zip(cached, table, valid, strict=True):
        lens.append(held + n if n > 0 else 0)
        for j, position in enumerate(range(held, held + q_len)):
            positions.append(position)
            inside = j < n and 0 <= position < len(pages) * page_size
            slots.append(pages[position // page_size] * page_size + position % page_size if inside else -1)
    assert [x.tolist() for x in result] == [lens, valid, slots, positions]


@case_of
def router(draw: Draw, device: str) -> Call:
    block = draw.block
    groups = block.choice((1, 1, 2, 4))
    per_group = block.randint(2, 6)
    softmax, topk_groups = block.random() < 0.5, block.randint(1, groups)
    topk = block.randint(1, topk_groups * per_group)
    rest = (topk, groups, topk_groups, softmax, block.random() < 0.5, block.choice((1.0, 2.5)))
    dtype, hidden = dtype_of(draw, device), size(draw, device, (64,), 12)
    x = randn(draw, dtype, draw.randint(0, 5), hidden)
    weight, bias = (
        randn(draw, dtype, groups * per_group, hidden),
        randn(draw, torch.float32, groups * per_group),
    )
    names = [*inspect.signature(moe_router).parameters]
    args = dict(
        zip(names, (strided(draw, x), weight, block.choice((None, bias)), *rest, block.random() < 0.3))
    )
    return Call(moe_router, args, check_router)


def check_router(before: Args, _: Args, result: tuple[Tensor, Tensor]) -> None:
    """Near-ties, which rounding may turn, are left out: a change or its opposite turns them."""
    weights, ids = result
    x, weight, bias = before["x"].double(), before["weight"].double(), before["bias"]
    bias = None if bias is None else bias.double()
    rest = [before[name] for name in ("topk", "num_groups", "topk_groups", "softmax", "normalize", "scaling")]
    logits = x @ weight.T
    expected, expected_ids = choose_experts(logits, bias, *rest)
    assert weights.shape == ids.shape == expected.shape and ids.dtype == torch.int64
    scores = logits.softmax(-1) if before["softmax"] else logits.sigmoid()
    clear = torch.ones(len(x), dtype=torch.bool, device=x.device)
    for seed in range(3):
        g = torch.Generator(x.device).manual_seed(seed)
        change, of_scores = torch.randn(2, *logits.shape, generator=g, dtype=torch.float64, device=x.device)
        for near_tie in (
            (logits + 1e-4 * change, bias),
            (logits - 1e-4 * change, bias),
            (logits, (0.0 if bias is None else bias) + 1e-6 * scores * of_scores),
            (logits, (0.0 if bias is None else bias) - 1e-6 * scores * of_scores),
        ):
            ids_then = choose_experts(*near_tie, *rest)[1]
            clear &= (ids_then.sort(1).values == expected_ids.sort(1).values).all(1)
    order, other = ids[clear].argsort(1), expected_ids[clear].argsort(1)
    assert torch.equal(ids[clear].gather(1, order), expected_ids[clear].gather(1, other))
    near(weights[clear].gather(1, order), expected[clear].gather(1, other), torch.float32, units=20)


@case_of
def experts(draw: Draw, device: str) -> Call:
    block = draw.block
    fp8, tokens, topk = block.random() < 0.15, draw.randint(0, 6), block.randint(1, 3)
    case = kernel_cases.moe_case(
        tokens,
        topk,
        experts=block.randint(1, 5),
        hidden=size(draw, device, (128,), 12),
        intermediate=size(draw, device, (64,), 10),
        shared=block.choice((0, 0, 1, 2)),
        dtype=dtype_of(draw, device),
        seed=seed_of(draw),
        fp8=fp8,
    )
    q_len = block.randint(1, 3)
    lens = block.choice((None, [draw.randint(0, q_len + 1) for _ in range(tokens // q_len)]))
    row_lens = None
    if lens is not None:
        row_lens, q_len, _ = kernel_cases.padding(case, q_len, [min(n, q_len) for n in lens])
    names = [*inspect.signature(_experts).parameters]
    args = dict(zip(names, (*case.all_args(row_lens, q_len), block.random() < 0.3), strict=True))
    return Call(_experts, args, check_experts, op="moe_experts")


def check_experts(before: Args, _: Args, result: Tensor) -> None:
    values, q_len, lens = list(before.values()), before["q_len"], before["row_lens"]
    case = MoeCase(*values[:5], tuple(values[7:10]), tuple(values[10:15]))
    runs = torch.ones(len(case.x), dtype=torch.bool, device=case.x.device)
    for row, n in enumerate([] if lens is None else lens.tolist()):
        runs[row * q_len + max(0, n) : (row + 1) * q_len] = False
    assert not result[~runs].any(), "padding is not 0"
    kept = replace(case, x=case.x[runs], topk_weights=case.topk_weights[runs], topk_ids=case.topk_ids[runs])
    least = 0.5 if case.x.shape[1] < 4 else 1e-2
    check_result(result[runs], case.x.dtype, kernel_cases.moe_reference(kept), units=4, least=least)


def linear_weights(draw: Draw, device: str, dtype: torch.dtype, k: int) -> list[Tensor]:
    """One weight or two, which may be adjacent."""
    sizes = [size(draw, device, (64, 128), 9) for _ in range(draw.block.randint(1, 2))]
    both = randn(draw, dtype, sum(sizes), k)
    return [part.clone() if draw.block.random() < 0.4 else part for part in both.split(sizes)]


@case_of
def linear(draw: Draw, device: str) -> Call:
    dtype, k = dtype_of(draw, device), size(draw, device, (128,), 12)
    first, *second = linear_weights(draw, device, dtype, k)
    x = strided(draw, randn(draw, dtype, draw.randint(0, 6), k))
    args = {
        "x": x,
        "first": first,
        "second": second[0] if second else None,
        "batch_invariant": draw.block.random() < 0.3,
    }

    def check(before: Args, _: Args, result: Tensor) -> None:
        weights = [w for w in (before["first"], before["second"]) if w is not None]
        check_products(result, before["x"].dtype, before["x"].double(), weights)

    return Call(fused_linear, args, check)


@case_of
def linear_fp8(draw: Draw, device: str) -> Call:
    k = draw.block.choice((128, 256)) if device == "cuda" else draw.choice((draw.randint(1, 20), 130))
    x = strided(draw, randn(draw, dtype_of(draw, device), draw.randint(0, 4), k))
    pairs = [
        fp8_weight(draw.block.choice((128, 7)), k, seed=seed_of(draw))
        for _ in range(draw.block.randint(1, 2))
    ]
    first, second = pairs[0], pairs[1] if len(pairs) > 1 else (None, None)
    args = dict(zip(("x", "first", "first_scale", "second", "second_scale"), (x, *first, *second)))
    args["batch_invariant"] = draw.block.random() < 0.3

    def check(before: Args, _: Args, result: Tensor) -> None:
        x, names = before["x"], [name for name in ("first", "second") if before[name] is not None]
        weights = [values_of(before[name], before[f"{name}_scale"], x.dtype) for name in names]
        check_products(result, x.dtype, x.double(), weights)

    return Call(fp8_linear, args, check)


def normed(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    out = x.double() * torch.rsqrt(x.double().square().mean(1, keepdim=True) + eps)
    return out if weight is None else out * weight.double()


@case_of
def linear_after_norm(draw: Draw, device: str) -> Call:
    dtype, k, tokens = dtype_of(draw, device), size(draw, device, (128,), 12), draw.randint(0, 5)
    x, residual = (strided(draw, randn(draw, dtype, tokens, k)) for _ in range(2))
    first, *second = linear_weights(draw, device, dtype, k)
    args = {
        "x": x,
        "residual": draw.block.choice((None, residual)),
        "eps": 1e-5,
        "first": first,
        "norm_weight": draw.block.choice((None, randn(draw, dtype, k))),
        "second": second[0] if second else None,
        "batch_invariant": draw.block.random() < 0.3,
    }

    def check(before: Args, _: Args, result: tuple[Tensor, Tensor]) -> None:
        x, residual, eps = before["x"], before["residual"], before["eps"]
        total = x if residual is None else x + residual
        product = normed(total, before["norm_weight"], eps)
        weights = [w for w in (before["first"], before["second"]) if w is not None]
        check_products(result[0], x.dtype, product, weights, units=4)
        check_result(result[1], x.dtype, total if residual is not None else x[:0])

    return Call(norm_linear, args, check)


@case_of
def norms(draw: Draw, device: str) -> Call:
    dtype, columns, tokens = dtype_of(draw, device), size(draw, device, (64, 576), 12, 0), draw.randint(0, 5)
    x, residual = (strided(draw, randn(draw, dtype, tokens, columns)) for _ in range(2))
    args: Args = {"x": x, "weight": draw.block.choice((None, randn(draw, dtype, columns))), "eps": 1e-5}
    if draw.block.random() < 0.5:

        def check(before: Args, _: Args, result: Tensor) -> None:
            expected = normed(before["x"], before["weight"], before["eps"])
            check_result(result, before["x"].dtype, expected, units=4)

        return Call(fused_rms_norm, args, check)

    def check_sum(before: Args, _: Args, result: tuple[Tensor, Tensor]) -> None:
        total = before["x"] + before["residual"]
        check_result(result[1], total.dtype, total)
        check_result(result[0], total.dtype, normed(total, before["weight"], before["eps"]), units=4)

    return Call(fused_add_rms_norm, args | {"residual": residual}, check_sum)


@case_of
def products(draw: Draw, device: str) -> Call:
    dtypes = (dtype_of(draw, device),)
    x, w = kernel_cases.drawn_matmul(
        draw, most_tokens=5, most=64 if device == "cuda" else 16, dtypes=dtypes, block=draw.block
    )
    function = draw.block.choice((batch_invariant_matmul, matmul_by_head))

    def check(before: Args, _: Args, result: Tensor) -> None:
        kernel_cases.check_matmul(before["x"], before["w"], result)

    return Call(function, {"x": x, "w": w}, check)


@case_of
def reductions(draw: Draw, device: str) -> Call:
    x = strided(
        draw,
        randn(draw, dtype_of(draw, device), draw.randint(0, 4), size(draw, device, (7, 600), 20)),
    )
    if draw.block.random() < 0.5:
        return Call(row_argmax, {"x": x}, lambda before, _, result: same_bits(result, before["x"].argmax(-1)))

    def check(before: Args, _: Args, result: Tensor) -> None:
        near(result[:, None], before["x"].double().sum(-1)[:, None], torch.float32, units=20)

    return Call(batch_invariant_sum, {"x": x}, check)


@case_of
def samples(draw: Draw, device: str) -> Call:
    rows, n, vocab = draw.randint(1, 3), draw.randint(1, 3), size(draw, device, (5, 300), 12)
    logits = strided(draw, randn(draw, dtype_of(draw, "cuda"), rows, n, vocab).mul_(3))
    parameters = [draw.choice(PARAMETERS) for _ in range(rows)]
    columns = [torch.tensor([p[i] for p in parameters]).float() for i in range(4)]
    position = torch.tensor([[draw.getrandbits(31) for _ in range(n)] for _ in range(rows)])
    seed = torch.tensor([draw.getrandbits(62) for _ in range(rows)])
    names = ("logits", "position", "seed", "temperature", "top_k", "top_p", "min_p")
    args = dict(zip(names, (logits, position, seed, columns[0], columns[1].int(), *columns[2:])))
    args["top_k"] = torch.tensor([p[1] for p in parameters], dtype=torch.int32)

    def check(before: Args, _: Args, result: Tensor) -> None:
        wide = {
            name: x.float() if x.dtype == torch.float64 and name != "logits" else x
            for name, x in before.items()
        }
        check_samples(lambda *_: result, tuple(wide.values()))

    return Call(sample_tokens, args, check)


@case_of
def sparse(draw: Draw, device: str) -> Call:
    topk = size(draw, device, (16, 64), 9)
    case = kernel_cases.sparse_case(
        [draw.randint(0, topk) for _ in range(draw.randint(1, 4))],
        topk=topk,
        heads=draw.block.randint(1, 4),
        rank=size(draw, device, (512,), 9),
        rope=size(draw, device, (64,), 6),
        dtype=dtype_of(draw, device),
        seed=seed_of(draw),
    )
    args = dict(zip(("q_latent", "q_pe", "kv_cache", "selected", "softmax_scale"), case, strict=True))
    args |= {name: strided(draw, args[name]) for name in ("q_latent", "q_pe")}

    def check(before: Args, _: Args, result: Tensor) -> None:
        flat, rank = before["kv_cache"].flatten(0, 1).double(), before["q_latent"].shape[2]
        queries = torch.cat([before["q_latent"], before["q_pe"]], -1).double()
        outs = [queries[:0, :, :rank]]
        for query, slots in zip(queries, before["selected"]):
            latents = flat[slots[slots >= 0].long()]
            outs.append(((query @ latents.T * before["softmax_scale"]).softmax(-1) @ latents[:, :rank])[None])
        check_result(result, before["q_latent"].dtype, torch.cat(outs))

    return Call(mla_sparse_attention, args, check)


@case_of
def selections(draw: Draw, device: str) -> Call:
    """Small integers, so that scores are exact and the order among equals shows."""
    block = draw.block
    q_len, rows = block.randint(1, 3), draw.randint(0, 3)
    lengths, page_size = [draw.randint(0, 20) for _ in range(rows)], block.randint(1, 6)
    q_lens = block.choice((None, [draw.randint(0, q_len) for _ in range(rows)]))
    case = decode_case(
        lengths,
        q_len=q_len,
        q_lens=q_lens,
        rank=3,
        rope=2,
        page_size=page_size,
        columns=columns_for(draw, lengths, page_size),
        seed=seed_of(draw),
    )
    dtype, heads, width = (
        block.choice((torch.float32, torch.bfloat16)),
        block.randint(1, 4),
        block.randint(1, 6),
    )

    def whole(*shape: int) -> Tensor:
        g = torch.Generator().manual_seed(seed_of(draw))
        return torch.randint(-4, 5, shape, generator=g).to(dtype)

    tokens = rows * q_len
    cache = whole(*case.kv_cache.shape[:2], width).masked_fill(case.kv_cache[..., :1].isnan(), torch.nan)
    args = {"q": whole(tokens, heads, width), "weights": whole(tokens, heads).float(), "index_cache": cache}
    args |= {name: getattr(case, name) for name in ("block_table", "seq_lens", "q_lens", "q_len")}
    return Call(mla_decode_select, args | {"topk": block.randint(1, 12)}, check_selection)


def check_selection(before: Args, _: Args, result: Tensor) -> None:
    q_len, cache, topk = before["q_len"], before["index_cache"], before["topk"]
    page_size, expected = cache.shape[1], []
    for row, seq_len in enumerate(before["seq_lens"].tolist()):
        valid = q_len if before["q_lens"] is None else int(before["q_lens"][row])
        for j in range(q_len):
            keys = torch.arange(max(0, seq_len - (valid - 1 - j)) if j < valid else 0, device=cache.device)
            slots = before["block_table"][row, keys // page_size].long() * page_size + keys % page_size
            token = row * q_len + j
            products = (before["q"][token].double() @ cache.flatten(0, 1)[slots].double().T).relu()
            scores = (before["weights"][token].double() @ products).tolist()
            if any(score != score for score in scores):
                return  # a changed table or cache: NaN has no order
            best = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:topk]
            expected.append([int(slots[i]) for i in sorted(best)] + [-1] * (topk - len(best)))
    assert result.tolist() == expected


def same_bits(got: Tensor, expected: Tensor) -> None:
    assert got.shape == expected.shape and got.dtype == expected.dtype
    assert torch.equal(*(x.contiguous().flatten().view(torch.uint8) for x in (got, expected)))

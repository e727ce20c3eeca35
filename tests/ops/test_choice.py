"""Which implementation serves a call of an op, with fake tensors on described devices."""

import logging
import random
import re
from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from mla_compile.ops import dispatch, library
from mla_compile.ops.adjacent import lies_before
from mla_compile.ops.attention import decode_backends
from mla_compile.ops.attention.operands import DecodeOperands
from mla_compile.ops.dispatch import Candidate, first_serves
from mla_compile.ops.experts.tiles import MAX_UNSORTED_PAIRS, MIN_ROUNDED_PAIRS
from mla_compile.ops.library import choose, tables
from tests.cases import make_case
from tests.kernel_cases import (
    decode_case,
    masked_case,
    metadata_args,
    moe_case,
    norm_rope_append_case,
    prefill_args,
    prefill_metadata_args,
    sparse_case,
)
from tests.ops.rotate_queries import rotation_case
from tests.ops.routing import router_args
from tests.ops.sample_tokens import sample_args

HALF = (torch.float16, torch.bfloat16)
DTYPES = (*HALF, torch.float32, torch.float64)


def mostly(draw: random.Random, good: list[Any], bad: list[Any]) -> Any:
    """Nine times out of ten a good value: a call with one bad value shows that it matters."""
    return draw.choice(good if draw.random() < 0.9 else bad)


def arguments(op: str, draw: random.Random) -> tuple[Any, ...]:
    """A call of an op, of any sizes, strides and dtypes."""
    dtype = mostly(draw, [*HALF, torch.float32], [torch.float64])
    count = mostly(draw, [1, 2, 3, 40], [0])
    rank, rope = mostly(draw, [16, 48, 512], [8, 40, 528]), mostly(draw, [16, 64, 128], [8, 24, 144])

    def strided(x: Tensor) -> Tensor:
        return mostly(draw, [x], [x.mT.contiguous().mT]) if x.numel() else x

    if op == "mla_append":
        wide = torch.empty(count, rank + rope, dtype=dtype)
        cache = torch.empty(20, 16, rank + rope, dtype=dtype)
        return strided(wide[:, :rank]), strided(wide[:, rank:]), cache, torch.arange(count)
    if op == "mla_norm_rope_append":
        case = norm_rope_append_case(count, rank, rope, dtype=dtype)
        return strided(case.kv_a), *case[1:]
    if op == "mla_rotate_queries":
        q_pe, *others = rotation_case(count, mostly(draw, [1, 3], [0]), rope, dtype=dtype)
        return strided(q_pe), *others
    if op == "mla_masked_decode":
        keys = mostly(draw, [1, 70], [0])
        case = masked_case([keys] * min(count, 3), keys=keys, rank=rank, rope=rope, dtype=dtype)
        return *case.args()[:2], strided(case.kv_c), strided(case.k_pe), *case.args()[4:]
    if op == "mla_prefill":
        nope, rope = mostly(draw, [6, 192, 256], [0, 257]), mostly(draw, [4, 128], [130])
        v = mostly(draw, [5, 256], [0, 257])
        q, *others = prefill_args(
            make_case(prefill=[(3, 0)], nope=nope, rope=rope, v=v, rank=16, dtype=dtype)
        )
        return q[: mostly(draw, [3], [0])], *others, None, False
    if op == "moe_experts":
        case = moe_case(mostly(draw, [1, 40, 128], [0, 129, 200]), draw.choice([1, 4]), dtype=dtype)
        weights = mostly(draw, [case.topk_weights, case.topk_weights.half()], [case.topk_weights.double()])
        experts = strided(case.w_gate_up), strided(case.w_down)
        return case.x, weights, case.topk_ids, *experts, None, 1, *case.shared, *case.scales, False
    if op == "moe_router":
        x, weight, *others = router_args("glm", count, 32, dtype)
        weight = mostly(draw, [weight, weight.float()], [weight.double(), weight[:1].expand(1025, -1)])
        return strided(x), weight, None, *others[1:], False
    if op == "fused_linear":
        x, both = torch.empty(count, rank, dtype=dtype), torch.empty(9, rank, dtype=dtype)
        first, second = both.split([5, 4])
        return strided(x), *mostly(draw, [(first, second), (both, None)], [(first, second.clone())]), False
    if op in ("row_argmax", "sample_tokens"):
        x = strided(torch.empty(count, mostly(draw, [1, 7, 3000], [2**30]), device="meta", dtype=dtype))
        return (x,) if op == "row_argmax" else (x[:, None], *sample_args(count, 1, 2)[1:])
    if op == "mla_prefill_metadata":
        lens, bounds, table, *rest = prefill_metadata_args(draw)
        return lens, bounds, mostly(draw, [table], [table[:0], table[:, :0]]), *rest
    cached, table, q_lens, q_len, page_size = metadata_args(2, 4, ragged=True)
    rows = min(count, len(cached))
    return cached[:rows], table[:rows], q_lens[:rows], q_len, page_size


def runs(x: Tensor) -> bool:
    return x.dtype in (*HALF, torch.float32)


def is_few(x: Tensor) -> bool:
    return len(x) <= 2 and x.dtype in HALF


def are_many(x: Tensor, _: Tensor, topk_ids: Tensor, __: Tensor, w_down: Tensor, *___: Any) -> bool:
    pairs = topk_ids.numel()
    return (
        x.dtype == torch.bfloat16 and pairs > MAX_UNSORTED_PAIRS and pairs // len(w_down) >= MIN_ROUNDED_PAIRS
    )


KERNEL_SERVES: dict[str, Callable[..., bool]] = {
    "mla_append": lambda kv_c, k_pe, *_: (
        runs(kv_c) and kv_c.shape[0] > 0 and kv_c.stride(1) == k_pe.stride(1) == 1
    ),
    "mla_norm_rope_append": lambda kv_a, *_: runs(kv_a) and kv_a.shape[0] > 0 and kv_a.stride(1) == 1,
    "mla_rotate_queries": lambda q_pe, *_: runs(q_pe) and q_pe.numel() > 0 and q_pe.stride(2) == 1,
    "moe_router": lambda x, weight, *_: runs(x) and runs(weight) and len(x) > 0 and len(weight) <= 1024,
    "row_argmax": lambda x: runs(x) and len(x) > 0 and x.shape[1] < 2**30 and (x.stride(1) == 1),
    "sample_tokens": lambda x, *_: (
        runs(x) and len(x) * x.shape[1] > 0 and x.shape[2] <= 2**23 and x.stride(2) == 1
    ),
    "fused_linear": lambda x, first, second, *_: (
        runs(x)
        and x.dtype != torch.float32
        and 1 <= len(x) <= 16
        and (second is None or lies_before(first, second))
    ),
    "mla_masked_decode": lambda q_latent, q_pe, kv_c, k_pe, *_: (
        runs(q_latent)
        and q_latent.numel() * kv_c.shape[1] > 0
        and q_latent.shape[-1] in range(16, 513, 16)
        and q_pe.shape[-1] in range(16, 129, 16)
        and kv_c.stride(2) == k_pe.stride(2) == 1
    ),
    "mla_prefill": lambda q, _kv_cache, _w_uk, w_uv, *_: (
        runs(q)
        and q.shape[0] * q.shape[1] > 0
        and all(0 < x.shape[2] <= most for x, most in ((q, 384), (w_uv, 256)))
    ),
    "moe_experts": lambda x, topk_weights, topk_ids, w_gate_up, w_down, *_: (
        runs(x)
        and topk_ids.numel() > 0
        and topk_weights.dtype != torch.float64
        and w_gate_up.is_contiguous()
        and w_down.is_contiguous()
    ),
    "mla_decode_metadata": lambda num_cached, *_: num_cached.shape[0] > 0,
    "mla_prefill_metadata": lambda _lens, _bounds, block_table, *_: block_table.numel() > 0,
}
"""By op: whether its Triton kernel serves a call, on a GPU of SM 80 or newer."""


def on(machine: Any, patch: pytest.MonkeyPatch, *, triton: bool = True) -> None:
    """Makes every device of type "cuda" that machine: None for none, "hip", or an NVIDIA GPU's compute capability."""

    def describe(device: torch.device) -> tuple[str, tuple[int, int] | None]:
        if device.type != "cuda":
            return device.type, None
        return ("hip", None) if machine == "hip" else ("cuda", machine)

    for module in (library, decode_backends):
        patch.setattr(module, "describe_device", describe)
    # Private, as the packages of a test's machine are those of this one.
    patch.setattr(dispatch, "_installed", lambda package: triton and package == "triton")
    forget_choices()


def forget_choices() -> None:
    """Choices of a machine are cached for the life of a process; only tests change the machine."""
    library._candidates_on.cache_clear()
    decode_backends.select_backend.cache_clear()


@pytest.fixture(autouse=True)
def forget_the_machine():
    yield
    forget_choices()


def fake(args: tuple[Any, ...], machine: Any) -> tuple[Any, ...]:
    mode = FakeTensorMode()

    def moved(x: Any) -> Any:
        if not isinstance(x, Tensor) or machine is None:
            return x
        with mode:
            size = x.untyped_storage().nbytes() // x.element_size()
            memory = torch.empty(size, dtype=x.dtype, device="cuda")
            return memory.as_strided(x.shape, x.stride(), x.storage_offset())

    return tuple(map(moved, args))


@pytest.mark.parametrize("op", KERNEL_SERVES)
def test_a_kernel_serves_what_it_takes_where_it_runs_and_plain_torch_all_else(op: str) -> None:
    for seed in range(200):
        draw = random.Random(seed)
        machine = mostly(draw, [(8, 0), (9, 0), (12, 0)], [None, "hip", (7, 5)])
        installed = mostly(draw, [True], [False])
        args = fake(arguments(op, draw), machine)
        with pytest.MonkeyPatch.context() as patch:
            on(machine, patch, triton=installed)
            selection = choose(op, args)
            assert library.serving(op, args) is selection.chosen
        is_new = isinstance(machine, tuple) and machine >= (8, 0)
        expected = is_new and installed and KERNEL_SERVES[op](*args)
        many = op == "moe_router" and len(args[0]) > 32
        kernel = "product" if many else "gemv" if op == "moe_experts" and is_few(args[0]) else "triton"
        kernel = "blocks" if op == "fused_linear" and len(args[0]) > 2 else kernel
        if op == "moe_experts" and is_new and are_many(*args):
            kernel = "rounded"
        assert selection.chosen.name == (kernel if expected else "reference"), f"seed {seed}"
        names = [candidate.name for candidate in tables[op]]
        assert [name for name, _ in selection.rejected] == names[: names.index(selection.chosen.name)]
        assert all(", not " in reason or "not installed" in reason for _, reason in selection.rejected)


ORDINARY: dict[str, Callable[[torch.dtype], tuple[Any, ...]]] = {
    "mla_append": lambda dtype: (
        torch.empty(3, 512, dtype=dtype),
        torch.empty(3, 64, dtype=dtype),
        torch.empty(2, 64, 576, dtype=dtype),
        torch.arange(3),
    ),
    "mla_norm_rope_append": lambda dtype: norm_rope_append_case(3, 512, 64, dtype=dtype),
    "mla_rotate_queries": lambda dtype: rotation_case(3, 20, 64, 192, dtype=dtype),
    "mla_masked_decode": lambda dtype: masked_case([5, 6], rank=512, rope=64, dtype=dtype).args(),
    "mla_prefill": lambda dtype: (
        *prefill_args(make_case(prefill=[(3, 5)], nope=128, rope=64, v=128, dtype=dtype)),
        False,
    ),
    "moe_experts": lambda dtype: (*moe_case(4, 2, dtype=dtype).all_args(), False),
    "moe_router": lambda dtype: (*router_args("v3", 3, 32, dtype), False),
    "row_argmax": lambda dtype: (torch.empty(4, 1000, dtype=dtype),),
    "mla_sparse_attention": lambda dtype: sparse_case(
        [3, 64], topk=64, heads=16, rank=512, rope=64, dtype=dtype
    ),
    "mla_decode_select": lambda dtype: (
        *(torch.empty(2, 64, 128, dtype=dtype), torch.empty(2, 64), torch.empty(3, 64, 128, dtype=dtype)),
        *(torch.ones(2, 1, dtype=torch.int32), torch.ones(2, dtype=torch.int32), None, 1, 2048),
    ),
    "mla_prefill_select": lambda dtype: (
        *(torch.empty(2, 64, 128, dtype=dtype), torch.empty(2, 64), torch.empty(3, 64, 128, dtype=dtype)),
        *(torch.tensor([0, 2], dtype=torch.int32), torch.tensor([[0, 2]], dtype=torch.int32)),
        *(torch.tensor([[64, 65]]), 2048),
    ),
    "sample_tokens": lambda dtype: sample_args(4, 2, 1000, dtype),
    "mla_decode_metadata": lambda dtype: metadata_args(2, 4, ragged=True),
    "mla_prefill_metadata": lambda dtype: prefill_metadata_args(random.Random(0)),
}


@pytest.mark.parametrize("op", ORDINARY)
@pytest.mark.parametrize(
    ("machine", "dtype", "expected"),
    [
        ((9, 0), torch.bfloat16, "triton"),
        ((8, 0), torch.float16, "triton"),
        ((9, 0), torch.float32, "triton"),
        ((7, 5), torch.float16, "reference"),
        (None, torch.bfloat16, "reference"),
    ],
    ids=str,
)
def test_which_kernel_serves_an_ordinary_call(
    op: str, machine: Any, dtype: torch.dtype, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(machine, monkeypatch)
    assert choose(op, fake(ORDINARY[op](dtype), machine)).chosen.name == expected


@pytest.mark.parametrize(
    ("machine", "dtype", "widths", "expected"),
    [
        ((9, 0), torch.bfloat16, (512, 64), "gluon"),
        ((9, 0), torch.float16, (512, 64), "triton"),
        ((9, 0), torch.bfloat16, (256, 64), "triton"),
        ((8, 0), torch.float16, (512, 64), "triton"),
        ((8, 0), torch.float32, (512, 64), "triton"),
        ((9, 0), torch.float64, (512, 64), "reference"),
        ((9, 0), torch.bfloat16, (40, 64), "reference"),
        ((7, 5), torch.float16, (512, 64), "reference"),
        (None, torch.bfloat16, (512, 64), "reference"),
    ],
    ids=str,
)
def test_which_backend_serves_a_decode_call(
    machine: Any,
    dtype: torch.dtype,
    widths: tuple[int, int],
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on(machine, monkeypatch)
    case = decode_case([5, 3], rank=widths[0], rope=widths[1], dtype=dtype)
    args = fake(case.args(), machine)
    call = decode_backends.decode_call(DecodeOperands(*args), captured=True)
    assert decode_backends.select_backend(call).chosen.name == expected


def prefill_of(tokens: int, keys: int, parts: int = 1, *, batch_invariant: bool = False) -> tuple[Any, ...]:
    """Arguments of `mla_prefill` with DeepSeek-V3's widths, for the choice alone."""
    half = {"dtype": torch.bfloat16}
    sums, slots = torch.empty(parts, 2, dtype=torch.int32), torch.empty(parts, keys, dtype=torch.int64)
    weights = torch.empty(16, 128, 512, **half), torch.empty(16, 512, 128, **half)
    return (
        torch.empty(tokens, 16, 192, **half),
        torch.empty(2, 64, 576, **half),
        *weights,
        sums[0],
        sums,
        slots,
        1.0,
        None,
        batch_invariant,
    )


def test_short_extends_of_long_texts_are_absorbed_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    on((9, 0), monkeypatch)
    monkeypatch.setattr(dispatch, "_installed", lambda package: True)
    monkeypatch.setattr(dispatch, "_import_error", lambda function: None)
    constraints = library.tables["mla_prefill"][0].constraints
    most, least = constraints["tokens"].stop - 1, constraints["keys per token"].start

    def chosen(*sizes: int) -> str:
        return choose("mla_prefill", fake(prefill_of(*sizes), (9, 0))).chosen.name

    assert chosen(16, 8208) == chosen(48, 4144) == chosen(1, 100) == "absorbed"
    assert chosen(16, 16) == chosen(4096, 4096) == chosen(512, 40_000) == chosen(49, 4145) == "flash_attn"
    draw = random.Random(0)
    for _ in range(100):
        tokens = draw.choice([1, 2, draw.randint(1, 2 * most), most, most + 1, 512])
        parts = draw.randint(1, 3)
        keys = max(2, draw.choice([tokens, least * tokens - 1, least * tokens, 32_768]) // parts)
        absorbed = tokens <= most and keys * parts >= least * tokens
        assert chosen(tokens, keys, parts) == ("absorbed" if absorbed else "flash_attn"), (
            tokens,
            keys,
            parts,
        )
    ((_, reason),) = choose("mla_prefill", fake(prefill_of(8, 16), (9, 0))).rejected
    assert re.search(rf"keys per token .*\b{least}\b.*\b2$", reason)
    asked = choose("mla_prefill", fake(prefill_of(16, 8208, batch_invariant=True), (9, 0)))
    assert asked.chosen.name == "flash_attn"
    ((name, reason),) = asked.rejected
    assert name == "absorbed" and "bits" in reason


def test_a_reason_names_what_is_supported_and_what_came(monkeypatch: pytest.MonkeyPatch) -> None:
    on((9, 0), monkeypatch)

    def reason(op: str, *args: Any) -> str:
        return dict(choose(op, fake(args, (9, 0))).rejected)["triton"]

    case = masked_case([5], rank=40, dtype=torch.bfloat16)
    assert reason("mla_masked_decode", *case.args()) == "supports kv_lora_rank of 16..512 by 16, not 40"
    experts = moe_case(0, 4)
    why = reason("moe_experts", *experts.all_args(), False)
    assert why == "supports (token, expert) pairs of 1 or more, not 0"
    experts = moe_case(4, 2)
    experts.w_down = experts.w_down.mT.contiguous().mT
    why = reason("moe_experts", *experts.all_args(), False)
    assert why == "supports w_down.is_contiguous() True, not False"
    append = ORDINARY["mla_append"](torch.float64)
    assert reason("mla_append", *append) == "supports dtype float16, bfloat16, float32, not float64"
    assert reason("mla_append", *(x[:0] for x in ORDINARY["mla_append"](torch.bfloat16))) == (
        "supports tokens of 1 or more, not 0"
    )


def test_some_candidate_of_every_table_serves_every_call_and_functions_exist() -> None:
    assert tables.keys() >= {*KERNEL_SERVES, "mla_decode"}
    for op, table in tables.items():
        assert len({candidate.name for candidate in table}) == len(table)
        for asked in (False, op in library.flagged) if table else ():
            serving = [c for c in table if c.batch_invariant or not asked]
            assert any(map(serves_every_call, serving)), op


def serves_every_call(candidate: Candidate) -> bool:
    anywhere = (
        candidate.device_types is None
        and not candidate.packages
        and candidate.capturable
        and callable(candidate.load())
    )
    return anywhere and candidate.constraints in ({}, {"dtype": DTYPES})  # an op takes no other dtypes


X, W, COLUMNS = torch.ones(3, 4), torch.ones(5, 4), torch.ones(2, 4, 6)
ANY_CALL: dict[str, tuple[Any, ...]] = {
    **{op: made(torch.float32) for op, made in ORDINARY.items()},
    "all_reduce": (X, False),
    "all_gather": (X, 2),
    "fp8_linear": (X, W, None, None, None, False, False),
    "batch_invariant_matmul": (torch.ones(3, 2, 4), COLUMNS),
    "fused_linear": (X, W, None, False),
    "matmul_by_head": (torch.ones(3, 2, 4), COLUMNS),
    "fused_rms_norm": (X, None, 1e-6),
    "fused_add_rms_norm": (X, X, None, 1e-6),
    "all_reduce_add_rms_norm": (X, X, None, 1e-6, False),
    "norm_linear": (X, None, None, 1e-6, W, None),
    "norm_router": (X, X, None, 1e-6, W, None, 2, 1, 1, False, False, 1.0, False),
    "batch_invariant_sum": (X,),
}
"""By op that has facts: arguments of a call."""


def test_candidates_limit_nothing_but_facts_of_their_op() -> None:
    """Another fact would be unknown, and an unknown fact limits nothing."""
    limited = [op for op, table in tables.items() if any(candidate.constraints for candidate in table)]
    assert {*limited} == {*ANY_CALL, "mla_decode"}
    # Private: a choice shows only the facts that its candidates limit.
    facts = {op: {*library._facts_of[op](args)} for op, args in ANY_CALL.items()}
    facts["mla_decode"] = {*decode_backends.decode_call(decode_case([5, 3]).operands(), captured=False).facts}
    for op in limited:
        for candidate in tables[op]:
            assert candidate.constraints.keys() <= facts[op], (op, candidate.name)


def test_a_pass_asks_by_facts_that_limit_the_kernel() -> None:
    assert not first_serves(tables["moe_router"], X, experts=8)
    with pytest.raises(AssertionError, match=r"router_triton.*'experts'.*{'expert': 8}"):
        first_serves(tables["moe_router"], X, expert=8)


@pytest.mark.parametrize("op", ["mla_prefill", "moe_experts"])
def test_a_batch_invariant_candidate_serves_every_call_that_asks_for_one_and_no_other(op: str) -> None:
    for seed in range(200):
        draw = random.Random(seed)
        machine = mostly(draw, [(8, 0), (9, 0), (12, 0)], [None, "hip", (7, 5)])
        *args, _ = fake(arguments(op, draw), machine)
        with pytest.MonkeyPatch.context() as patch:
            on(machine, patch)
            chosen = choose(op, (*args, True)).chosen
            assert library.serving(op, (*args, True)) is chosen and chosen.batch_invariant
            ordinary = choose(op, (*args, False)).chosen
            asked = {"reference": "by_token", "gemv": "triton", "rounded": "triton"}.get(
                ordinary.name, ordinary.name
            )
            assert chosen.name == asked, f"seed {seed}"


def test_the_log_names_once_the_kernel_of_a_kind_of_call_and_why(caplog: pytest.LogCaptureFixture) -> None:
    library._log_once.cache_clear()  # private: earlier tests may have logged this choice
    caplog.set_level(logging.DEBUG, logger="mla_compile")
    args = ORDINARY["mla_append"](torch.float32)
    for _, tokens in product(range(2), (3, 2)):
        torch.ops.mla_compile.mla_append(args[0][:tokens], args[1][:tokens], args[2], args[3][:tokens])
    (message,) = (record.getMessage() for record in caplog.records)
    assert re.search(r"mla_append\b.*\n.*triton\b.*cuda.*cpu\n.*reference\b.*plain torch", message)


def echo(*args: object) -> tuple[object, ...]:
    return args


def test_kernels_are_launched_on_the_device_of_the_first_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    devices: list[Tensor] = []

    def device_of(x: Tensor) -> nullcontext[None]:
        devices.append(x)
        return nullcontext()

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    x, w = torch.zeros(1), torch.zeros(2)
    run = dispatch.triton("", f"{__name__}:echo", constraints={}).load()
    assert run(x, w) == (x, w) and run((w, x), None) == ((w, x), None)
    assert len(devices) == 2 and devices[0] is x and devices[1] is w

"""The Triton kernels of `mla_prefill` in Triton's interpreter; `tests/ops/test_interpreted.py` runs this file."""

import random
from functools import partial
from typing import Any

import pytest
import torch

from tests.triton_interpreter import add_in_order, mend_interpreter

mend_interpreter()

from mla_compile.ops.attention.kernels import keys  # noqa: E402
from mla_compile.ops.attention.kernels.absorbed_prefill import prefill_absorbed  # noqa: E402
from mla_compile.ops.attention.kernels.keys import expanded_keys  # noqa: E402
from mla_compile.ops.attention.kernels.prefill import prefill_triton  # noqa: E402
from mla_compile.ops.attention.operands import PrefillOperands  # noqa: E402
from mla_compile.ops.attention.tiles import AttentionTiles  # noqa: E402
from mla_compile.ops.linear.kernels.matmul import matmul_triton  # noqa: E402
from mla_compile.ops.linear.tiles import ProductTiles  # noqa: E402
from tests.cases import make_case  # noqa: E402
from tests.kernel_cases import check_prefill, prefill_args  # noqa: E402
from tests.ops.prefill_conformance import (  # noqa: E402
    PrefillConformance,
    PrefillInvariance,
    Subject,
    subject_of,
)


@pytest.fixture(autouse=True)
def wide_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few programs make the keys: each costs the interpreter the same time."""
    monkeypatch.setattr(keys, "matmul_triton", partial(matmul_triton, tiles=ProductTiles(64, 32, 32, 4, 1)))


@pytest.fixture(scope="module", params=["triton", "absorbed"])
def subject(request: pytest.FixtureRequest) -> Subject:
    run = {
        "triton": partial(prefill_triton, tiles=AttentionTiles(queries=16, keys=16, warps=4, stages=1)),
        "absorbed": partial(
            prefill_absorbed, tiles=AttentionTiles(queries=32, keys=16, warps=4, stages=1), splits=1
        ),
    }
    return subject_of(request.param, run=run[request.param])


class TestTriton(PrefillConformance):
    pass


class TestBatchInvariant(PrefillInvariance):
    borders: tuple[int, ...] = (1, 16, 32, 64)

    @pytest.fixture(autouse=True)
    def in_order(self, monkeypatch: pytest.MonkeyPatch) -> None:
        add_in_order(monkeypatch)

    @pytest.fixture
    def subject(self) -> Subject:
        tiles = AttentionTiles(queries=32, keys=16, warps=4, stages=1)
        return subject_of("triton", run=partial(prefill_triton, tiles=tiles), heads=1)


def padded(args: tuple[Any, ...], lens: list[int], place: int, num_keys: int) -> tuple[Any, ...]:
    """Arguments with padding rows without keys at `place`, and `num_keys` slots of padding."""
    q, kv_cache, w_uk, w_uv, cu_seqlens_q, cu_seqlens_k, key_slots, scale = args
    q_lens, k_lens = cu_seqlens_q.diff(), cu_seqlens_k.diff(dim=1)
    start = int(cu_seqlens_q[place])
    q = torch.cat([q[:start], q.new_ones(sum(lens), *q.shape[1:]), q[start:]])
    q_lens = torch.cat([q_lens[:place], torch.tensor(lens), q_lens[place:]])
    k_lens = torch.cat(
        [k_lens[:, :place], k_lens.new_zeros(len(k_lens), len(lens)), k_lens[:, place:]], dim=1
    )
    sums = (torch.nn.functional.pad(x.cumsum(-1).int(), (1, 0)) for x in (q_lens, k_lens))
    return q, kv_cache, w_uk, w_uv, *sums, torch.nn.functional.pad(key_slots, (0, num_keys), value=-1), scale


@pytest.mark.parametrize("seeds", [range(4), pytest.param(range(4, 50), marks=pytest.mark.slow)], ids=str)
def test_absorbed_in_any_splits_parts_and_padding(seeds: range) -> None:
    for seed in seeds:
        draw = random.Random(seed)
        chunks = [
            (draw.randint(1, 6), draw.choice([0, 1, 16, 31, 70])) for _ in range(draw.choice([1, 1, 2, 3]))
        ]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("mla_compile.ops.attention.segments.MAX_KEYS", draw.choice([16, 33, 1000, 1000]))
            case = make_case(
                prefill=chunks, heads=draw.choice([1, 3, 20]), rank=32, page_size=draw.choice([1, 5, 16])
            )
        args = prefill_args(case)
        padding = [draw.choice([0, 0, 2]) for _ in range(draw.randint(0, 2))]
        place = draw.randint(0, len(chunks))
        first = int(args[4][place])
        out = prefill_absorbed(
            PrefillOperands(*padded(args, padding, place, draw.choice([0, 50]))),
            tiles=AttentionTiles(draw.choice([16, 32, 64]), draw.choice([16, 32]), warps=4, stages=1),
            splits=draw.choice([1, 2, 7]),
            min_keys=draw.choice([1, 16, 40]),
        )
        theirs = slice(first, first + sum(padding))
        assert not out[theirs].any(), f"seed {seed}"
        check_prefill(case, torch.cat([out[: theirs.start], out[theirs.stop :]]))


def test_splits_of_a_neighbours_nan_latents() -> None:
    operands = PrefillOperands(*prefill_args(make_case(prefill=[(1, 40), (1, 40), (1, 3)], heads=1)))
    kv_cache, cu_seqlens_k, key_slots = operands.kv_cache, operands.cu_seqlens_k, operands.key_slots
    run = partial(prefill_absorbed, tiles=AttentionTiles(16, 16, warps=4, stages=1), splits=3, min_keys=16)
    healthy = run(operands)
    for key in (0, 20, 40):  # one in each split
        spoilt = kv_cache.clone()
        spoilt.view(-1, spoilt.shape[2])[key_slots[0, cu_seqlens_k[0, 1] + key]] = torch.nan
        out = run(operands._replace(kv_cache=spoilt))
        assert torch.equal(out[::2], healthy[::2]) and not out[1].isfinite().any()


@pytest.mark.parametrize(
    ("tokens", "dtype"),
    [(3, torch.float32), (3, torch.bfloat16), pytest.param(26, torch.bfloat16, marks=pytest.mark.slow)],
    ids=str,
)
def test_absorbed_as_planned_for_an_h200(tokens: int, dtype: torch.dtype) -> None:
    sizes = {"heads": 20, "nope": 16, "rope": 64, "v": 16, "rank": 512, "dtype": dtype}
    subject_of("absorbed", run=prefill_absorbed).check([(tokens, 260), (1, 20)], **sizes)


def test_keys_of_rows_may_have_zeros_between_them() -> None:
    case = make_case(prefill=[(5, 3), (7, 0), (1, 2)], rank=32, rope=16)
    _, kv_cache, w_uk, w_uv, _, cu_seqlens_k, key_slots, _ = prefill_args(case)
    arguments = kv_cache, torch.nn.functional.pad(key_slots[0], (0, 9), value=-1), cu_seqlens_k[0], w_uk, w_uv
    close, apart = expanded_keys(*arguments), expanded_keys(*arguments, gap=20)
    assert apart.cu_places.tolist() == [0, 28, 55, 78] and apart.lens.tolist() == [8, 7, 3]
    assert close.cu_places.tolist() == cu_seqlens_k[0].tolist() and close.lens.tolist() == [8, 7, 3]
    for wide, narrow in ((apart.key, close.key), (apart.value, close.value)):
        rows = zip(apart.cu_places, apart.lens)
        torch.testing.assert_close(torch.cat([wide[start : start + n] for start, n in rows]), narrow[:18])
        assert torch.count_nonzero(wide) == torch.count_nonzero(narrow)

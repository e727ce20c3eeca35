"""The kernels of selection in Triton's interpreter; `tests/ops/test_interpreted.py` runs this file."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from triton.runtime import interpreter

from tests.triton_interpreter import mend_interpreter

mend_interpreter()

from mla_compile.ops.attention.kernels import select_keys as kernels  # noqa: E402
from mla_compile.ops.attention.select_keys import decode_select_torch, prefill_select_torch  # noqa: E402
from tests.cases import make_case  # noqa: E402


@pytest.fixture(autouse=True)
def inside_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every load and store is inside a tensor of its launch: lengths decide the addresses, and no mask is wrong."""
    spans: list[tuple[int, int]] = []
    copied, memory = interpreter.GridExecutor._init_args_hst, interpreter._interpreter

    def with_spans(self: Any, *args: Any) -> Any:
        found = copied(self, *args)
        tensors = [x for x in found[0] if isinstance(x, Tensor)]
        spans[:] = [(x.data_ptr(), x.data_ptr() + x.nbytes) for x in tensors]
        return found

    def checked(access: Callable) -> Callable:
        def run(pointers: np.ndarray, *rest: Any) -> Any:
            mask = rest[access.__name__ == "store"]
            used = pointers[mask.astype(bool)]
            assert np.any([(used >= a) & (used < b) for a, b in spans], axis=0).all(), access.__name__
            return access(pointers, *rest)

        return run

    guarded = SimpleNamespace(load=checked(memory.load), store=checked(memory.store))
    monkeypatch.setattr(interpreter.GridExecutor, "_init_args_hst", with_spans)
    monkeypatch.setattr(interpreter, "_interpreter", guarded)


def check(
    decode: list[int],
    prefill: list[tuple[int, int]],
    *,
    topk: int,
    heads: int = 8,
    dim: int = 20,
    **sizes: Any,
) -> None:
    """The selection equals that of plain torch, order included. Small integers: every sum is exact."""
    case = make_case(decode, prefill, **sizes)
    g = torch.Generator().manual_seed(1)

    def whole(*shape: int) -> Tensor:
        return torch.randint(-4, 5, shape, generator=g).to(case.q_nope.dtype)

    tokens = case.q_nope.shape[0]
    q, weights = whole(tokens, heads, dim), whole(tokens, heads).float()
    cache = whole(*case.kv_cache.shape[:2], dim)
    d, p = case.batch.decode, case.batch.prefill
    written = ~case.kv_cache[..., 0].isnan()
    for segment in (d, p):
        if segment is not None:
            written.view(-1)[segment.slot_mapping[segment.slot_mapping >= 0]] = True
    cache[~written] = torch.nan
    n = 0 if d is None else len(d.slot_mapping)
    if d is not None:
        rows = q[:n], weights[:n], cache, d.block_table, d.seq_lens, d.q_lens, d.q_len, topk
        assert torch.equal(kernels.decode_select_triton(*rows), decode_select_torch(*rows))
    if p is not None:
        keys = q[n:], weights[n:], cache, p.cu_seqlens_q, p.cu_seqlens_k, p.key_slots, topk
        assert torch.equal(kernels.prefill_select_triton(*keys), prefill_select_torch(*keys))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("topk", [1, 8, 90])
def test_rows_and_chunks_of_all_lengths_select_as_plain_torch(topk: int, dtype: torch.dtype) -> None:
    check([5, 0, 70], [(70, 0), (3, 66), (1, 0)], q_len=2, q_lens=[2, 0, 1], topk=topk, dtype=dtype)


def test_widths_of_real_models() -> None:
    check([70], [(3, 64)], topk=16, heads=64, dim=128, dtype=torch.bfloat16)
    check([70], [(3, 64)], topk=16, heads=32, dim=128, page_size=64, dtype=torch.bfloat16)


def test_tables_and_lengths_of_any_strides() -> None:
    case = make_case([9, 30, 17], [], q_lens=[2, 1, 2])
    d = case.batch.decode
    assert d is not None and d.q_lens is not None
    q, weights = torch.randn(6, 2, 4), torch.randn(6, 2)
    cache = torch.randn(*case.kv_cache.shape[:2], 4)
    table, *lens = (torch.stack([x, x], -1)[..., 0] for x in (d.block_table.mT, d.seq_lens, d.q_lens))
    expected = decode_select_torch(q, weights, cache, d.block_table, d.seq_lens, d.q_lens, 2, 5)
    assert torch.equal(kernels.decode_select_triton(q, weights, cache, table.mT, *lens, 2, 5), expected)


def test_chunks_of_whole_blocks_leave_surplus_blocks() -> None:
    check([], [(64, 0), (64, 3), (64, 80)], topk=8, dtype=torch.bfloat16)


def test_contexts_in_parts_and_tokens_in_several_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    from mla_compile.ops.attention import segments

    monkeypatch.setattr(kernels, "_WORKSPACE", 1)
    monkeypatch.setattr(segments, "MAX_KEYS", 24)
    check([], [(40, 50), (3, 2), (4, 30)], topk=8)


LONG = 150
SCORES = {
    "distinct": lambda position: position * 37 % LONG,
    "equal": lambda position: 3 + 0 * position,
    "few values": lambda position: position * 37 % LONG // 40,
    "a sample of high scores": lambda position: (position % 9 == 0) * 99 + position % 7,
    "a sample of low scores": lambda position: (position % 9 != 0) * 99 + position % 7,
    "many at the cut": lambda position: (position % 5 == 0) * 50 + (position == 149),
}


@pytest.mark.parametrize("topk", [1, 8, 30, 100])
@pytest.mark.parametrize("scores", SCORES)
def test_rows_longer_than_the_registers_select_as_plain_torch(
    scores: str, topk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The score of a key is its one component. Scores of the whole row, of some of it, and of none fit the list."""
    monkeypatch.setattr(kernels, "_BLOCK", 64)
    monkeypatch.setattr(kernels, "_SAMPLE", 16)
    monkeypatch.setattr(kernels, "_SCAN", 32)
    position = torch.arange(160)
    cache = torch.full((11, 16, 1), torch.nan)
    table = torch.randperm(10, generator=torch.Generator().manual_seed(0)).int()[None] + 1
    cache[table[0].long()] = SCORES[scores](position).float().view(10, 16, 1)
    lens = torch.tensor([LONG], dtype=torch.int32)
    cache.view(-1)[table[0, -1] * 16 + LONG % 16 : table[0, -1] * 16 + 16] = torch.nan
    for sign in (1.0, -1.0):
        rows = torch.ones(2, 1, 1), torch.full((2, 1), sign), cache, table, lens, None, 2, topk
        assert torch.equal(kernels.decode_select_triton(*rows), decode_select_torch(*rows))


@settings(max_examples=6)
@given(st.data())
def test_drawn_batches(data: st.DataObject) -> None:
    check(
        data.draw(st.lists(st.integers(0, 90), min_size=1, max_size=3)),
        data.draw(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 60)), min_size=1, max_size=3)),
        q_len=data.draw(st.integers(1, 3)),
        page_size=data.draw(st.sampled_from([1, 4, 16])),
        topk=data.draw(st.integers(1, 40)),
        heads=data.draw(st.integers(1, 20)),
        dim=data.draw(st.integers(1, 40)),
        seed=data.draw(st.integers(0, 99)),
    )

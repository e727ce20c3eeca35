"""What every implementation of `mla_prefill` must do, whatever the device: `PrefillConformance`, run for each of them.

`test_prefill.py` runs it on the CPU, `interpreted/prefill.py` in Triton's interpreter and `../test_gpu_kernels.py` on
a GPU. Each defines a fixture `subject` and a subclass. Every case has NaN in all that no row owns, page 0 included.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from mla_compile.ops.implementations import Implementation
from mla_compile.ops.prefill import PREFILL
from tests.cases import Case, make_case
from tests.kernel_cases import check_prefill, prefill_args

Chunks = list[tuple[int, int]]


@dataclass(frozen=True)
class Subject:
    """An implementation on a device, with the sizes that its cases have unless a test wants others."""

    row: Implementation
    device: str = "cpu"
    run: Callable[..., Tensor] | None = None  # with tiles of its own, say
    dtype: torch.dtype = torch.float32
    heads: int = 3
    nope: int = 24
    rope: int = 8
    v: int = 16
    rank: int = 32

    def case(self, chunks: Chunks, **sizes: Any) -> Case:
        """chunks: (length, tokens cached before) of each. The test is skipped where the row declares not to take it."""
        names = ("dtype", "heads", "nope", "rope", "v", "rank")
        given = {name: getattr(self, name) for name in names} | sizes
        facts = {
            "dtype": given["dtype"],
            "qk_head_dim": given["nope"] + given["rope"],
            "v_head_dim": given["v"],
            "kv_lora_rank": given["rank"],
            "qk_rope_head_dim": given["rope"],
        }
        if (reason := self.row.why_not_given(facts)) is not None:
            pytest.skip(f"{self.row.name} {reason}")
        return make_case(prefill=chunks, **given)

    def out(self, args: tuple[Any, ...]) -> Tensor:
        args = tuple(x.to(self.device) if isinstance(x, Tensor) else x for x in args)
        return (self.run or self.row.load())(*args)

    def check(self, chunks: Chunks, **sizes: Any) -> None:
        case = self.case(chunks, **sizes)
        check_prefill(case, self.out(prefill_args(case)))


def subject_of(name: str, **settings: Any) -> Subject:
    return Subject(next(row for row in PREFILL if row.name == name), **settings)


slow = pytest.mark.slow


class PrefillConformance:
    @pytest.mark.parametrize(
        "dtype", [torch.float32, pytest.param(torch.float16, marks=slow), torch.bfloat16], ids=str
    )
    @pytest.mark.parametrize(
        "chunks",
        [[(1, 0)], [(16, 0), (17, 0), (15, 0), (33, 0)], [(5, 3), (2, 0), (1, 40)], [(20, 100), (3, 1)]],
        ids=str,
    )
    def test_ragged_chunks_with_context(self, subject: Subject, chunks: Chunks, dtype: torch.dtype) -> None:
        subject.check(chunks, dtype=dtype)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize(
        "sizes",
        [
            {"nope": 128, "rope": 64, "v": 128, "rank": 64},
            {"nope": 192, "rope": 64, "v": 256, "rank": 32},
            {"nope": 64, "rope": 32, "v": 64, "rank": 32},
            {"nope": 64, "rope": 64, "v": 128, "rank": 32},
            {"nope": 6, "rope": 4, "v": 5, "rank": 16},
        ],
        ids=["V3", "GLM", "MiniCPM3", "Mistral4", "odd"],
    )
    def test_the_widths_of_models(self, subject: Subject, sizes: dict[str, int], dtype: torch.dtype) -> None:
        subject.check([(18, 7), (4, 0)], heads=2, dtype=dtype, **sizes)

    @pytest.mark.parametrize("max_keys", [1, 8, 20])
    @pytest.mark.parametrize("page_size", [3, *(pytest.param(size, marks=slow) for size in (1, 16))])
    def test_context_in_parts_of_every_size(
        self, subject: Subject, max_keys: int, page_size: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("mla_compile.ops.segments.MAX_KEYS", max_keys)
        subject.check([(4, 19), (2, 5), (1, 0)], page_size=page_size)

    @pytest.mark.parametrize("chunk", [5, 16, *(pytest.param(chunk, marks=slow) for chunk in (2, 19, 20))])
    def test_chunks_of_a_prompt_equal_one_pass(self, subject: Subject, chunk: int) -> None:
        for start in range(0, 20, chunk):
            subject.check([(min(chunk, 20 - start), start)])

    def test_nobody_is_spoilt_by_a_neighbours_latents_that_are_no_numbers(self, subject: Subject) -> None:
        for chunks in ([(5, 3), (7, 0), (4, 2)], [(70, 0), (3, 200), (130, 0)]):
            q, kv_cache, *others = prefill_args(subject.case(chunks))
            cu_seqlens_q, cu_seqlens_k, key_slots = others[2:5]
            healthy = subject.out((q, kv_cache, *others))
            first, last = cu_seqlens_k[0, 1:3].tolist()
            for bad in (torch.nan, torch.inf):
                spoilt = kv_cache.clone()
                spoilt.view(-1, spoilt.shape[2])[key_slots[0, first:last]] = bad
                out = subject.out((q, spoilt, *others))
                start, stop = cu_seqlens_q[1:3].tolist()
                assert torch.equal(out[:start], healthy[:start]) and torch.equal(out[stop:], healthy[stop:])
                assert not out[start:stop].isfinite().any()

    def test_keys_of_padding_and_rows_without_keys_change_nothing(self, subject: Subject) -> None:
        q, kv_cache, w_uk, w_uv, cu_seqlens_q, cu_seqlens_k, key_slots, scale = prefill_args(
            subject.case([(5, 3), (7, 0)])
        )
        want = subject.out((q, kv_cache, w_uk, w_uv, cu_seqlens_q, cu_seqlens_k, key_slots, scale))
        tokens = len(q)
        padded = subject.out(
            (
                torch.cat([q, q[:4]]),
                *(kv_cache, w_uk, w_uv),
                torch.cat(
                    [cu_seqlens_q, cu_seqlens_q[-1:] + 4, cu_seqlens_q[-1:] + 4]
                ),  # one with tokens, one empty
                torch.cat([cu_seqlens_k, *[cu_seqlens_k[:, -1:]] * 2], dim=1),
                torch.nn.functional.pad(key_slots, (0, 300), value=-1),
                scale,
            )
        )
        assert torch.equal(padded[:tokens], want) and not padded[tokens:].any()

    def test_rows_of_queries_may_be_apart(self, subject: Subject) -> None:
        case = subject.case([(5, 3), (7, 0)])
        q, *others = prefill_args(case)
        apart = torch.cat([q, q], dim=1)[:, : q.shape[1]]
        assert torch.equal(subject.out((apart, *others)), subject.out((q, *others)))

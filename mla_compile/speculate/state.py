"""The decode state of a batch: tensors that persist, that a step changes in place and a replayed graph finds again."""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from mla_compile.errors import MLAError
from mla_compile.torch_internals import mark_state_tensor

COUNT, ACTIVE, FIRST_TOKEN = 0, 1, 2
"""Columns of `DecodeState.report`."""


@dataclass(frozen=True)
class DecodeState:
    """One row per sequence. An inactive row (finished, or padding of the bucket) sees nothing and writes nowhere.

    num_cached: tokens whose latents are in the trunk's cache, int32 `[rows]`. The last token is not among them.
    last_token: the newest token, at position `num_cached`, int64 `[rows]`.
    drafts: proposed tokens for the k positions after it, int64 `[rows, k]`.
    active: bool `[rows]`.
    max_len: tokens, prompt included, at which a row stops, int32 `[rows]`.
    stop_ids: ids that end a row, int64 `[rows, n]`; unused places hold -1.
    seed: int64 `[rows]`; temperature, top_p: float32 `[rows]`; top_k: int32 `[rows]`.
    block_table: int32 `[rows, max_pages]`; every row owns pages for `max_len` tokens.
    report: what the last step did, for the host, int64 `[rows, 2 + k + 1]`: the number of tokens emitted, whether
        the row is still active, the tokens.
    """

    num_cached: Tensor
    last_token: Tensor
    drafts: Tensor
    active: Tensor
    max_len: Tensor
    stop_ids: Tensor
    seed: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    block_table: Tensor
    report: Tensor

    @classmethod
    def allocate(
        cls,
        rows: int,
        num_speculative_tokens: int,
        *,
        max_pages: int,
        num_stop_ids: int = 1,
        device: torch.device | str = "cpu",
    ) -> "DecodeState":
        """Inactive rows on page 0, the dummy page, which a step neither reads nor writes.

        The tensors are marked for the compiler: static addresses (CUDA graphs change them in place, no copy) and a
        number of rows that varies (one compiled graph serves every bucket).
        """
        if rows < 1:
            raise MLAError("rows", "at least 1", rows)
        with torch.inference_mode(False):  # an inference tensor could not be changed outside that mode
            state = cls._zeros(rows, num_speculative_tokens, max_pages, num_stop_ids, device)
        for tensor in state.tensors():
            mark_state_tensor(tensor)
        return state

    @classmethod
    def _zeros(
        cls, rows: int, k: int, max_pages: int, num_stop_ids: int, device: torch.device | str
    ) -> "DecodeState":
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            num_cached=zeros(rows, dtype=torch.int32),
            last_token=zeros(rows),
            drafts=zeros(rows, k),
            active=zeros(rows, dtype=torch.bool),
            max_len=zeros(rows, dtype=torch.int32),
            stop_ids=zeros(rows, max(1, num_stop_ids)) - 1,
            seed=zeros(rows),
            temperature=zeros(rows, dtype=torch.float32),
            top_k=zeros(rows, dtype=torch.int32),
            top_p=zeros(rows, dtype=torch.float32) + 1,
            block_table=zeros(rows, max_pages, dtype=torch.int32),
            report=zeros(rows, 2 + k + 1),
        )

    def num_rows(self) -> int:
        """The bucket's rows; tells the compiler, which gives each tensor a size of its own, that all agree."""
        rows = self.num_cached.shape[0]
        for tensor in self.tensors():
            torch._check(tensor.shape[0] == rows)
        return rows

    def tensors(self) -> list[Tensor]:
        return [getattr(self, field.name) for field in fields(self)]

"""The decode state of a batch: persistent tensors, which a step updates in place at addresses known to its graph."""

from dataclasses import dataclass, fields, replace
from functools import cached_property

import torch
from torch import Tensor

from mla_compile.errors import MLAError
from mla_compile.sampling_params import MAX_LOGIT_BIAS, MAX_STOP_IDS
from mla_compile.torch_internals import is_marked, mark_state_tensor, with_shape

COUNT, ACTIVE, NUM_VERIFIED, FAILED_AT, FIRST_TOKEN = range(5)
"""Columns of `DecodeState.report`."""


@dataclass(frozen=True)
class DecodeState:
    """One row per sequence. An inactive row (finished, or padding of the bucket) sees nothing and writes nowhere.

    num_cached: tokens whose latents are in the trunk's cache, int32 `[rows]`. The last token is not among them.
    last_token: the newest token, at position `num_cached`, int64 `[rows]`.
    drafts: proposed tokens for the k positions after it, int64 `[rows, k]`.
    num_drafts: the number of valid drafts, the first ones, int32 `[rows]`; max_drafts: its maximum, int32 `[rows]`.
    active: bool `[rows]`.
    max_len: tokens, prompt included, at which a row stops, int32 `[rows]`.
    stop_ids: ids that end a row, int64 `[rows, MAX_STOP_IDS]`; unused places hold -1.
    seed: int64 `[rows]`; temperature, top_p, min_p: float32 `[rows]`; top_k: int32 `[rows]`.
    repetition_penalty, presence_penalty, frequency_penalty: float32 `[rows]`.
    min_len: the position of a row's first token that may be a stop id, int32 `[rows]`.
    block_table: int32 `[rows, max_pages]`; every row owns pages for `max_len` tokens.
    report: the last step's result for the host, int64 `[rows, 4 + k + 1]`: the number of tokens emitted, whether the
        row is still active, the number of drafts that it had, the position of its next token if that one's logits are
        NaN or infinite (else 0), the tokens.
    in_prompt: the ids in the prompt, bool `[rows, vocab]`; num_emitted: how often the text after it has each id, the
        last token included, int32 `[rows, vocab]`. None in a state whose rows all choose by the model's own logits.
    bias_ids: ids whose logits change, int64 `[rows, n]`, equal ids by equal amounts; bias: the amounts before `min_len`
        and from there on, float32 `[rows, 2, n]`. n is `MAX_LOGIT_BIAS + MAX_STOP_IDS`. None if `in_prompt` is.
    history: the row's text by position, prompt and last token included, int32 `[rows, places]`, a place for each of
        `max_len` tokens; places after the text are undefined. None if no drafter reads it.

    A step is compiled for the set of tensors that are None.
    """

    num_cached: Tensor
    last_token: Tensor
    drafts: Tensor
    num_drafts: Tensor
    max_drafts: Tensor
    active: Tensor
    max_len: Tensor
    stop_ids: Tensor
    seed: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    repetition_penalty: Tensor
    presence_penalty: Tensor
    frequency_penalty: Tensor
    min_len: Tensor
    block_table: Tensor
    report: Tensor
    in_prompt: Tensor | None = None
    num_emitted: Tensor | None = None
    bias_ids: Tensor | None = None
    bias: Tensor | None = None
    history: Tensor | None = None

    @classmethod
    def allocate(
        cls,
        rows: int,
        num_speculative_tokens: int,
        *,
        max_pages: int,
        penalised_vocab: int | None = None,
        history_len: int | None = None,
        device: torch.device | str = "cpu",
        compiled: bool = True,
    ) -> "DecodeState":
        """Inactive rows on page 0, the dummy page, which a step neither reads nor writes.

        penalised_vocab: the vocabulary's size, if rows may have penalties, biases or stop ids that wait.
        history_len: maximum tokens of a row, if a drafter reads them.
        compiled: whether compiled code may run on the tensors; False saves the second in which torch._dynamo loads.

        They are marked for the compiler then: static addresses (CUDA graphs update them in place, without copies) and
        a number of rows that varies (one compiled graph serves every bucket).
        """
        if rows < 1:
            raise MLAError("rows", "at least 1", rows)
        k = num_speculative_tokens

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        with torch.inference_mode(False):  # inference tensors cannot be written outside that mode
            state = cls(
                num_cached=zeros(rows, dtype=torch.int32),
                last_token=zeros(rows),
                drafts=zeros(rows, k),
                num_drafts=zeros(rows, dtype=torch.int32) + k,
                max_drafts=zeros(rows, dtype=torch.int32) + k,
                active=zeros(rows, dtype=torch.bool),
                max_len=zeros(rows, dtype=torch.int32),
                stop_ids=zeros(rows, MAX_STOP_IDS) - 1,
                seed=zeros(rows),
                temperature=zeros(rows, dtype=torch.float32),
                top_k=zeros(rows, dtype=torch.int32),
                top_p=zeros(rows, dtype=torch.float32) + 1,
                min_p=zeros(rows, dtype=torch.float32),
                repetition_penalty=zeros(rows, dtype=torch.float32) + 1,
                presence_penalty=zeros(rows, dtype=torch.float32),
                frequency_penalty=zeros(rows, dtype=torch.float32),
                min_len=zeros(rows, dtype=torch.int32),
                block_table=zeros(rows, max_pages, dtype=torch.int32),
                report=zeros(rows, FIRST_TOKEN + k + 1),
                history=None if history_len is None else zeros(rows, history_len, dtype=torch.int32),
            )
        for tensor in state.tensors() if compiled else ():
            mark_state_tensor(tensor, 0)
        return state if penalised_vocab is None else state.with_counts(penalised_vocab)

    def with_counts(self, penalised_vocab: int) -> "DecodeState":
        """The same tensors with new ones for counts and biases, marked for the compiler if these are."""
        rows, device = len(self.active), self.active.device
        with torch.inference_mode(False):  # inference tensors cannot be written outside that mode
            new = {
                "in_prompt": torch.zeros(rows, penalised_vocab, dtype=torch.bool, device=device),
                "num_emitted": torch.zeros(rows, penalised_vocab, dtype=torch.int32, device=device),
                "bias_ids": torch.zeros(
                    rows, MAX_LOGIT_BIAS + MAX_STOP_IDS, dtype=torch.int64, device=device
                ),
                "bias": torch.zeros(rows, 2, MAX_LOGIT_BIAS + MAX_STOP_IDS, device=device),
            }
        for tensor in new.values() if is_marked(self.active) else ():
            mark_state_tensor(tensor, 0)
        return replace(self, **new)

    def first(self, rows: int) -> "DecodeState":
        """A state of the first rows, in the same memory, marked for the compiler if this one is."""
        with torch.inference_mode(False):  # inference tensors cannot be written outside that mode
            named = self.named()
            first = {name: with_shape(t.view(-1), (rows, *t.shape[1:])) for name, t in named.items()}
        for tensor in first.values() if is_marked(self.active) else ():
            mark_state_tensor(tensor, 0)
        return replace(self, **first)

    @cached_property
    def without_counts(self) -> "DecodeState":
        """The same tensors without counts and biases, so that one compiled call serves both kinds."""
        if self.in_prompt is None:
            return self
        return replace(self, in_prompt=None, num_emitted=None, bias_ids=None, bias=None)

    def num_rows(self) -> int:
        """The bucket's rows. Asserts for the compiler that all tensors have as many, as each has its own symbol."""
        rows = self.num_cached.shape[0]
        for tensor in self.tensors():
            torch._check(tensor.shape[0] == rows)
        return rows

    def tensors(self) -> list[Tensor]:
        return list(self.named().values())

    def named(self) -> dict[str, Tensor]:
        """The tensors that are not None, by their fields' names."""
        every = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: tensor for name, tensor in every.items() if tensor is not None}

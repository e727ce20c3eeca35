"""Generation for a batch of prompts that start together: prefill, then speculative steps until every row has ended."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mla_compile.batch import MLABatch, prefill_segment
from mla_compile.engine.reports import ReportReader, RowReport
from mla_compile.errors import MLAError
from mla_compile.models import MLAForCausalLM
from mla_compile.speculate import DecodeState, SamplingParams, SpeculativeDecoder

PREFILL_CHUNK = 512
"""Prompt tokens of one row in one prefill call."""


@dataclass
class Completion:
    """What became of one prompt.

    token_ids: the generated tokens, a stop id included where one ended the row.
    finish_reason: "stop" (a stop id), "length" (max_new_tokens or the model's length), None while it runs.
    num_steps: verify steps that the row took part in; prefill gave the first token without one.
    text: of the tokens, special ones left out; None where no tokenizer decoded them.
    """

    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    num_steps: int = 0
    text: str | None = None

    @property
    def acceptance_length(self) -> float | None:
        """Mean tokens emitted per verify step, 1..k+1; None where no step was taken."""
        return (len(self.token_ids) - 1) / self.num_steps if self.num_steps else None


class Engine:
    """Runs one model on batches of up to `max_rows` prompts.

    Args:
        model: its caches are allocated here, `max_rows` rows of `max_model_len` tokens and the dummy page 0.
        num_speculative_tokens: drafts per step, k >= 0; k > 0 needs a model with an MTP layer.
        max_rows: rows that decode at once; longer lists of prompts run in several waves.
        max_model_len: tokens of a row at most, prompt included.
        page_size: tokens per cache page.
        compile: False runs everything eagerly.
        mode: the mode of `torch.compile` for steps; "reduce-overhead" replays one CUDA graph per step.

    Raises:
        MLAError: a bad argument, named.
    """

    def __init__(
        self,
        model: MLAForCausalLM,
        *,
        num_speculative_tokens: int = 0,
        max_rows: int = 8,
        max_model_len: int = 2048,
        page_size: int = 16,
        compile: bool = True,
        mode: str | None = "reduce-overhead",
    ) -> None:
        for name, value in (
            ("max_rows", max_rows),
            ("max_model_len", max_model_len),
            ("page_size", page_size),
        ):
            if value < 1:
                raise MLAError(name, "an integer >= 1", value)
        if num_speculative_tokens > 0 and model.mtp is None:
            mend = "set it to 0 or load a checkpoint with an MTP layer"
            raise MLAError(
                "num_speculative_tokens", "0 for a model without MTP layers", num_speculative_tokens, mend
            )
        self.model = model
        self.k = num_speculative_tokens
        self.max_rows, self.max_model_len, self.page_size = max_rows, max_model_len, page_size
        self.pages_per_row = -(-max_model_len // page_size)
        model.allocate_cache(1 + max_rows * self.pages_per_row, page_size)
        self.device = model.embed_tokens.weight.device
        self._decoders = {
            sampled: SpeculativeDecoder(model, self.k, page_size=page_size, sampled=sampled)
            for sampled in (False, True)
        }
        # One compiled step per kind of sampling; both are traced on first use.
        self._steps = {
            sampled: torch.compile(decoder, backend="mla", mode=mode, fullgraph=True) if compile else decoder
            for sampled, decoder in self._decoders.items()
        }
        self._states: dict[tuple[int, int], DecodeState] = {}

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int = 128,
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        stop_ids: Sequence[int] = (),
    ) -> list[Completion]:
        """Complete every prompt; see `stream`."""
        completions: list[Completion] = []
        for completions in self.stream(
            prompts, max_new_tokens=max_new_tokens, sampling=sampling, stop_ids=stop_ids
        ):
            pass
        return completions

    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int = 128,
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        stop_ids: Sequence[int] = (),
    ) -> Iterator[list[Completion]]:
        """Yield the completions of all prompts, in their order, each time some of them have grown.

        Args:
            prompts: token ids of each prompt, at least one each.
            max_new_tokens: at most so many tokens a prompt, >= 1; a row also ends at `max_model_len`.
            sampling: for all prompts, or one for each; greedy by default.
            stop_ids: a row ends with the first of these that it emits.

        Raises:
            MLAError: a bad argument or prompt, named, before anything runs.
        """
        params = self._check(prompts, max_new_tokens, sampling)
        return self._waves(prompts, max_new_tokens, params, list(stop_ids))

    def _check(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        sampling: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[SamplingParams]:
        vocab_size = self.model.arch.vocab_size
        if max_new_tokens < 1:
            raise MLAError("max_new_tokens", "an integer >= 1", max_new_tokens)
        for i, prompt in enumerate(prompts):
            if not prompt:
                raise MLAError(f"prompts[{i}]", "at least one token", "an empty prompt")
            if len(prompt) >= self.max_model_len:
                mend = "shorten the prompt or raise max_model_len"
                raise MLAError(
                    f"prompts[{i}]",
                    f"fewer than max_model_len = {self.max_model_len} tokens",
                    len(prompt),
                    mend,
                )
            for token in prompt:
                if not 0 <= token < vocab_size:
                    raise MLAError(f"prompts[{i}]", f"token ids in [0, {vocab_size})", token)
        if sampling is None or isinstance(sampling, SamplingParams):
            return [sampling or SamplingParams()] * len(prompts)
        if len(sampling) != len(prompts):
            raise MLAError("sampling", f"one entry per prompt ({len(prompts)})", len(sampling))
        return list(sampling)

    def _waves(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        params: list[SamplingParams],
        stop_ids: list[int],
    ) -> Iterator[list[Completion]]:
        completions = [Completion() for _ in prompts]
        for start in range(0, len(prompts), self.max_rows):
            wave = slice(start, start + self.max_rows)
            yield from (
                completions
                for _ in self._run(prompts[wave], max_new_tokens, params[wave], stop_ids, completions[wave])
            )

    def _run(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        params: list[SamplingParams],
        stop_ids: list[int],
        completions: list[Completion],
    ) -> Iterator[None]:
        """One wave; yields when `completions` have grown."""
        sampled = any(p.temperature > 0 for p in params)
        decoder, step = self._decoders[sampled], self._steps[sampled]
        state = self._fill_state(prompts, max_new_tokens, params, stop_ids)
        hidden = self._prefill(decoder, prompts, state)
        decoder.start(state, hidden)
        reader = ReportReader(state)
        reader.push()
        running = self._collect(reader.pop(), completions, stop_ids, is_step=False)
        yield
        while running:
            step(state)
            reader.push()
            # On a device the reports are read a step late, so that it never waits for the host.
            if reader.ready():
                running = self._collect(reader.pop(), completions, stop_ids, is_step=True)
                yield

    def _fill_state(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        params: list[SamplingParams],
        stop_ids: list[int],
    ) -> DecodeState:
        """The state of this bucket, refreshed in place: captured graphs know its addresses."""
        rows = min(self.max_rows, 1 << (len(prompts) - 1).bit_length())
        width = max(1, len(stop_ids))
        if (rows, width) not in self._states:
            self._states[rows, width] = DecodeState.allocate(
                rows,
                self.k,
                max_pages=self.pages_per_row,
                num_stop_ids=width,
                device=self.device,
            )
        state = self._states[rows, width]
        padding = rows - len(prompts)

        def fill(tensor: Tensor, values: Sequence[float | bool], pad: float) -> None:
            tensor.copy_(torch.tensor([*values, *[pad] * padding], dtype=tensor.dtype))

        fill(state.num_cached, [len(p) for p in prompts], 0)
        fill(state.active, [True] * len(prompts), False)
        fill(state.max_len, [min(len(p) + max_new_tokens, self.max_model_len) for p in prompts], 0)
        fill(state.seed, [p.seed for p in params], 0)
        fill(state.temperature, [p.temperature for p in params], 0)
        fill(state.top_k, [p.top_k for p in params], 0)
        fill(state.top_p, [p.top_p for p in params], 1)
        state.stop_ids.copy_(torch.tensor(stop_ids or [-1]).expand(rows, -1))
        pages = 1 + torch.arange(len(prompts) * self.pages_per_row, dtype=torch.int32)
        state.block_table.zero_()
        state.block_table[: len(prompts)] = pages.view(len(prompts), -1).to(self.device)
        state.last_token.zero_()
        state.drafts.zero_()
        return state

    def _prefill(
        self, decoder: SpeculativeDecoder, prompts: Sequence[Sequence[int]], state: DecodeState
    ) -> Tensor:
        """Run the prompts in chunks; hidden states of their last tokens, `[rows of the bucket, hidden_size]`."""
        weight = self.model.embed_tokens.weight
        last_hidden = weight.new_zeros(state.num_cached.shape[0], weight.shape[1])
        for start in range(0, max(map(len, prompts)), PREFILL_CHUNK):
            rows = [row for row, prompt in enumerate(prompts) if len(prompt) > start]
            chunks = [list(prompts[row][start : start + PREFILL_CHUNK]) for row in rows]
            following = [list(prompts[row][start + 1 : start + PREFILL_CHUNK + 1]) for row in rows]
            following = [f + [0] * (len(c) - len(f)) for c, f in zip(chunks, following, strict=True)]
            index = torch.tensor(rows, device=self.device)
            segment, positions = prefill_segment(
                [len(c) for c in chunks],
                [start] * len(rows),
                state.block_table[index],
                page_size=self.page_size,
            )
            token_ids, next_token_ids = (
                torch.tensor(sum(ids, []), device=self.device) for ids in (chunks, following)
            )
            last = segment.cu_seqlens_q[1:].long() - 1
            last_hidden[index] = decoder.prefill(
                token_ids, next_token_ids, positions, MLABatch(prefill=segment), last
            )
        return last_hidden

    def _collect(
        self, reports: list[RowReport], completions: list[Completion], stop_ids: list[int], *, is_step: bool
    ) -> bool:
        """Append what a step emitted; whether any row goes on."""
        for completion, report in zip(completions, reports, strict=False):
            if completion.finish_reason is not None:
                continue
            completion.token_ids += report.tokens
            completion.num_steps += is_step
            if not report.active:
                completion.finish_reason = "stop" if completion.token_ids[-1] in stop_ids else "length"
        return any(completion.finish_reason is None for completion in completions)

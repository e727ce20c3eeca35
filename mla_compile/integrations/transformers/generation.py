"""The decoding loop of an accelerated model, in place of transformers' `_sample`."""

import threading
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.utils import GenerateDecoderOnlyOutput

from mla_compile.engine import Completion
from mla_compile.errors import MLAError
from mla_compile.integrations.transformers.accelerated import Accelerated
from mla_compile.integrations.transformers.generate_call import UNDO, GenerateCall, check_mask
from mla_compile.ops.sampling.sample import gumbel_noise
from mla_compile.sampling_params import MAX_STOP_IDS
from mla_compile.speculate.choice import can_choose

if TYPE_CHECKING:
    from transformers.generation.streamers import BaseStreamer


class AcceleratedGeneration(GenerationMixin):
    """Mixed into an accelerated model's class: `generate` prepares everything as usual, then calls these methods."""

    mla: Any  # an `Accelerated`; transformers evaluates the annotations of model classes

    def _prepare_model_inputs(self, *args: Any, **kwargs: Any) -> Any:
        """Check the mask's shape here, as `generate` drops a mask of ones later."""
        model: Any = super()
        inputs, name, model_kwargs = model._prepare_model_inputs(*args, **kwargs)
        check_mask(model_kwargs.get("attention_mask"), inputs)
        return inputs, name, model_kwargs

    def _sample(  # type: ignore[override]  # transformers types tensors as LongTensor
        self,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        streamer: "BaseStreamer | None" = None,
        tokenizer: Any = None,
        assistant_tokenizer: Any = None,
        **model_kwargs: Any,
    ) -> GenerateDecoderOnlyOutput | Tensor:
        # The tokenizers are not needed: stop strings are among the criteria.
        if synced_gpus:
            raise MLAError("synced_gpus", "False, as one process runs the model", synced_gpus)
        arguments = input_ids, logits_processor, stopping_criteria, generation_config
        call = GenerateCall.of(*arguments, streamer, model_kwargs)
        with LOCK:
            accelerated: Accelerated | None = vars(self).get("mla")
            if accelerated is not None:
                if accelerated.is_generating:
                    expected = (
                        "a call after the model's other one, not in its streamer, criterion or processor"
                    )
                    raise MLAError(
                        "generate", expected, "one inside of it", "generate with a copy of the model"
                    )
                accelerated.is_generating = True
                try:
                    return _generate(accelerated, call)
                finally:
                    accelerated.is_generating = False
        # Another thread has restored the model meanwhile, or the class of an accelerated model has made it.
        model: Any = super() if isinstance(self, AcceleratedGeneration) else self  # type: ignore[redundant-expr]
        result: GenerateDecoderOnlyOutput | Tensor = model._sample(
            *arguments, streamer=streamer, **model_kwargs
        )
        return result

    def _assisted_decoding(  # type: ignore[override]
        self,
        *args: Any,
        assistant_model: Any = None,
        inputs_tensor: Any = None,
        **kwargs: Any,
    ) -> GenerateDecoderOnlyOutput | Tensor:
        """Called for `use_mtp=True`."""
        if assistant_model is not None:
            expected = "None, as an accelerated model has its own drafter"
            raise MLAError("assistant_model", expected, type(assistant_model).__name__, "remove it")
        return self._sample(*args, **kwargs)

    def _beam_search(  # type: ignore[override]
        self, *args: Any, generation_config: GenerationConfig, **kwargs: Any
    ) -> Any:
        raise MLAError("num_beams", "1", generation_config.num_beams, f"sample, {UNDO}")


LOCK = threading.RLock()
"""One lock for all accelerated models: streamers run `generate` in threads, and an engine serves one at a time."""


def _generate(accelerated: Accelerated, call: GenerateCall) -> GenerateDecoderOnlyOutput | Tensor:
    engine = accelerated.engine_for(call)
    # Some configs have -1 for no id.
    stop_ids = {id for id in call.stop_ids if 0 <= id < engine.model.vocab_size}
    if len(stop_ids) > MAX_STOP_IDS:
        hint = "pass a stopping criterion of your own for the others"
        raise MLAError("eos_token_id", f"at most {MAX_STOP_IDS} ids", len(stop_ids), hint)
    choice = None if call.processors is None else _ProcessedChoice(call)
    columns = _Columns(call, choice)
    with accelerated.target.installed(call.longest), ExitStack() as stack:
        stack.callback(engine.wait_until_compiled)  # the thread traces what is installed
        for completions in engine.stream(
            call.prompts,
            max_new_tokens=call.max_new_tokens,
            sampling=call.sampling,
            stop_ids=sorted(stop_ids),
            choose=choice,
        ):
            accelerated.completions = completions
            for row, completion in enumerate(completions):
                if completion.error is not None:
                    raise MLAError("logits", "numbers", f"row {row}: {completion.error}")
            if columns.extend(completions):
                break
        if call.streamer is not None:
            call.streamer.end()
    config = call.config
    if not config.return_dict_in_generate:
        return columns.sequences()
    recorded: dict[str, Any] = {} if choice is None else choice.recorded(columns.count())
    sequences: Any = columns.sequences()
    return GenerateDecoderOnlyOutput(
        sequences=sequences,
        scores=recorded.get("scores") if config.output_scores else None,
        logits=recorded.get("logits") if config.output_logits else None,
    )


class _Columns:
    """The tokens of all rows, position by position, as transformers' own loop generates them.

    Rows advance at different speeds; streamers and stopping criteria get a position once every row has it.
    """

    def __init__(self, call: GenerateCall, choice: "_ProcessedChoice | None") -> None:
        self._call = call
        self._choice = choice
        self._columns: list[list[int]] = []
        self._done = [False] * len(call.prompts)
        prompts = call.input_ids
        # For criteria: the prompts and the columns so far.
        self._ids = torch.cat([prompts, prompts.new_zeros(len(prompts), call.max_new_tokens)], dim=1)

    def count(self) -> int:
        return len(self._columns)

    def sequences(self) -> Tensor:
        """The padded prompts and the generated tokens, int64 `[rows, width + count]`."""
        prompts = self._call.input_ids
        columns = torch.tensor(self._columns, dtype=torch.int64, device=prompts.device)
        return torch.cat([prompts, columns.view(-1, len(self._done)).T], dim=1)

    def extend(self, completions: Sequence[Completion]) -> bool:
        """Add the positions that every row has; return whether all rows are done."""
        while self.count() < self._call.max_new_tokens and not all(self._done):
            tokens = self._next(completions)
            if tokens is None:
                return False
            self._take(tokens)
        return True

    def _next(self, completions: Sequence[Completion]) -> list[int] | None:
        tokens = []
        for completion, done in zip(completions, self._done, strict=True):
            # transformers pads finished rows only if there is an end-of-sequence id.
            if done and self._call.stop_ids:
                tokens.append(self._call.pad_id)
            elif len(completion.token_ids) > self.count():
                tokens.append(completion.token_ids[self.count()])
            else:
                return None
        return tokens

    def _take(self, tokens: list[int]) -> None:
        call = self._call
        self._columns.append(tokens)
        if call.streamer is not None:
            call.streamer.put(torch.tensor(tokens, device="cpu"))
        stopped = [token in call.stop_ids for token in tokens]
        if call.criteria:
            by_criteria = self._criteria(tokens).tolist()
            stopped = [stop or other for stop, other in zip(stopped, by_criteria, strict=True)]
        self._done = [done or stop for done, stop in zip(self._done, stopped, strict=True)]

    def _criteria(self, tokens: list[int]) -> Tensor:
        call = self._call
        end = call.input_ids.shape[1] + self.count()
        self._ids[:, end - 1] = torch.tensor(tokens, device=self._ids.device)
        scores: Any = None
        if self._choice is not None and call.config.output_scores:
            scores = self._choice.recorded(self.count())["scores"]
        ids: Any = self._ids[:, :end]
        stopped: Tensor = call.criteria(ids, scores)
        return stopped


class _ProcessedChoice:
    """Chooses tokens from logits processed by transformers' processors; a `TokenChooser`.

    A processor gets the same input as without drafts: all rows at one length, padded prompts included. So it is called
    once for each length that occurs, and only the rows of this length keep its result.
    """

    def __init__(self, call: GenerateCall) -> None:
        assert call.processors is not None
        self._call = call
        self._processors = call.processors
        count = len(call.prompts)
        self._completions = [Completion() for _ in range(count)]
        # Of each row's last step, until its number of tokens is known: scores, logits, tokens before it.
        self._pending: dict[int, tuple[Tensor, Tensor, int]] = {}
        self._kept: dict[str, list[list[Tensor]]] = {
            name: [[] for _ in range(count)] for name in ("scores", "logits")
        }

    def __call__(self, logits: Tensor, drafts: Tensor, completions: Sequence[Completion]) -> Tensor:
        rows = [completion.prompt_index for completion in completions]
        for row, completion in zip(rows, completions, strict=True):
            self._flush(row)
            self._completions[row] = completion
        logits = logits.to(torch.float32, copy=True)
        scores = self._process(rows, logits, drafts.tolist())
        for i, row in enumerate(rows):
            self._pending[row] = scores[i], logits[i], len(self._completions[row].token_ids)
        if not self._call.config.do_sample:
            return scores.argmax(dim=-1)
        tokens = (scores + self._noise(rows, scores)).argmax(dim=-1)
        self._check_sampled(rows, scores, tokens.tolist(), drafts.tolist())
        return tokens

    def _check_sampled(
        self, rows: list[int], scores: Tensor, tokens: list[list[int]], drafts: list[list[int]]
    ) -> None:
        """Raises `MLAError` for scores that stock cannot sample from, up to the first token that is no draft."""
        usable = can_choose(scores).tolist()
        for i, row in enumerate(rows):
            begun = len(self._completions[row].token_ids)
            for j, token in enumerate(tokens[i][: self._call.max_new_tokens - begun]):
                if not usable[i][j]:
                    expected = "scores with a finite maximum, as sampling requires"
                    place = f"{float(scores[i, j].amax())} in row {row}, token {begun + j} of the completion"
                    raise MLAError("logits_processor", expected, place)
                if drafts[i][j : j + 1] != [token] or token in self._call.stop_ids:
                    break

    def _process(self, rows: list[int], logits: Tensor, drafts: list[list[int]]) -> Tensor:
        """Scores of `rows`, from their logits `[len(rows), n, vocab_size]`."""
        prompts, n = self._call.input_ids, logits.shape[1]
        texts = [list(completion.token_ids) for completion in self._completions]
        lengths = [len(text) for text in texts]
        for row, guesses in zip(rows, drafts, strict=True):
            texts[row] += guesses
        scores, every = logits.clone(), logits.new_zeros(len(texts), logits.shape[2])
        for length in sorted({lengths[row] + j for row in rows for j in range(n)}):
            same_length = [[*text, *[self._call.pad_id] * length][:length] for text in texts]
            generated = torch.tensor(same_length, dtype=prompts.dtype, device=prompts.device)
            ids = torch.cat([prompts, generated.view(len(texts), length)], dim=1)
            places = [(row, i, length - lengths[row]) for i, row in enumerate(rows)]
            places = [(row, i, j) for row, i, j in places if 0 <= j < n]
            given = every.clone()
            for row, i, j in places:
                given[row] = logits[i, j]
            processed = self._run_processors(ids, given)
            for row, i, j in places:
                scores[i, j] = processed[row]
        return scores

    def _run_processors(self, ids: Any, scores: Any) -> Tensor:
        expected = list(scores.shape)
        for processor in self._processors:
            try:
                scores = LogitsProcessorList([processor])(ids, scores)
            except StopIteration as error:  # in the engine's generator it would become a RuntimeError
                what = f"{type(processor).__name__} raised StopIteration"
                raise MLAError("logits_processor", "", what, "raise another exception") from error
            if list(scores.shape) != expected:
                what = f"{list(scores.shape)} of {type(processor).__name__}"
                raise MLAError("logits_processor", f"scores of the same shape, {expected}", what)
        processed: Tensor = scores
        return processed

    def _noise(self, rows: list[int], scores: Tensor) -> Tensor:
        """The noise that the compiled step would add, so tokens are the same wherever they are chosen."""
        device, call = scores.device, self._call
        seeds = torch.tensor([[call.sampling[row].seed] for row in rows], device=device)
        starts = [len(call.prompts[row]) + len(self._completions[row].token_ids) for row in rows]
        position = torch.tensor(starts, device=device)[:, None] + torch.arange(scores.shape[1], device=device)
        return gumbel_noise(seeds, position, scores.shape[2])

    def _flush(self, row: int) -> None:
        """Keep the scores of the tokens that the row's last step emitted."""
        config = self._call.config
        pending = self._pending.pop(row, None)
        if pending is None or not (config.output_scores or config.output_logits):
            return
        scores, logits, before = pending
        emitted = len(self._completions[row].token_ids) - before
        self._kept["scores"][row].extend(scores[:emitted])
        self._kept["logits"][row].extend(logits[:emitted])

    def recorded(self, count: int) -> dict[str, tuple[Tensor, ...]]:
        """`scores` and `logits` of each of `count` positions, `[rows, vocab_size]`; zeros after a row's end."""
        for row in list(self._pending):
            self._flush(row)
        recorded = {}
        for name, rows in self._kept.items():
            nothing = [torch.zeros_like(row[0]) for row in rows if row][:1] * count
            filled = [[*row, *nothing[len(row) :]] for row in rows]
            recorded[name] = tuple(torch.stack([row[i] for row in filled]) for i in range(count))
        return recorded

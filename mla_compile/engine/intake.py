"""Checks the arguments of a caller, and builds requests from them, before anything changes."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mla_compile.engine.detokenizer import TextReader
from mla_compile.engine.grammar import Grammar, GrammarRow, check_grammar
from mla_compile.engine.request import Progress, Request, TokenChooser
from mla_compile.errors import MLAError, check_integer, first_line, is_request_error
from mla_compile.sampling_params import MAX_STOP_IDS, SamplingParams, check_min_tokens, check_token_ids
from mla_compile.speculate import ServedModel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Intake:
    """Builds the requests of one engine. Its methods' arguments are those of `Engine.add` and `Engine.stream`.

    Raises:
        MLAError: from each method, a bad argument, named; from `Intake`, `tokenizer` is not a tokenizer.

    sampling, stop_ids: of requests without their own, from the model (see `ServedModel`).
    """

    def __init__(
        self, model: ServedModel, max_model_len: int, tokenizer: "PreTrainedTokenizerBase | None"
    ) -> None:
        if tokenizer is not None and not (callable(tokenizer) and hasattr(tokenizer, "decode")):
            raise MLAError("tokenizer", "a tokenizer of transformers or None", type(tokenizer).__name__)
        self._vocab_size, self._longest, self._tokenizer = model.vocab_size, max_model_len, tokenizer
        try:
            self.sampling = SamplingParams(**getattr(model, "default_sampling", {}))
        except TypeError as error:
            raise MLAError("model.default_sampling", "a dict of fields of SamplingParams", error) from error
        self.stop_ids: Sequence[int] = getattr(model, "stop_ids", ())

    def requests(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams] | None,
        max_new_tokens: int,
        stop_ids: Sequence[int] | None,
        grammars: Grammar | Sequence[Grammar | None] | None = None,
        choose: TokenChooser | None = None,
    ) -> list[Request]:
        """One request for each completion of each prompt, in their order."""
        if choose is not None and not callable(choose):
            raise MLAError("choose", "a TokenChooser or None", repr(choose))
        if choose is not None and grammars is not None:
            raise MLAError("choose", "None with grammars", type(choose).__name__)
        if not isinstance(prompts, Sequence):
            raise MLAError("prompts", "a list of prompts, each a list of token ids", type(prompts).__name__)
        if sampling is None or isinstance(sampling, SamplingParams):
            sampling = [sampling or self.sampling] * len(prompts)
        if grammars is None or isinstance(grammars, Grammar):
            grammars = [grammars] * len(prompts)
        check_one_each("sampling", "SamplingParams", sampling, len(prompts))
        check_one_each("grammars", "a Grammar", grammars, len(prompts))
        progress = Progress()
        found = []
        for i, (prompt, asked, grammar) in enumerate(zip(prompts, sampling, grammars, strict=True)):
            for j, params in enumerate(checked_sampling(f"sampling[{i}]", asked).copies()):
                request = self.request(prompt, params, max_new_tokens, stop_ids, grammar, choose, f"s[{i}]")
                request.completion.prompt_index, request.completion.index = i, j
                request.progress = progress
                found.append(request)
        return found

    def request(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams | None,
        max_new_tokens: int,
        stop_ids: Sequence[int] | None,
        grammar: Grammar | None,
        choose: TokenChooser | None = None,
        place: str = "",
    ) -> Request:
        """A single request. place: its index in a list, appended to `prompt` and `grammar` in errors."""
        params = self.sampling if sampling is None else checked_sampling("sampling", sampling)
        stop_ids = self.stop_ids if stop_ids is None else stop_ids
        if params.n != 1:
            raise MLAError("n", "1", params.n, "add a request for each of `SamplingParams.copies()`")
        check_integer("max_new_tokens", max_new_tokens, 1)
        vocab_size, longest = self._vocab_size, self._longest
        check_prompt(f"prompt{place}", prompt, vocab_size=vocab_size, limit=("max_model_len", longest))
        check_token_ids("stop_ids", stop_ids, vocab_size)
        check_token_ids("stop_token_ids", params.stop_token_ids, vocab_size)
        ends = frozenset({*(() if params.ignore_eos else stop_ids), *params.stop_token_ids})
        if len(ends) > MAX_STOP_IDS:
            expected = f"at most {MAX_STOP_IDS} ids, the model's end-of-sequence ids included"
            name = "stop_token_ids" if params.stop_token_ids else "stop_ids"
            raise MLAError(name, expected, len(ends), "use stop strings")
        check_token_ids("logit_bias", list(params.logit_bias or ()), vocab_size)
        check_min_tokens(params.min_tokens, params.max_tokens or max_new_tokens)
        if params.min_tokens and len(ends) == vocab_size:
            raise MLAError("min_tokens", "0 if every token is a stop id", params.min_tokens)
        if choose is not None and params.logprobs is not None:
            raise MLAError("logprobs", "None if `choose` picks the tokens", "a number")
        if params.stop_strings and self._tokenizer is None:
            hint = "pass the model's tokenizer to the engine"
            raise MLAError("stop", "none in an engine without a tokenizer", params.stop_strings, hint)
        request = Request(
            list(prompt),
            min(len(prompt) + (params.max_tokens or max_new_tokens), longest),
            params=params,
            stop_ids=ends,
            choose=choose,
            reader=None if self._tokenizer is None else TextReader(self._tokenizer, params),
        )
        if grammar is not None:
            name = f"grammar{place}"
            check_grammar(grammar, name, vocab_size=vocab_size, stop_ids=ends)
            request.grammar = GrammarRow(grammar, request.completion, ends, name)
        return request


def check_one_each(name: str, kind: str, given: object, num_prompts: int) -> None:
    """Raises `MLAError` for anything but a list with an entry for each prompt. kind: of an entry, in errors."""
    if not isinstance(given, Sequence):
        raise MLAError(name, f"{kind} for all prompts, or a list with one for each", repr(given))
    if len(given) != num_prompts:
        raise MLAError(name, f"one entry per prompt ({num_prompts})", len(given))


def checked_sampling(name: str, given: object) -> SamplingParams:
    """Raises `MLAError` for anything but `SamplingParams`."""
    if not isinstance(given, SamplingParams):
        raise MLAError(name, "SamplingParams", repr(given))
    return given


def check_prompt(name: str, prompt: object, *, vocab_size: int, limit: tuple[str, int]) -> Sequence[int]:
    """A prompt's token ids, checked; errors call it `name`.

    limit: the name and value of the limit that a prompt must stay below, as a new token needs a position.

    Raises:
        MLAError: another type, no token, one outside the vocabulary, too many.
    """
    if isinstance(prompt, str | bytes | bytearray) or not isinstance(prompt, Sequence):
        hint = "tokenize text, or use mla_compile.generate" if isinstance(prompt, str) else ""
        raise MLAError(name, "a list of token ids", type(prompt).__name__, hint)
    if not prompt:
        raise MLAError(name, "at least one token", "an empty prompt")
    if len(prompt) >= limit[1]:
        expected = f"fewer tokens than {limit[0]} = {limit[1]}"
        raise MLAError(name, expected, len(prompt), "shorten the prompt")
    if {*map(type, prompt)} != {int} or min(prompt) < 0 or max(prompt) >= vocab_size:  # faster than a loop
        wrong = next(token for token in prompt if type(token) is not int or not 0 <= token < vocab_size)
        raise MLAError(name, f"token ids in [0, {vocab_size})", repr(wrong))
    return prompt


def tokenize(
    tokenizer: "PreTrainedTokenizerBase", text: str, name: str, *, add_special_tokens: bool = True
) -> list[int]:
    """A text's token ids; errors call it `name`.

    Raises:
        MLAError: an empty text, one that the tokenizer rejects.
    """
    if not text:  # a tokenizer may turn it into a start token
        raise MLAError(name, "at least one token", "an empty prompt")
    try:
        token_ids: object = tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
    except BaseException as error:  # a character without a token, say, or a regex that gives up
        if not is_request_error(error):
            raise
        raise MLAError(name, "text that the tokenizer accepts", first_line(error)) from error
    if not isinstance(token_ids, list) or not all(type(token) is int for token in token_ids):
        raise MLAError(name, "text that the tokenizer turns into token ids", "something else from it")
    return token_ids

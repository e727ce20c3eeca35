"""Parses request bodies of OpenAI's API, which are untrusted bytes, into requests for the engine."""

import json
import logging
import secrets
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, TypeVar

from pydantic import ValidationError
from pydantic_core import from_json

from mla_compile.engine.intake import check_prompt, tokenize
from mla_compile.errors import MLAError, is_request_error
from mla_compile.models.files import RepeatedKey, without_repeats
from mla_compile.sampling_params import SamplingParams, check_token_ids
from mla_compile.serving.chat_templates import template_variables
from mla_compile.serving.failures import BadField, BadRequest
from mla_compile.serving.messages import Asked, GrammarSource, ModelLimits
from mla_compile.serving.openai_bodies import (
    IGNORED,
    REFUSED,
    ChatBody,
    CompletionBody,
    SamplingBody,
    TokenizeBody,
    mistake,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


log = logging.getLogger(__name__)

MAX_ECHO = 2**22
"""Characters that a response may repeat: with n choices it is n times as long as its request."""


@dataclass(frozen=True)
class CompletionsAsked:
    """A request for completions, from either endpoint.

    prompts: token ids of each; one for a chat.
    params: with `max_tokens`; `n` is per prompt.
    echoes: the prompts' texts, if each choice begins with its own.
    """

    body: CompletionBody | ChatBody
    prompts: list[list[int]]
    params: SamplingParams
    grammar: GrammarSource | None = None
    echoes: list[str] | None = None

    @property
    def is_chat(self) -> bool:
        return isinstance(self.body, ChatBody)

    @property
    def grammar_field(self) -> str:
        """The field of the body with the grammar, if there is one."""
        return "response_format" if self.body.structured_outputs is None else "structured_outputs"

    @property
    def include_usage(self) -> bool:
        return self.body.stream_options is not None and bool(self.body.stream_options.include_usage)

    def choices(self) -> list[Asked]:
        """The completions to request from the engine, in the order of the response's choices: by prompt.

        A client's seed is used for each prompt, as in `Engine.generate`; without one all choices have different seeds.
        """
        body, seed, n = self.body, self.params.seed, self.params.n
        step = 0 if body.seed is not None else n
        seeds = [seed + i * step for i in range(len(self.prompts))]
        return [
            Asked(prompt, params, self.grammar, body.priority or 0, body.max_drafts)
            for prompt, first in zip(self.prompts, seeds, strict=True)
            for params in self.params.copies(first)
        ]


def parse_completion(
    body: bytes, *, tokenizer: "PreTrainedTokenizerBase", limits: ModelLimits
) -> CompletionsAsked:
    """Parse a body of /v1/completions.

    Raises:
        BadRequest: the body is invalid.
    """
    asked = _read(CompletionBody, body, limits)
    params = _params(asked, asked.logprobs, limits)
    if asked.echo and asked.logprobs is not None:
        raise BadField("echo", "expected false with logprobs, got true")
    if asked.best_of not in (None, params.n):
        raise BadField("best_of", f"expected n, which is {params.n}, or null, got {asked.best_of}")
    if (choices := len(asked.prompt) * params.n) > limits.max_choices:
        raise BadField("n", f"expected at most {limits.max_choices} choices over all prompts, got {choices}")
    prompts = [
        _encode(tokenizer, prompt, "prompt", special=asked.add_special_tokens is not False)
        if isinstance(prompt, str)
        else prompt
        for prompt in asked.prompt
    ]
    wanted = 16 if asked.max_tokens is None else asked.max_tokens
    found = _asked(asked, params, prompts, wanted, limits)
    if not asked.echo:
        return found
    texts = [
        given if isinstance(given, str) else _decode(tokenizer, given, "prompt") for given in asked.prompt
    ]
    if (size := params.n * sum(map(len, texts))) > MAX_ECHO:
        raise BadField("echo", f"expected prompts of at most {MAX_ECHO} characters, n times, got {size}")
    return replace(found, echoes=texts)


def parse_chat(body: bytes, *, tokenizer: "PreTrainedTokenizerBase", limits: ModelLimits) -> CompletionsAsked:
    """Parse a body of /v1/chat/completions; the tokenizer's chat template formats its messages.

    Raises:
        BadRequest: the body is invalid, or the tokenizer has no chat template.
    """
    asked = _read(ChatBody, body, limits)
    if asked.top_logprobs and not asked.logprobs:
        raise BadField("top_logprobs", "requires logprobs = true")
    if asked.max_tokens is not None and asked.max_completion_tokens is not None:
        raise BadField("max_tokens", "expected max_tokens or max_completion_tokens, got both")
    params = _params(asked, (asked.top_logprobs or 0) if asked.logprobs else None, limits)
    if params.n > limits.max_choices:
        raise BadField("n", f"expected at most {limits.max_choices}, got {params.n}")
    prompt = _encode_chat(tokenizer, asked)
    wanted = asked.max_tokens or asked.max_completion_tokens or limits.max_model_len
    return _asked(asked, params, [prompt], wanted, limits)


def parse_tokenize(body: bytes, *, tokenizer: "PreTrainedTokenizerBase", limits: ModelLimits) -> list[int]:
    """Parse a body of /tokenize: the token ids of its prompt, or of its messages.

    Raises:
        BadRequest: the body is invalid.
    """
    asked = _read(TokenizeBody, body, limits)
    if asked.prompt is not None and asked.messages is None:
        return _encode(tokenizer, asked.prompt, "prompt", special=asked.add_special_tokens)
    if asked.messages is not None and asked.prompt is None:
        return _encode_chat(tokenizer, asked)
    raise BadField("prompt", "expected one of prompt and messages")


B = TypeVar("B", CompletionBody, ChatBody, TokenizeBody)


def _read(kind: type[B], body: bytes, limits: ModelLimits) -> B:
    try:
        given = from_json(body, allow_inf_nan=False)
        json.loads(body, object_pairs_hook=without_repeats)  # `from_json` keeps the last of equal keys
    except RepeatedKey as error:
        raise BadField(error.key, "duplicate key") from None
    except ValueError as error:
        raise BadRequest(f"the request body is not valid JSON: {error}") from None
    if not isinstance(given, dict):
        raise BadRequest("the request body is not a JSON object")
    for name, harmless in REFUSED.items():
        value = given.pop(name, None)
        if value is not None and not any(type(value) is type(x) and value == x for x in harmless):
            raise BadField(name, "not supported; remove it", "unsupported_parameter")
    for name in given:
        if name not in kind.model_fields and name not in IGNORED:
            raise BadRequest(f"{name[:100]}: unknown field", name, "unknown_parameter")
    try:
        asked = kind.model_validate({name: given[name] for name in kind.model_fields if name in given})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        path = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in first["loc"])[1:]
        raise BadField(path, mistake(first)) from None
    if asked.model not in (None, limits.model_name):
        given_name = str(asked.model)[:100]
        message = f"the model {given_name!r} does not exist; this server has {limits.model_name!r}"
        raise BadRequest(message, "model", "model_not_found", status=404)
    return asked


def _params(asked: SamplingBody, logprobs: int | None, limits: ModelLimits) -> SamplingParams:
    """The sampling parameters, except `max_tokens`, which depends on the prompts."""
    names = [field.name for field in fields(SamplingParams) if field.name in SamplingBody.model_fields]
    given = {name: value for name in names if (value := getattr(asked, name)) is not None}
    if given.get("top_k") == -1:  # vLLM's value for all tokens
        given["top_k"] = 0
    if len(stop_ids := given.get("stop_token_ids", [])) > limits.max_stop_token_ids:
        expected = f"expected at most {limits.max_stop_token_ids} ids, got {len(stop_ids)}"
        raise BadField("stop_token_ids", expected)
    if not 1 <= given.get("n", 1) <= limits.max_choices:
        raise BadField("n", f"expected an integer in [1, {limits.max_choices}], got {given['n']}")
    unsampled = {"temperature": 1.0, "top_p": 1.0, "seed": secrets.randbelow(2**62), "logprobs": logprobs}
    try:
        params = SamplingParams(**{**unsampled, **limits.default_sampling, **given})
        for name, ids in (("stop_token_ids", stop_ids), ("logit_bias", list(params.logit_bias or ()))):
            check_token_ids(name, ids, limits.vocab_size)
        return params
    except MLAError as error:
        raise BadRequest(str(error), error.name) from None


def _asked(
    asked: CompletionBody | ChatBody,
    params: SamplingParams,
    prompts: list[list[int]],
    max_tokens: int,
    limits: ModelLimits,
) -> CompletionsAsked:
    """max_tokens: cut, as `min_tokens`, to what the shortest prompt leaves room for; the engine cuts it for each."""
    limit = "max_model_len", limits.max_model_len
    name = "messages" if isinstance(asked, ChatBody) else "prompt"
    for prompt in prompts:
        try:
            check_prompt(name, prompt, vocab_size=limits.vocab_size, limit=limit)
        except MLAError as error:
            code = "context_length_exceeded" if len(prompt) >= limits.max_model_len else None
            raise BadRequest(str(error), name, code) from None
    if asked.stream_options is not None and not asked.stream:
        raise BadField("stream_options", "requires stream = true")
    grammar = _grammar(asked)
    if grammar is not None and asked.ignore_eos and not asked.stop_token_ids:
        raise BadField("ignore_eos", "with a grammar, expected false, or stop_token_ids to end the text")
    room = limits.max_model_len - min(map(len, prompts))
    try:
        params = replace(params, max_tokens=max_tokens)  # checks them as they were given
        params = replace(params, max_tokens=min(max_tokens, room), min_tokens=min(params.min_tokens, room))
    except MLAError as error:
        raise BadRequest(str(error), error.name) from None
    return CompletionsAsked(asked, prompts, params, grammar)


def _grammar(asked: SamplingBody) -> GrammarSource | None:
    """The grammar of the text."""
    outputs, form = asked.structured_outputs, asked.response_format
    if form is not None and form.type != "text":
        if outputs is not None:
            raise BadField("structured_outputs", "expected structured_outputs or response_format, got both")
        schema = None if form.json_schema is None else form.json_schema.text
        return GrammarSource("json_schema", schema or '{"type": "object"}')
    if outputs is None:
        return None
    if outputs.choice is not None:
        return GrammarSource("ebnf", "start: " + " | ".join(map(json.dumps, outputs.choice)))
    if outputs.json_schema is not None:
        return GrammarSource("json_schema", outputs.json_schema)
    if outputs.regex is not None:
        return GrammarSource("regex", outputs.regex)
    return GrammarSource("ebnf", outputs.grammar or "")


def _encode(tokenizer: "PreTrainedTokenizerBase", text: str, name: str, *, special: bool = True) -> list[int]:
    try:
        return tokenize(tokenizer, text, name, add_special_tokens=special)
    except MLAError as error:
        if error.__cause__ is not None:
            raise _refused_by("tokenizer", name, error.__cause__) from None
        raise BadRequest(str(error), name) from None


def _decode(tokenizer: "PreTrainedTokenizerBase", token_ids: list[int], name: str) -> str:
    try:
        return str(tokenizer.decode(token_ids))
    except BaseException as error:
        raise _refused_by("tokenizer", name, error) from None


def _encode_chat(tokenizer: "PreTrainedTokenizerBase", asked: ChatBody | TokenizeBody) -> list[int]:
    """The tokens of the template's text. A template writes its own BOS, so none is added unless asked for."""
    if tokenizer.chat_template is None:
        hint = "use /v1/completions, or start the server with --chat-template FILE"
        raise BadField("messages", f"the model's tokenizer has no chat template; {hint}")
    continues, begins = bool(asked.continue_final_message), asked.add_generation_prompt
    if continues and begins:
        raise BadField("add_generation_prompt", "expected false with continue_final_message, got true")
    names = {"role", "content", "name"}
    given = [message.model_dump(include=names, exclude_none=True) for message in asked.messages or ()]
    try:
        variables = template_variables(tokenizer, asked.chat_template_kwargs or {}, asked.reasoning_effort)
        text = tokenizer.apply_chat_template(
            given,
            add_generation_prompt=not continues if begins is None else begins,
            continue_final_message=continues,
            tokenize=False,
            **variables,
        )
    except BadRequest:
        raise
    except BaseException as error:  # a template is a program that rejects messages by raising
        raise _refused_by("chat template", "messages", error) from None
    if not isinstance(text, str):
        raise BadField("messages", "the model's chat template did not return text")
    special = isinstance(asked, ChatBody) and bool(asked.add_special_tokens)
    return _encode(tokenizer, text, "messages", special=special)


def _refused_by(what: str, name: str, error: BaseException) -> BadRequest:
    """The client gets the error's text, which may quote the prompt; the log gets only its type."""
    if not is_request_error(error):
        raise error
    log.warning("the model's %s rejected a request: %s", what, type(error).__name__)
    return BadField(name, f"rejected by the model's {what}: {error}")

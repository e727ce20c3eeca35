"""Request bodies of OpenAI's API: their fields and types.

Types are strict: `"5"` is not an integer; null means absent. Validation of a list stops at its first error, so a body
full of errors costs no more than another.
"""

import json
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    model_validator,
)

from mla_compile.errors import of_pydantic
from mla_compile.sampling_params import MAX_LOGPROBS

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

MAX_STOPS = 16
MAX_STOP_LENGTH = 1024
"""Limits on a request's stop strings and their characters, as each token's text is searched for all."""


# Unsupported fields, with the values that are accepted because they change nothing.
REFUSED: dict[str, tuple[object, ...]] = {
    "audio": (),
    "bad_words": ([],),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "prompt_logprobs": (),
    "suffix": ("",),
    "tool_choice": ("none",),
    "tools": ([],),
    "verbosity": ("medium",),
    "web_search_options": (),
}
# Fields that change no token.
IGNORED = frozenset({
    "metadata", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
    "safety_identifier", "service_tier", "store", "user",
})  # fmt: skip


def _prompts(value: object) -> object:
    """One prompt or several, as text or as token ids: a list of them."""
    several = value if isinstance(value, list) and value and isinstance(value[0], str | list) else [value]
    for prompt in several:
        if not isinstance(prompt, str) and not (
            isinstance(prompt, list) and all(isinstance(token, int) for token in prompt)
        ):
            raise ValueError("expected text, token ids, or a list of either")
    return several


def _content(value: object) -> object:
    """A message's text; each of its parts is a line."""
    if not isinstance(value, list):
        return value
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError("expected text, or a list of parts of type text")
    return "\n".join(part["text"] for part in value)


def _role(value: str) -> str:
    """Map "developer" to "system": chat templates do not know it, and some silently drop unknown roles."""
    return "system" if value == "developer" else value


def _schema(value: object) -> str:
    """A JSON schema's text."""
    if not isinstance(value, dict | str):
        raise ValueError("expected a JSON schema")
    return value if isinstance(value, str) else json.dumps(value, allow_nan=False)


def _nothing(value: object) -> None:
    if value not in (None, []):
        raise ValueError("not supported; remove it")


Schema = Annotated[str, BeforeValidator(_schema)]
Nothing = Annotated[Any, AfterValidator(_nothing)]
Count = Annotated[int, Field(ge=1)]
Choices = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, fail_fast=True)]


class Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # accepted and ignored


class JsonSchema(Body):
    name: str | None = None
    description: str | None = None
    text: Schema | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _one_schema(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("expected json_schema if and only if type is json_schema")
        return self


class StructuredOutputs(Body):
    json_schema: Schema | None = Field(None, alias="json")
    regex: str | None = None
    grammar: str | None = None
    choice: Choices | None = None

    @model_validator(mode="after")
    def _only_one(self) -> Self:
        if sum(value is not None for value in (self.json_schema, self.regex, self.grammar, self.choice)) != 1:
            raise ValueError("expected one of json, regex, grammar and choice")
        return self


class Message(Body):
    role: Annotated[Literal["system", "developer", "user", "assistant"], AfterValidator(_role)]
    content: Annotated[str, BeforeValidator(_content)]
    name: str | None = None
    # Empty fields of the server's own answers, which clients send back.
    annotations: Nothing = None
    audio: Nothing = None
    function_call: Nothing = None
    refusal: Nothing = None
    tool_calls: Nothing = None


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Messages = Annotated[list[Message], Field(min_length=1, fail_fast=True)]
Stops = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]],
    Field(max_length=MAX_STOPS, fail_fast=True),
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
]


class SamplingBody(Body):
    """The fields of both endpoints; null means absent. `SamplingParams` checks the ranges of its fields."""

    model: str
    max_tokens: Count | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    n: int | None = None
    stop: Stops | None = None
    include_stop_str_in_output: bool | None = None
    stop_token_ids: Annotated[list[int], Field(fail_fast=True)] | None = None
    add_special_tokens: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    logit_bias: dict[str, Any] | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    priority: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    max_drafts: Annotated[int, Field(ge=0)] | None = None
    draft_positions: bool | None = None


class CompletionBody(SamplingBody):
    prompt: Annotated[list[str | list[int]], PlainValidator(_prompts)]
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    best_of: int | None = None
    echo: bool | None = None


class ChatBody(SamplingBody):
    messages: Messages
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Effort | None = None


class TokenizeBody(Body):
    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Effort | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool = True


def mistake(error: "ErrorDetails") -> str:
    """The error of a field: what was expected, and what came."""
    if error["type"] == "missing":
        return "expected a value, got none"
    if error["type"] == "extra_forbidden":
        return "unknown field"
    return f"{of_pydantic(error['msg'])}, got {_shown(error['input'])}"


def _shown(value: object) -> str:
    """A value, cut to a line."""
    if isinstance(value, list | dict):
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:60]}..."

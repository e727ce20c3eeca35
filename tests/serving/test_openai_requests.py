"""A body in OpenAI's form asks for completions, or is refused by the name of the field that is wrong."""

import copy
import inspect
import json
import random
import string
from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from pydantic import ValidationError
from tokenizers.processors import TemplateProcessing

from mla_compile import SamplingParams, load_tokenizer
from mla_compile.defaults import SHIPPED_MODEL
from mla_compile.engine.grammar import Grammar
from mla_compile.serving.failures import BadRequest
from mla_compile.serving.messages import GrammarSource, ModelLimits
from mla_compile.serving.openai_bodies import (
    IGNORED,
    REFUSED,
    Body,
    ChatBody,
    CompletionBody,
    SamplingBody,
)
from mla_compile.serving.openai_requests import (
    CompletionsAsked,
    parse_chat,
    parse_completion,
    parse_tokenize,
)

TOKENIZER = load_tokenizer(SHIPPED_MODEL)
assert TOKENIZER is not None
TEMPLATE = (
    "{% for m in messages %}{% if m.content == 'refuse' %}{{ raise_exception('not this') }}{% endif %}"
    "{{ m.role }}{% if m.name %} {{ m.name }}{% endif %}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}{% if thinking %}{{ reasoning_effort }}{% endif %}"
)
CHATTING = copy.deepcopy(TOKENIZER)
CHATTING.chat_template = TEMPLATE
LIMITS = ModelLimits("shipped", vocab_size=3072, max_model_len=256, max_choices=8)
HELLO = TOKENIZER("Hello")["input_ids"]
USER = {"role": "user", "content": "Hi"}


def body_of(fields: dict[str, Any], needed: dict[str, Any]) -> bytes:
    return json.dumps({"model": "shipped", **needed, **fields}).encode()


def completion(**fields: Any) -> CompletionsAsked:
    return parse_completion(body_of(fields, {"prompt": "Hello"}), tokenizer=TOKENIZER, limits=LIMITS)


def chat(**fields: Any) -> CompletionsAsked:
    return parse_chat(body_of(fields, {"messages": [USER]}), tokenizer=CHATTING, limits=LIMITS)


def tokenize(**fields: Any) -> list[int]:
    return parse_tokenize(json.dumps(fields).encode(), tokenizer=CHATTING, limits=LIMITS)


def text_of(asked: CompletionsAsked) -> str:
    return CHATTING.decode(asked.prompts[0])


def test_what_is_left_out_or_null_is_openais_default() -> None:
    nulls = dict.fromkeys(CompletionBody.model_fields.keys() - {"model", "prompt"})
    for asked in (completion(), completion(**nulls)):
        defaults = SamplingParams(temperature=1.0, top_p=1.0, max_tokens=16, seed=asked.params.seed)
        assert asked == CompletionsAsked(asked.body, [HELLO], defaults)
        assert not (asked.body.stream or asked.body.draft_positions or asked.include_usage or asked.is_chat)
    nulls = dict.fromkeys(ChatBody.model_fields.keys() - {"model", "messages"})
    for asked in (chat(), chat(**nulls)):
        assert text_of(asked) == "user: Hi\nassistant:" and asked.is_chat
        assert asked.params.max_tokens == LIMITS.max_model_len - len(asked.prompts[0])


def test_every_field_arrives() -> None:
    sampling = {
        "temperature": 0, "top_p": 0.5, "top_k": 7, "min_p": 0.1, "repetition_penalty": 1.5, "presence_penalty": -1,
        "frequency_penalty": 2.0, "seed": 2**62, "n": 3, "stop": ["a", "b"], "stop_token_ids": [5, 6],
        "ignore_eos": True, "max_tokens": 9, "min_tokens": 4, "logit_bias": {"7": -100, "3071": 0.5},
        "include_stop_str_in_output": True, "skip_special_tokens": False,
    }  # fmt: skip
    rest = {"max_drafts": 0, "priority": 3, "draft_positions": True, "stream": True}
    options = {"stream_options": {"include_usage": True, "include_obfuscation": False}}
    for parse, logprobs in (
        (completion, {"logprobs": 4, "best_of": 3}),
        (chat, {"logprobs": True, "top_logprobs": 4}),
    ):
        asked = parse(**sampling, **rest, **options, **logprobs)
        assert asked.params == SamplingParams(**sampling, logprobs=4)
        assert asked.body.stream and asked.body.draft_positions and asked.include_usage
        assert {(choice.max_drafts, choice.priority) for choice in asked.choices()} == {(0, 3)}
    assert chat(max_completion_tokens=9).params.max_tokens == 9
    assert chat(logprobs=True).params.logprobs == completion(logprobs=0).params.logprobs == 0
    assert (
        chat(logprobs=False, top_logprobs=0).params.logprobs is chat(logprobs=False).params.logprobs is None
    )
    assert completion(seed=-(2**63)).params.seed == -(2**63)
    assert completion(stop="ab").params.stop_strings == ["ab"]
    assert completion(top_k=-1).params.top_k == 0
    assert completion(max_tokens=10**30).params.max_tokens == LIMITS.max_model_len - len(HELLO)
    room = LIMITS.max_model_len - len(HELLO)
    assert completion(max_tokens=256, min_tokens=256).params.min_tokens == room, "cut like max_tokens"


def test_requests_may_have_every_sampling_parameter() -> None:
    own = {"logprobs"}  # each endpoint has its own form of it
    parameters = inspect.signature(SamplingParams).parameters.keys()
    missing = parameters - SamplingBody.model_fields.keys() - own
    assert not missing, f"add {missing} to SamplingBody in mla_compile/serving/openai_bodies.py"
    assert own <= CompletionBody.model_fields.keys() & ChatBody.model_fields.keys()


def test_every_field_of_the_official_client_is_known() -> None:
    for params, body in (
        (completion_create_params, CompletionBody),
        (chat_create_params, ChatBody),
    ):
        for form in get_args(params.CompletionCreateParams):
            assert get_type_hints(form).keys() <= body.model_fields.keys() | REFUSED.keys() | IGNORED


def test_fields_that_change_nothing_may_have_any_value() -> None:
    for parse in (completion, chat):
        for name in IGNORED:
            for value in (None, True, "x", {"a": [1]}, 10**100):
                parse(**{name: value})
        for name, harmless in REFUSED.items():
            for value in (None, *harmless):
                parse(**{name: value})


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize(
    "value", [True, 0, 1, "auto", "x", [1], ["text", "audio"], {"50256": -100}, {"type": "x"}]
)
def test_what_a_field_cannot_do_is_refused_by_name(name: str, value: object) -> None:
    for parse in (completion, chat):
        with pytest.raises(BadRequest, match=name) as error:
            parse(**{name: value})
        assert (error.value.param, error.value.code) == (name, "unsupported_parameter")
        assert error.value.status == 400


def test_prompts_are_texts_or_ids_and_one_or_several() -> None:
    other = TOKENIZER("x y")["input_ids"]
    for prompt, expected in (
        ("Hello", [HELLO]),
        (["Hello", "x y"], [HELLO, other]),
        ([3, 4], [[3, 4]]),
        ([[3], [4, 5]], [[3], [4, 5]]),
        ([[3], "Hello"], [[3], HELLO]),
    ):
        assert completion(prompt=prompt).prompts == expected


def test_choices_come_by_prompt_and_only_a_clients_seed_is_used_twice() -> None:
    asked = completion(prompt=[[3], [4]], n=2, seed=5, max_drafts=1)
    assert [(one.prompt, one.params.seed, one.params.n) for one in asked.choices()] == [
        ([3], 5, 1), ([3], 6, 1), ([4], 5, 1), ([4], 6, 1),
    ]  # fmt: skip
    assert {one.max_drafts for one in asked.choices()} == {1}
    asked = completion(prompt=[[3]] * 4, n=2)
    assert len({one.params.seed for one in asked.choices()}) == 8
    assert asked.choices() == asked.choices()
    assert completion().params.seed != completion().params.seed


def test_the_chat_template_writes_the_messages() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    returned = dict.fromkeys(("annotations", "audio", "function_call", "refusal", "tool_calls"))
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": parts, "name": "Ann"},
        {"role": "assistant", "content": "ok", **returned},
        {"role": "user", "content": "<|endoftext|>"},
    ]
    expected = "system: Be brief.\nuser Ann: a\nb\nassistant: ok\nuser: <|endoftext|>\nassistant:"
    assert text_of(chat(messages=messages)) == expected
    assert tokenize(messages=messages) == chat(messages=messages).prompts[0]


def test_a_chat_may_go_on_with_its_last_message() -> None:
    messages = [USER, {"role": "assistant", "content": "Hel"}]
    whole = "user: Hi\nassistant: Hel"
    for fields, expected in (
        ({}, f"{whole}\nassistant:"),
        ({"add_generation_prompt": True}, f"{whole}\nassistant:"),
        ({"add_generation_prompt": False}, f"{whole}\n"),
        ({"continue_final_message": True}, whole),
        ({"continue_final_message": True, "add_generation_prompt": False}, whole),
    ):
        assert text_of(chat(messages=messages, **fields)) == expected
        assert tokenize(messages=messages, **fields) == chat(messages=messages, **fields).prompts[0]


def test_echo_is_the_text_of_each_prompt() -> None:
    assert completion(echo=True, prompt=["Hello", HELLO, [0, *HELLO]]).echoes == [
        "Hello",
        "Hello",
        "<|endoftext|>Hello",
    ]
    assert completion(echo=False).echoes is completion().echoes is None
    limits = replace(LIMITS, max_model_len=2**20)
    body = body_of({"echo": True, "n": 8}, {"prompt": "Hello " * 100_000})
    with pytest.raises(BadRequest, match=r"^echo: expected prompts of at most 4194304 "):
        parse_completion(body, tokenizer=TOKENIZER, limits=limits)


def test_a_tokenizer_without_a_chat_template_is_an_error() -> None:
    without = copy.deepcopy(TOKENIZER)
    without.chat_template = None
    with pytest.raises(BadRequest, match=r"no chat template.*--chat-template FILE") as error:
        parse_chat(body_of({}, {"messages": [USER]}), tokenizer=without, limits=LIMITS)
    assert error.value.param == "messages"


def test_tokenize_counts_what_is_too_long_as_well() -> None:
    assert tokenize(prompt="Hello") == tokenize(model="shipped", prompt="Hello") == HELLO
    assert len(tokenize(prompt="Hello " * 1000)) > LIMITS.max_model_len
    for fields, param in (
        ({}, "prompt"),
        ({"prompt": "a", "messages": [USER]}, "prompt"),
        ({"prompt": [1]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": "a", "model": "x"}, "model"),
    ):
        with pytest.raises(BadRequest) as error:
            tokenize(**fields)
        assert error.value.param == param


BAD = [
    # completion or chat, fields, the field that is named, code
    (completion, {"model": "other"}, "model", "model_not_found"),
    (completion, {"model": None}, "model", None),
    (completion, {"zork": 1}, "zork", "unknown_parameter"),
    (completion, {"messages": [USER]}, "messages", "unknown_parameter"),
    (chat, {"prompt": "a"}, "prompt", "unknown_parameter"),
    (completion, {"prompt": [1] * 256}, "prompt", "context_length_exceeded"),
    (completion, {"prompt": ["a", "Hello " * 300]}, "prompt", "context_length_exceeded"),
    (chat, {"messages": [USER] * 300}, "messages", "context_length_exceeded"),
    *[
        (completion, {"prompt": prompt}, "prompt", None)
        for prompt in (
            None,
            "",
            [],
            [[]],
            [""],
            5,
            True,
            [True],
            [1.0],
            ["a", 1],
            [1, "a"],
            [3072],
            [-1],
            {},
            [None],
        )
    ],
    (completion, {"prompt": [10**4000]}, "prompt", None),
    *[
        (completion, {name: value}, name, None)
        for name in (
            "max_tokens",
            "top_k",
            "n",
            "max_drafts",
            "logprobs",
            "best_of",
            "min_tokens",
            "priority",
        )
        for value in ("5", 5.5, 5.0, True, [], {}, -2, -(10**400))
    ],
    *[(completion, {"seed": value}, "seed", None) for value in ("5", 5.5, True, [], 2**63, -(2**63) - 1)],
    *[
        (completion, {"logit_bias": value}, "logit_bias", None)
        for value in (
            True,
            [],
            [5],
            {"a": 1},
            {"05": 1},
            {"-1": 1},
            {"3072": 1},
            {"5": 101},
            {"5": -100.5},
            {"5": True},
            {"5": "1"},
            {"5": None},
            {str(i): 1 for i in range(301)},
            {"9" * 5000: 1},
        )
    ],
    *[
        (completion, {name: value}, name, None)
        for name in (
            "temperature",
            "top_p",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
        )
        for value in ("1", True, [], {}, -3, 10**400)
    ],
    *[
        (completion, {name: value}, name, None)
        for name in (
            "ignore_eos",
            "stream",
            "draft_positions",
            "echo",
            "include_stop_str_in_output",
            "skip_special_tokens",
        )
        for value in (0, 1, "true", [])
    ],
    (completion, {"min_tokens": 17}, "min_tokens", None),
    (completion, {"min_tokens": 10, "max_tokens": 9}, "min_tokens", None),
    (chat, {"min_tokens": 10, "max_completion_tokens": 9}, "min_tokens", None),
    (chat, {"min_tokens": 257}, "min_tokens", None),
    (completion, {"echo": True, "logprobs": 0}, "echo", None),
    (chat, {"echo": True}, "echo", "unknown_parameter"),
    (completion, {"continue_final_message": True}, "continue_final_message", "unknown_parameter"),
    (chat, {"continue_final_message": 1}, "continue_final_message", None),
    (chat, {"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt", None),
    (completion, {"max_tokens": 0}, "max_tokens", None),
    (completion, {"logprobs": 21}, "logprobs", None),
    (completion, {"n": 9}, "n", None),
    (completion, {"n": 5, "prompt": ["a", "b"]}, "n", None),
    (chat, {"n": 9}, "n", None),
    (completion, {"n": 2, "seed": 2**63 - 1}, "n", None),
    (completion, {"best_of": 2}, "best_of", None),
    (completion, {"stop": ""}, "stop[0]", None),
    (completion, {"stop": ["a", 1]}, "stop[1]", None),
    (completion, {"stop": ["a"] * 17}, "stop", None),
    (completion, {"stop": "a" * 1025}, "stop[0]", None),
    (completion, {"stop_token_ids": [1] * 128}, "stop_token_ids", None),
    (completion, {"stop_token_ids": [3072]}, "stop_token_ids", None),
    (completion, {"stop_token_ids": [1, True]}, "stop_token_ids[1]", None),
    (completion, {"stream": True, "stream_options": {"a" * 600: 1}}, f"stream_options.{'a' * 85}", None),
    (completion, {"stream_options": {"include_usage": True}}, "stream_options", None),
    (completion, {"stream": True, "stream_options": {"a": 1}}, "stream_options.a", None),
    (chat, {"top_logprobs": 2}, "top_logprobs", None),
    (chat, {"logprobs": True, "top_logprobs": 21}, "top_logprobs", None),
    (chat, {"logprobs": 1}, "logprobs", None),
    (chat, {"max_tokens": 1, "max_completion_tokens": 1}, "max_tokens", None),
    (chat, {"max_completion_tokens": 0}, "max_completion_tokens", None),
    (chat, {"messages": []}, "messages", None),
    (chat, {"messages": "Hi"}, "messages", None),
    (chat, {"messages": [USER, 1]}, "messages[1]", None),
    (chat, {"messages": [{"role": "user", "content": "refuse"}]}, "messages", None),
    *[
        (chat, {"messages": [USER, USER | fields]}, f"messages[1].{name}", None)
        for name, fields in (
            ("role", {"role": "tool"}),
            ("content", {"content": None}),
            ("content", {"content": 5}),
            ("content", {"content": [{"type": "image_url", "image_url": {"url": "x"}}]}),
            ("content", {"content": [{"type": "text", "text": 1}]}),
            ("tool_calls", {"tool_calls": [{"id": "x"}]}),
            ("tool_calls", {"tool_calls": 0}),
            ("tool_call_id", {"tool_call_id": "x"}),
        )
    ],
    (completion, {"response_format": "json"}, "response_format", None),
    (completion, {"response_format": {"type": "xml"}}, "response_format.type", None),
    (completion, {"response_format": {"type": "json_schema"}}, "response_format", None),
    (
        completion,
        {"response_format": {"type": "json_object", "json_schema": {"schema": {}}}},
        "response_format",
        None,
    ),
    (
        completion,
        {"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}},
        "response_format.json_schema.schema",
        None,
    ),
    (completion, {"structured_outputs": {}}, "structured_outputs", None),
    (completion, {"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs", None),
    (completion, {"structured_outputs": {"regex": 1}}, "structured_outputs.regex", None),
    (completion, {"structured_outputs": {"choice": []}}, "structured_outputs.choice", None),
    (completion, {"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice[1]", None),
    (
        completion,
        {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
        "structured_outputs",
        None,
    ),
    (completion, {"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos", None),
]


def test_mistakes_are_refused_by_name() -> None:
    for parse, fields, param, code in BAD:
        with pytest.raises(BadRequest) as error:
            parse(**fields)
        got = error.value
        assert not any(words in got.message for words in OF_PYDANTIC), got.message
        assert (got.param, got.code) == (param, code), fields
        assert param.partition("[")[0].partition(".")[0] in got.message and len(got.message) <= 500, fields
        assert got.status == (404 if code == "model_not_found" else 400)


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"null", b"[]", b'"x"', b"5", b"\xff", b"\xef\xbb\xbf{}", b'{"a":1}x', b'{"prompt": NaN}',
        b'{"prompt": Infinity}', b'{"prompt": "\\ud800"}', b'{"\\udfff": 1}', b'{"prompt": "\xed\xa0\x80"}',
        b"[" * 10_000, b'{"a":' * 10_000 + b"1" + b"}" * 10_000, b'{"n": ' + b"9" * 5000 + b"}", b'{"a":\x001}',
    ],
)  # fmt: skip
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    for parse in (parse_completion, parse_chat, parse_tokenize):
        with pytest.raises(BadRequest) as error:
            parse(body, tokenizer=CHATTING, limits=LIMITS)
        assert error.value.status == 400 and error.value.message


@pytest.mark.parametrize(
    "field", ['"user": NaN', '"user": -Infinity', '"structured_outputs": {"json": {"a": 1e999}}']
)
def test_what_json_has_no_number_for_is_refused(field: str) -> None:
    body = '{"model": "shipped", "prompt": "a", ' + field + "}"
    with pytest.raises(BadRequest):
        parse_completion(body.encode(), tokenizer=TOKENIZER, limits=LIMITS)


def test_a_start_token_is_the_tokenizers_for_text_and_the_templates_for_a_chat() -> None:
    tokenizer = copy.deepcopy(CHATTING)
    start = TemplateProcessing("<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
    tokenizer.backend_tokenizer.post_processor = start
    arguments: dict[str, Any] = {"tokenizer": tokenizer, "limits": LIMITS}
    text = {"model": "shipped", "prompt": "Hello"}
    assert parse_completion(json.dumps(text).encode(), **arguments).prompts == [[0, *HELLO]]
    assert parse_tokenize(json.dumps(text).encode(), **arguments) == [0, *HELLO]
    bare = json.dumps(text | {"add_special_tokens": False}).encode()
    assert parse_tokenize(bare, **arguments) == HELLO
    assert parse_chat(body_of({}, {"messages": [USER]}), **arguments).prompts == chat().prompts


@pytest.mark.parametrize(
    ("body", "fields"),
    [
        (CompletionBody, {"prompt": "a", "stop": [1] * 1000}),
        (CompletionBody, {"prompt": "a", "stop_token_ids": ["a"] * 1000}),
        (CompletionBody, {"prompt": "a", "structured_outputs": {"choice": [1] * 1000}}),
        (CompletionBody, {"prompt": ["a", *[1] * 1000]}),
        (ChatBody, {"messages": [1] * 1000}),
        (ChatBody, {"messages": [{"role": "user", "content": [1] * 1000}]}),
    ],
)
def test_a_list_is_read_up_to_its_first_mistake(body: type[Body], fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as error:
        body.model_validate({"model": "shipped", **fields})
    assert error.value.error_count() == 1


def test_grammars_of_each_kind_arrive() -> None:
    schema = {"type": "object", "properties": {"b": {}, "a": {"enum": ["é"]}}}
    text = json.dumps(schema)
    form = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}
    bare, empty = (
        {"type": "json_schema", "json_schema": given} for given in ({"schema": schema}, {"name": "x"})
    )
    for fields, expected in (
        ({"response_format": bare}, GrammarSource("json_schema", text)),
        ({"response_format": empty}, GrammarSource("json_schema", '{"type": "object"}')),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, GrammarSource("json_schema", '{"type": "object"}')),
        ({"response_format": form}, GrammarSource("json_schema", text)),
        ({"structured_outputs": {"json": schema}}, GrammarSource("json_schema", text)),
        ({"structured_outputs": {"json": text}}, GrammarSource("json_schema", text)),
        ({"structured_outputs": {"regex": "a+"}}, GrammarSource("regex", "a+")),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, GrammarSource("ebnf", 'start: "a"')),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, GrammarSource("ebnf", 'start: "yes" | "no"')),
    ):
        assert completion(**fields).grammar == chat(**fields).grammar == expected
        assert {one.grammar for one in completion(**fields, n=2).choices()} == {expected}


@settings(max_examples=60)
@given(st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=4), st.text(min_size=1, max_size=8))
@example(['"', "\\", "\n\t\0", "\U0001f600é", "a b", "/i", "start"], "b")
def test_choices_are_matched_literally(choices: list[str], other: str) -> None:
    source = completion(structured_outputs={"choice": choices}).grammar
    assert source is not None
    grammar = Grammar.from_ebnf(source.text, TOKENIZER)
    for text in (*choices, other):
        token_ids = TOKENIZER(text)["input_ids"]
        matcher = grammar.matcher()
        accepts = matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()
        assert accepts == (text in choices), (text, source.text)


VALID: list[tuple[dict[str, Any], Callable[..., CompletionsAsked | list[int]]]] = [
    ({
        "model": "shipped", "prompt": ["Hello", [1, 2]], "max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "n": 2,
        "seed": 7, "stop": ["a"], "stop_token_ids": [3], "logprobs": 2, "stream": True,
        "stream_options": {"include_usage": True}, "user": "x", "logit_bias": {"5": 1}, "best_of": 2, "max_drafts": 1,
        "structured_outputs": {"choice": ["a", "b"]}, "draft_positions": True, "top_k": 3, "presence_penalty": 1,
        "add_special_tokens": False,
        "min_tokens": 2, "priority": 1, "skip_special_tokens": False,
    }, parse_completion),
    ({"model": "shipped", "prompt": ["Hello", [1, 2]], "echo": True, "seed": -7, "min_tokens": 1}, parse_completion),
    ({
        "model": "shipped", "messages": [USER, {"role": "assistant", "content": [{"type": "text", "text": "a"}]}],
        "max_completion_tokens": 5, "temperature": 1, "logprobs": True, "top_logprobs": 2, "tools": [],
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}},
        "metadata": {"a": "b"}, "min_p": 0.1, "repetition_penalty": 1.1, "ignore_eos": False, "tool_choice": "none",
        "chat_template_kwargs": {"thinking": True}, "reasoning_effort": "low",
        "continue_final_message": True, "add_generation_prompt": False,
    }, parse_chat),
    ({"model": "shipped", "prompt": "Hello", "add_special_tokens": False}, parse_tokenize),
    ({"messages": [USER], "chat_template_kwargs": {"reasoning_effort": [1.5, {"a": "b"}]}}, parse_tokenize),
]  # fmt: skip
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 1.5, 1e308, 1e-320, -0.0, 2**31, 2**63, 2**64, -(2**63) - 1, 10**400, "", "a",
    "\x00", "\U0001f600", "\u2028", "a" * 5000, [], {}, [[]], [{}], {"a": 1}, [1], ["a"], [None], [1] * 500, {"": ""},
    "none", "text", "json_object", "x" * 200, ["a", "a"], [True], "{}", "(", "start: start", "\\ud800",
]  # fmt: skip


def mutate(value: Any, draw: random.Random) -> Any:
    """A JSON value with one thing changed in it, somewhere; often to another of its type."""
    if isinstance(value, dict) and value and draw.random() < 0.9:
        value, key = dict(value), draw.choice(list(value))
        match draw.randrange(10):
            case 0:
                del value[key]
            case 1:
                value[draw.choice([*REFUSED, *IGNORED, *CompletionBody.model_fields, "zork"])] = draw.choice(
                    VALUES
                )
            case 2:
                value["".join(draw.choices(string.printable + "é\u2028", k=draw.randrange(5)))] = value.pop(
                    key
                )
            case _:
                value[key] = mutate(value[key], draw)
        return value
    if isinstance(value, list) and value and draw.random() < 0.8:
        place = draw.randrange(len(value))
        return [*value[:place], mutate(value[place], draw), *value[place + draw.randrange(2) :]]
    alike = [other for other in VALUES if type(other) is type(value)]
    return copy.deepcopy(draw.choice(alike if alike and draw.random() < 0.7 else VALUES))


def mutate_bytes(body: bytes, draw: random.Random) -> bytes:
    start, end = sorted(draw.choices(range(len(body) + 1), k=2))
    match draw.randrange(4):
        case 0:
            return body[:start] + draw.randbytes(draw.randrange(4)) + body[start:]
        case 1:
            return body[:start] + body[end:]
        case 2:
            return body[:end] + body[start:]
        case _:
            words = [
                b"NaN",
                b"-Infinity",
                b"1e999",
                b"\\ud800",
                b'"',
                b"{",
                b"]",
                b"\x00",
                b"\xff",
                b"9" * 5000,
            ]
            return body[:start] + draw.choice(words) + body[start + draw.randrange(3) :]


@pytest.mark.parametrize("seed", range(3))
def test_any_body_is_understood_or_refused(seed: int) -> None:
    draw, num_asked, num_refused = random.Random(seed), 0, 0
    for _ in range(4000):
        value, parse = draw.choice(VALID)
        for _ in range(draw.choice((1, 1, 2, 3))):
            value = mutate(value, draw)
        body = json.dumps(value).encode()
        if draw.random() < 0.3:
            body = mutate_bytes(body, draw)
        try:
            check_asked(parse(body, tokenizer=CHATTING, limits=LIMITS))
            num_asked += 1
        except BadRequest as error:
            check_refusal(error)
            num_refused += 1
    assert min(num_asked, num_refused) > 400, (num_asked, num_refused)


BODY = {
    "model": "shipped", "stop": ["a"], "stream": True, "stream_options": {"include_usage": True}, "temperature": 0.5,
    "response_format": {
        "type": "json_schema",
        "json_schema": {"name": "a", "schema": {"type": "object", "properties": {"b": {"type": "string"}}}},
    },
    "metadata": {"a": {"b": [{"c": 1, "d": 2}]}},
}  # fmt: skip


def objects(value: Any) -> list[dict[str, Any]]:
    """All objects of a body that have a key, the outermost first."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [value] * (isinstance(value, dict) and bool(value)) + [
        one for each in inner for one in objects(each)
    ]


@pytest.mark.parametrize("seed", range(40))
def test_a_key_that_comes_twice_anywhere_is_refused_by_name(seed: int) -> None:
    draw = random.Random(seed)
    parse, tokenizer, needed = draw.choice(
        [
            (parse_completion, TOKENIZER, {"prompt": "Hello"}),
            (parse_chat, CHATTING, {"messages": [USER, USER]}),
        ]
    )
    body = copy.deepcopy(BODY | needed)
    parse(json.dumps(body).encode(), tokenizer=tokenizer, limits=LIMITS)
    into = draw.choice(objects(body)) if seed % 4 else body
    key = draw.choice(list(into))
    into["\x00"] = into[key] if draw.random() < 0.5 else draw.choice([None, 5, "a", {}])
    text = json.dumps(body).replace(json.dumps("\x00"), json.dumps(key))
    with pytest.raises(BadRequest) as error:
        parse(text.encode(), tokenizer=tokenizer, limits=LIMITS)
    assert error.value.param == key and error.value.status == 400
    assert error.value.message == f"{key}: duplicate key"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n": 9}, "n: expected an integer in [1, 8], got 9"),
        ({"n": 0}, "n: expected an integer in [1, 8], got 0"),
        ({"n": 10**6}, "n: expected an integer in [1, 8], got 1000000"),
        ({"n": 5, "prompt": ["a", "b"]}, "n: expected at most 8 choices"),
        ({"n": 2, "seed": 2**63 - 1}, "n: expected an integer in [1, 1], "
         "as each completion has a seed below 2**63, got 2"),
        ({"stop": ["a"] * 17}, "stop: expected at most 16 items, got a list of 17"),
        ({"stop": ["a" * 1025]}, "stop[0]: expected at most 1024 characters, got \"" + "a" * 59 + "..."),
        ({"stream": "yes"}, 'stream: expected a valid boolean, got "yes"'),
        ({"max_tokens": 0}, "max_tokens: expected greater than or equal to 1, got 0"),
        ({"max_tokens": 1.5}, "max_tokens: expected a valid integer, got 1.5"),
        ({"temperature": [1]}, "temperature: expected a valid number, got a list of 1"),
        ({"prompt": {}}, "prompt: expected text, token ids, or a list of either, got an object of 0"),
        ({"response_format": {"type": "xml"}}, "response_format.type: expected 'text', "
         "'json_object' or 'json_schema', got \"xml\""),
        ({"stop": [""]}, 'stop[0]: expected at least 1 character, got ""'),
        ({"structured_outputs": 5}, "structured_outputs: expected an object, got 5"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice: expected at least 1 item, got a list"),
        ({"best_of": 3}, "best_of: expected n, which is 1, or null, got 3"),
        ({"zork": 1}, "zork: unknown field"),
        ({"stream": True, "stream_options": {"zork": 1}}, "stream_options.zork: unknown field"),
        ({"tools": [1]}, "tools: not supported"),
    ],
)  # fmt: skip
def test_a_mistake_names_the_field_what_was_expected_and_what_came(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadRequest) as error:
        completion(**fields)
    assert error.value.message.startswith(message)


OF_PYDANTIC = (
    "Input should be",
    "Value error",
    "Extra inputs",
    "Field required",
    "should have",
    "instance of",
)


def check_refusal(error: BadRequest) -> None:
    assert not any(words in error.message for words in OF_PYDANTIC), error.message
    assert 1 <= len(error.message) <= 500 and len(error.param or "") <= 100 and error.status in (400, 404)
    json.dumps([error.message, error.param], ensure_ascii=False).encode()


def check_asked(asked: CompletionsAsked | list[int]) -> None:
    """The engine can take it."""
    if isinstance(asked, list):
        assert asked and all(0 <= token < 3072 for token in asked)
        return
    choices = asked.choices()
    assert 1 <= len(choices) == len(asked.prompts) * asked.params.n <= LIMITS.max_choices
    for one in choices:
        assert 1 <= len(one.prompt) < LIMITS.max_model_len and all(0 <= token < 3072 for token in one.prompt)
        assert one.params.max_tokens is not None and 1 <= one.params.max_tokens < LIMITS.max_model_len
        assert one.params.n == 1 and -(2**63) <= one.params.seed < 2**63
        assert one.params.min_tokens <= one.params.max_tokens and 0 <= one.priority < 2**63
        assert all(0 <= token < 3072 for token in one.params.logit_bias or ())
        assert one.grammar is None or one.grammar.text.encode() is not None
        assert one.max_drafts is None or one.max_drafts >= 0

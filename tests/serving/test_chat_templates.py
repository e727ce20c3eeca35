"""A chat's prompt is what the template makes of its messages and variables; a template that fails ends its request."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from mla_compile import MLAError, load_tokenizer
from mla_compile.defaults import SHIPPED_MODEL
from mla_compile.engine import Checkpoint
from mla_compile.serving.chat_templates import read_chat_template
from mla_compile.serving.failures import BadRequest
from mla_compile.serving.messages import ModelLimits
from mla_compile.serving.openai_requests import parse_chat, parse_completion, parse_tokenize
from mla_compile.serving.settings import ServerSettings

SHIPPED = load_tokenizer(SHIPPED_MODEL)
assert SHIPPED is not None
LIMITS = ModelLimits("shipped", vocab_size=3073, max_model_len=2000)
USER = {"role": "user", "content": "Hi"}
# As published templates spell their variables: GLM's, DeepSeek's, gpt-oss's.
GLM = (
    "[gMASK]<sop>{% macro show(text) %}{{ text }}{% endmacro %}{% for m in messages %}<|{{ m.role }}|>"
    "{{ show(m.content) }}{{- '/nothink' if (enable_thinking is defined and not enable_thinking) else '' -}}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
DEEPSEEK = (
    "{% if not thinking is defined %}{% set thinking = false %}{% endif %}{% set ns = namespace(n=0) %}"
    "{{ bos_token }}{% for m in messages %}{% set ns.n = ns.n + 1 %}{{ m.content }}{% endfor %}"
    "{% if thinking %}<think>{% else %}</think>{% endif %}{{ ns.n }}"
)
EFFORT = (
    "{% generation %}{{ messages[0].content }}{% endgeneration %} {{ reasoning_effort | default('medium') }} "
    "{%- if tools %}{{ tools }}{% endif %}{{ strftime_now('')[:0] }}"
)


def tokenizer_with(template: str | None) -> PreTrainedTokenizerBase:
    tokenizer = copy.deepcopy(SHIPPED)
    tokenizer.chat_template = template
    return tokenizer


def chat(template: str | None, **fields: Any) -> str:
    """The text of the prompt."""
    tokenizer = tokenizer_with(template)
    body = json.dumps({"model": "shipped", "messages": [USER], **fields}).encode()
    (prompt,) = parse_chat(body, tokenizer=tokenizer, limits=LIMITS).prompts
    assert parse_tokenize(body, tokenizer=tokenizer, limits=LIMITS) == prompt
    return tokenizer.decode(prompt)


def refusal(template: str | None, **fields: Any) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        chat(template, **fields)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(
    ("template", "fields", "text"),
    [
        (GLM, {}, "[gMASK]<sop><|user|>Hi<|assistant|>"),
        (GLM, {"chat_template_kwargs": {}}, "[gMASK]<sop><|user|>Hi<|assistant|>"),
        (GLM, {"chat_template_kwargs": {"enable_thinking": True}}, "[gMASK]<sop><|user|>Hi<|assistant|>"),
        (GLM, {"chat_template_kwargs": {"enable_thinking": False}}, "[gMASK]<sop><|user|>Hi/nothink<|assistant|>"),
        (DEEPSEEK, {}, "Hi</think>1"),
        (DEEPSEEK, {"chat_template_kwargs": {"thinking": True}}, "Hi<think>1"),
        (EFFORT, {}, "Hi medium"),
        (EFFORT, {"chat_template_kwargs": {"reasoning_effort": "very high"}}, "Hi very high"),
    ],
)  # fmt: skip
def test_a_request_sets_the_variables_of_its_template(
    template: str, fields: dict[str, Any], text: str
) -> None:
    assert chat(template, **fields) == text


@pytest.mark.parametrize("effort", ["none", "minimal", "low", "medium", "high", "xhigh", "max"])
def test_an_effort_sets_what_the_template_has_of_it(effort: str) -> None:
    thinks = effort != "none"
    assert chat(EFFORT, reasoning_effort=effort) == f"Hi {effort}"
    assert ("/nothink" in chat(GLM, reasoning_effort=effort)) != thinks
    assert ("<think>" in chat(DEEPSEEK, reasoning_effort=effort)) == thinks
    given = {"enable_thinking": not thinks}
    assert ("/nothink" in chat(GLM, reasoning_effort=effort, chat_template_kwargs=given)) == thinks
    if thinks:
        error = refusal("{{ messages[0].content }}", reasoning_effort=effort)
        assert (error.param, error.code) == ("reasoning_effort", "unsupported_parameter")
    else:
        assert chat("{{ messages[0].content }}", reasoning_effort=effort) == "Hi"
    twice = refusal(EFFORT, reasoning_effort=effort, chat_template_kwargs={"reasoning_effort": "low"})
    assert twice.param == "reasoning_effort"


def test_an_unknown_effort_is_refused() -> None:
    for value in ("", "hard", 1, True, ["low"]):
        assert refusal(EFFORT, reasoning_effort=value).param == "reasoning_effort"


EVERYTHING = (
    "{{ messages[0].content }}{{ tools }}{{ documents }}{{ add_generation_prompt }}{{ bos_token }}{{ eos_token }}"
    "{{ image_token }}{{ additional_special_tokens }}{{ chat_template }}{{ tokenize }}{{ conversation }}{{ padding }}"
    "{{ tokenizer_kwargs }}{{ range(1) }}{{ namespace() }}{{ strftime_now('') }}{{ self.x }}{{ loop }}"
    "{% if false %}{{ raise_exception('') }}{{ dict() }}{{ cycler(1) }}{% endif %}{{ enable_thinking }}"
)


@pytest.mark.parametrize(
    "name",
    [
        "messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token", "image_token",
        "additional_special_tokens", "chat_template", "tokenize", "conversation", "padding", "tokenizer_kwargs",
        "range", "namespace", "strftime_now", "raise_exception", "dict", "cycler", "self", "return_dict", "zork", "",
        "continue_final_message", "enable_thinking ", "__class__", "x" * 1000,
    ],
)  # fmt: skip
@pytest.mark.parametrize("template", [EVERYTHING, GLM, "{{ messages[0].content }}"])
def test_what_is_not_the_clients_to_set_is_refused_by_name(template: str, name: str) -> None:
    error = refusal(template, chat_template_kwargs={name: [{"role": "user", "content": "other"}]})
    assert error.param == "chat_template_kwargs" and name[:50] in error.message
    readable = {EVERYTHING: "enable_thinking, loop", GLM: "enable_thinking"}.get(template, "none")
    assert f"which are: {readable}; got" in error.message


@pytest.mark.parametrize("value", [1, "x", [], [["enable_thinking", True]], True])
def test_the_variables_are_an_object(value: object) -> None:
    assert refusal(GLM, chat_template_kwargs=value).param == "chat_template_kwargs"


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ raise_exception('Only user and assistant.') }}", "Only user and assistant."),
        ("{{ messages[5].content.upper() }}", "has no element 5"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% for i in range(1000001) %}x{% endfor %}", "Range too big"),
        ("{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}", "recursion"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ ''.__class__.__base__.__subclasses__() }}", "unsafe"),
        ("{{ cycler.__init__.__globals__.os.system('true') }}", "unsafe"),
        ("{{ '{0.__class__}'.format(messages) }}", "at least one token"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{% import 'os' as os %}", "no loader"),
        ("{% for m in messages %}", "Unexpected end of template"),
        ("{{ messages | zork }}", "No filter named 'zork'"),
        ("", "at least one token"),
        ("{{ 'x ' * 10000 }}", "fewer tokens"),
    ],
)
def test_a_template_that_fails_ends_its_request_by_name(template: str, why: str) -> None:
    error = refusal(template)
    assert error.param == "messages" and why in error.message


def test_a_template_of_many_needs_a_default_one() -> None:
    tokenizer = tokenizer_with(None)
    tokenizer.chat_template = {"rag": "{{ messages }}"}
    body = json.dumps({"model": "shipped", "messages": [USER]}).encode()
    with pytest.raises(BadRequest, match="messages: rejected by the model's chat template"):
        parse_chat(body, tokenizer=tokenizer, limits=LIMITS)
    tokenizer.chat_template = {"default": GLM, "tool_use": ""}
    given = json.dumps(json.loads(body) | {"reasoning_effort": "none"}).encode()
    (prompt,) = parse_chat(given, tokenizer=tokenizer, limits=LIMITS).prompts
    assert tokenizer.decode(prompt) == "[gMASK]<sop><|user|>Hi/nothink<|assistant|>"


# --- BOS


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize("writes_bos", [True, False])
def test_a_text_has_the_bos_of_its_tokenizer_and_a_chat_that_of_its_template(
    tmp_path: Path, adds_bos: bool, writes_bos: bool
) -> None:
    file = json.loads((SHIPPED_MODEL / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(file))
    template = "{{ bos_token }}{{ messages[0].content }}" if writes_bos else "{{ messages[0].content }}"
    config = {"bos_token": "<begin>", "add_bos_token": adds_bos, "chat_template": template}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path)
    bos, hi = tokenizer.bos_token_id, tokenizer("Hi", add_special_tokens=False)["input_ids"]
    assert bos == 3072
    body = json.dumps({"model": "shipped", "prompt": "Hi"}).encode()
    text = [bos] * adds_bos + hi
    assert parse_completion(body, tokenizer=tokenizer, limits=LIMITS).prompts == [text]
    assert parse_tokenize(b'{"prompt": "Hi"}', tokenizer=tokenizer, limits=LIMITS) == text
    checkpoint = Checkpoint.load(SHIPPED_MODEL, tokenizer=tmp_path)
    assert checkpoint.tokenizer("Hi")["input_ids"] == text  # of `generate --prompt`
    body = json.dumps({"model": "shipped", "messages": [USER]}).encode()
    chat = [bos] * writes_bos + hi
    assert parse_chat(body, tokenizer=tokenizer, limits=LIMITS).prompts == [chat]
    assert tokenizer.apply_chat_template([USER])["input_ids"] == chat
    # As clients choose: a prompt that a template has written, and a template without BOS.
    body = json.dumps({"model": "shipped", "prompt": "Hi", "add_special_tokens": False}).encode()
    assert parse_completion(body, tokenizer=tokenizer, limits=LIMITS).prompts == [hi]
    body = json.dumps({"model": "shipped", "messages": [USER], "add_special_tokens": True}).encode()
    assert parse_chat(body, tokenizer=tokenizer, limits=LIMITS).prompts == [[bos] * adds_bos + chat]


# --- the file


def test_a_file_takes_the_place_of_the_tokenizers_template(tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text(GLM, encoding="utf-8")
    assert read_chat_template(file) == GLM
    assert ServerSettings(chat_template=file).chat_template == file


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "expected a readable file in UTF-8, got No such file"),
        (b"\xff", "expected a readable file in UTF-8"),
        (b"\n{% for m in messages %}", "expected a Jinja template, got Unexpected end of template"),
        (b"a\n{{ a b }}", "line 2"),
        (b"{% zork %}", "unknown tag 'zork'"),
        (b"a" * (2**24 + 1), "expected at most 16777216 bytes"),
    ],
)
def test_a_file_that_is_no_template_is_named_before_the_server_starts(
    tmp_path: Path, content: bytes | None, why: str
) -> None:
    file = tmp_path / "template.jinja"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(MLAError) as caught:
        ServerSettings(chat_template=file)
    assert str(caught.value).startswith("chat_template: ")
    assert why in str(caught.value) and str(file) in str(caught.value)


# --- the shipped model's


def test_the_shipped_models_answers_continue_the_line_before_them() -> None:
    chat = [
        {"role": "system", "content": "Genesis 1\n"},
        {"role": "user", "content": "In the beginning"},
        {"role": "assistant", "content": " God created the heaven and the earth."},
        {"role": "user", "content": "And the earth was"},
    ]
    for until, text in (
        (2, "Genesis 1\n\nIn the beginning"),
        (4, "Genesis 1\n\nIn the beginning God created the heaven and the earth.\nAnd the earth was"),
    ):
        assert SHIPPED.apply_chat_template(chat[:until], tokenize=False, add_generation_prompt=True) == text

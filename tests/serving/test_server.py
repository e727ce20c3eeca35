"""The server, as OpenAI's own client and plain HTTP see it."""

import asyncio
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

from mla_compile import Completion, Engine, SamplingParams, load_model, load_tokenizer
from mla_compile.defaults import SHIPPED_MODEL
from tests.examples.pages import ROOT, blocks_of
from tests.models.hub_cache import snapshot_of
from tests.serving.servers import children, served

PROMPT = "In the beginning"
SENTENCES = ["In the beginning", "And it came to pass", "def main", "The court of"]
TOKENIZER = load_tokenizer(SHIPPED_MODEL)
assert TOKENIZER is not None


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served("--max-waiting", "32") as server:
        yield server.url()


@pytest.fixture(scope="module")
def client(url: str) -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(
        load_model(SHIPPED_MODEL),
        num_speculative_tokens=0,
        max_model_len=512,
        compile=False,
        tokenizer=TOKENIZER,
    )


def expected(engine: Engine, params: SamplingParams, prompts: list[str] | None = None) -> list[Completion]:
    ids = [TOKENIZER(text)["input_ids"] for text in prompts or [PROMPT]]
    return engine.generate(ids, params, stop_ids=[0])


def get(url: str, data: bytes | None = None, **headers: str) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers)) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


GREEDY = {"temperature": 0.0, "max_tokens": 24}
CASES: dict[str, tuple[dict[str, Any], SamplingParams]] = {
    "greedy": (GREEDY, SamplingParams(max_tokens=24)),
    "sampled": (
        {"temperature": 0.9, "top_p": 0.9, "seed": 5, "max_tokens": 24},
        SamplingParams(temperature=0.9, top_p=0.9, seed=5, max_tokens=24),
    ),
    "extensions": (
        {
            "temperature": 0.9,
            "seed": 6,
            "extra_body": {"top_k": 20, "min_p": 0.02, "repetition_penalty": 1.1},
        },
        SamplingParams(temperature=0.9, seed=6, top_k=20, min_p=0.02, repetition_penalty=1.1, max_tokens=16),
    ),
    "penalties": (
        {**GREEDY, "presence_penalty": 0.5, "frequency_penalty": 0.25},
        SamplingParams(presence_penalty=0.5, frequency_penalty=0.25, max_tokens=24),
    ),
    "stop": ({**GREEDY, "stop": ["court", "z"]}, SamplingParams(stop=["court", "z"], max_tokens=24)),
    "biased": (
        {**GREEDY, "logit_bias": {"0": 100, "70": -5}, "extra_body": {"min_tokens": 5, "priority": 2}},
        SamplingParams(logit_bias={0: 100, 70: -5}, min_tokens=5, max_tokens=24),
    ),
    "biased without drafts": (
        {**GREEDY, "logit_bias": {"0": 100}, "extra_body": {"min_tokens": 5, "max_drafts": 0}},
        SamplingParams(logit_bias={0: 100}, min_tokens=5, max_tokens=24),
    ),
    "ends": (
        {
            "temperature": 0.9,
            "seed": -(2**63),
            "stop": "e",
            "logit_bias": {"0": 3},
            "extra_body": {
                "min_tokens": 4,
                "include_stop_str_in_output": True,
                "skip_special_tokens": False,
                "stop_token_ids": list(range(100, 160)),
            },
        },
        SamplingParams(
            temperature=0.9,
            seed=-(2**63),
            stop="e",
            logit_bias={0: 3},
            min_tokens=4,
            max_tokens=16,
            include_stop_str_in_output=True,
            skip_special_tokens=False,
            stop_token_ids=range(100, 160),
        ),
    ),
    "without drafts": ({**GREEDY, "extra_body": {"max_drafts": 0}}, SamplingParams(max_tokens=24)),
}


@pytest.mark.parametrize("case", CASES)
def test_tokens_and_text_are_the_engines_whole_and_streamed(
    client: OpenAI, engine: Engine, case: str
) -> None:
    fields, params = CASES[case]
    fields = fields | {"extra_body": {**fields.get("extra_body", {}), "draft_positions": True}}
    (want,) = expected(engine, params)
    whole = client.completions.create(model="shipped", prompt=PROMPT, **fields)
    choice = whole.choices[0]
    assert choice.text == want.text and choice.finish_reason == want.finish_reason
    assert choice.model_extra is not None and choice.model_extra["token_ids"] == want.token_ids
    assert whole.usage is not None and whole.usage.completion_tokens == len(want.token_ids)
    options = {"include_usage": True}
    *chunks, last = client.completions.create(
        model="shipped", prompt=PROMPT, stream=True, stream_options=options, **fields
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == want.text
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == want.finish_reason
    extras = [chunk.choices[0].model_extra or {} for chunk in chunks]
    assert [token for each in extras for token in each["token_ids"]] == want.token_ids
    drafts = [position for each in extras for position in each["draft_positions"]]
    assert len(drafts) == len(want.token_ids)
    assert (max(drafts) > 0) == ("without drafts" not in case) or case == "ends"
    assert "".join(text for each in extras for text in each["token_texts"]).startswith(want.text or "")
    if "biased" in case:
        assert (len(want.token_ids), want.token_ids[-1], want.finish_reason) == (6, 0, "stop")
    assert last.choices == [] and last.usage is not None and last.usage == whole.usage


def test_many_prompts_and_choices_come_in_order(client: OpenAI, engine: Engine) -> None:
    params = SamplingParams(temperature=0.8, seed=3, n=2, max_tokens=12)
    want = [completion.text for completion in expected(engine, params, SENTENCES)]
    fields: dict[str, Any] = {"model": "shipped", "temperature": 0.8, "seed": 3, "n": 2, "max_tokens": 12}
    found = client.completions.create(prompt=SENTENCES, **fields)
    assert [choice.text for choice in found.choices] == want
    assert [choice.index for choice in found.choices] == list(range(8))
    pieces = [""] * 8
    for chunk in client.completions.create(prompt=SENTENCES, stream=True, **fields):
        for choice in chunk.choices:
            pieces[choice.index] += choice.text
    assert pieces == want
    ids = [TOKENIZER(text)["input_ids"] for text in SENTENCES]
    assert [choice.text for choice in client.completions.create(prompt=ids, **fields).choices] == want


def test_echo_is_the_prompt_before_the_completion(client: OpenAI, engine: Engine) -> None:
    params = SamplingParams(temperature=0.8, seed=3, n=2, max_tokens=5)
    wants = [completion.text or "" for completion in expected(engine, params, SENTENCES[:2])]
    texts = [SENTENCES[i // 2] + want for i, want in enumerate(wants)]
    fields: dict[str, Any] = {
        "model": "shipped",
        "temperature": 0.8,
        "seed": 3,
        "n": 2,
        "max_tokens": 5,
        "echo": True,
    }
    for prompt in (SENTENCES[:2], [TOKENIZER(text)["input_ids"] for text in SENTENCES[:2]]):
        assert [choice.text for choice in client.completions.create(prompt=prompt, **fields).choices] == texts
        pieces = [""] * 4
        for chunk in client.completions.create(prompt=prompt, stream=True, **fields):
            for choice in chunk.choices:
                pieces[choice.index] += choice.text
        assert pieces == texts


def test_log_probabilities(client: OpenAI, engine: Engine) -> None:
    (want,) = expected(engine, SamplingParams(logprobs=2, max_tokens=24))
    choice = client.completions.create(model="shipped", prompt=PROMPT, logprobs=2, **GREEDY).choices[0]
    assert choice.logprobs is not None and choice.logprobs.token_logprobs is not None
    assert want.logprobs is not None
    logprobs = [place[token].logprob for place, token in zip(want.logprobs, want.token_ids, strict=True)]
    assert choice.logprobs.token_logprobs == pytest.approx(logprobs, abs=1e-3)
    assert "".join(choice.logprobs.tokens or ()) == want.text


def test_output_follows_a_schema_or_a_regex(client: OpenAI) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    extra: list[dict[str, Any]] = [
        {"response_format": form},
        {"structured_outputs": {"regex": "(yes|no){2}"}},
    ]
    texts = [
        client.completions.create(model="shipped", prompt=PROMPT, **GREEDY, extra_body=each).choices[0].text
        for each in extra
    ]
    assert isinstance(json.loads(texts[0])["a"], bool)
    assert texts[1] in ("yesyes", "yesno", "noyes", "nono")
    with pytest.raises(openai.BadRequestError, match="invalid grammar"):
        client.completions.create(
            model="shipped", prompt=PROMPT, extra_body={"structured_outputs": {"regex": "("}}
        )


CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if enable_thinking %}think {{ reasoning_effort or '' }}: {% endif %}assistant:"
)


class Verdict(BaseModel):
    is_good: bool


def test_a_chat_is_a_completion_of_its_text(tmp_path: Path, engine: Engine) -> None:
    (tmp_path / "template.jinja").write_text(CHAT_TEMPLATE)
    parts: list[Any] = [{"type": "text", "text": "Hello"}, {"type": "text", "text": "🙂"}]
    messages: list[Any] = [{"role": "developer", "content": "Be kind."}, {"role": "user", "content": parts}]
    prompt = "system: Be kind.\nuser: Hello\n🙂\nassistant:"
    params = SamplingParams(temperature=0.8, seed=3, n=2, max_tokens=12, logprobs=1)
    want = expected(engine, params, [prompt])
    with served("--chat-template", str(tmp_path / "template.jinja")) as server:
        chats = OpenAI(base_url=f"{server.url()}/v1", api_key="any", max_retries=0).chat.completions
        fields: dict[str, Any] = {"model": "shipped", "messages": messages}
        fields |= {"temperature": 0.8, "seed": 3, "n": 2, "logprobs": True, "top_logprobs": 1}
        whole = chats.create(**fields, max_completion_tokens=12)
        assert [choice.message.content for choice in whole.choices] == [each.text for each in want]
        for choice, each in zip(whole.choices, want, strict=True):
            assert choice.finish_reason == each.finish_reason
            assert choice.logprobs is not None and each.logprobs is not None
            logprobs = [place.logprob for place in choice.logprobs.content or ()]
            places = zip(each.logprobs, each.token_ids, strict=True)
            assert logprobs == pytest.approx([place[token].logprob for place, token in places], abs=1e-3)
        pieces = ["", ""]
        for chunk in chats.create(**fields, max_tokens=12, stream=True):
            for part in chunk.choices:
                pieces[part.index] += part.delta.content or ""
        assert pieces == [each.text for each in want]
        begun = [*messages, {"role": "assistant", "content": "And it"}]
        (want,) = expected(engine, SamplingParams(max_tokens=8), [prompt + " And it"])
        extra = {"continue_final_message": True, "add_generation_prompt": False}
        found = chats.create(
            model="shipped", messages=begun, temperature=0, max_tokens=8, extra_body=extra
        ).choices[0]
        assert found.message.content == want.text
        parsed = chats.parse(**fields, max_tokens=64, response_format=Verdict).choices[0].message.parsed
        assert isinstance(parsed, Verdict)
        for extra, written in (
            ({"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}, "think : "),
            ({"reasoning_effort": "high"}, "think high: "),
        ):
            (want,) = expected(engine, SamplingParams(max_tokens=6), [prompt[:-10] + written + prompt[-10:]])
            found = chats.create(model="shipped", messages=messages, temperature=0, max_tokens=6, **extra)
            assert found.choices[0].message.content == want.text


def test_a_client_chats_with_the_shipped_model(client: OpenAI, engine: Engine) -> None:
    (want,) = expected(engine, SamplingParams(max_tokens=24))
    messages: Any = [{"role": "user", "content": PROMPT}]
    chat = client.chat.completions.create(model="shipped", messages=messages, temperature=0, max_tokens=24)
    assert chat.choices[0].message.content == want.text
    messages += [chat.choices[0].message, {"role": "user", "content": "And the earth"}]
    (want,) = expected(engine, SamplingParams(max_tokens=24), [f"{PROMPT}{want.text}\nAnd the earth"])
    chat = client.chat.completions.create(model="shipped", messages=messages, temperature=0, max_tokens=24)
    assert chat.choices[0].message.content == want.text


def test_a_model_in_the_hugging_face_cache_is_served_by_its_name(tmp_path: Path, engine: Engine) -> None:
    name = "some-org/a.model"
    snapshot_of(SHIPPED_MODEL, tmp_path / "hub", name)
    (want,) = expected(engine, SamplingParams(max_tokens=8))
    with served("--model", name, HF_HOME=str(tmp_path), HF_HUB_CACHE=str(tmp_path / "hub")) as server:
        client = OpenAI(base_url=f"{server.url()}/v1", api_key="any", max_retries=0)
        assert [model.id for model in client.models.list()] == [client.models.retrieve(name).id] == [name]
        messages: Any = [{"role": "user", "content": PROMPT}]
        answer = client.chat.completions.create(model=name, messages=messages, temperature=0, max_tokens=8)
        assert (answer.model, answer.choices[0].message.content) == (name, want.text)


def test_mistakes_have_openais_shape_and_name_the_field(client: OpenAI, url: str) -> None:
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.completions.create(model="other", prompt=PROMPT)
    wrong = {
        "temperature": -1,
        "n": 0,
        "logit_bias": {"5": 101},
        "suffix": "x",
        "bad_words": ["x"],
        "priority": -1,
    }
    for field, value in {
        **wrong,
        "min_tokens": 17,
        "prompt_logprobs": 1,
        "stop_token_ids": [1] * 128,
    }.items():
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model="shipped", prompt=PROMPT, extra_body={field: value})
        assert caught.value.param == field and caught.value.type == "invalid_request_error"
    messages: Any = [{"role": "user", "content": "hello"}]
    with pytest.raises(openai.BadRequestError, match="does not read it") as caught:
        client.chat.completions.create(model="shipped", messages=messages, reasoning_effort="low")
    assert caught.value.param == "reasoning_effort"
    tool: Any = {"type": "function", "function": {"name": "f"}}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="shipped", messages=messages, tools=[tool])
    assert caught.value.param == "tools"
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="shipped", prompt=[5] * 600)
    assert caught.value.code == "context_length_exceeded"
    for path, status in (("/nowhere", 404), ("/v1/completions", 405)):
        found, body = get(url + path)
        assert found == status and body["error"]["type"] == "invalid_request_error"
    found, body = get(f"{url}/v1/completions", b"{" + b" " * 2**23)
    assert found == 413 and body["error"]["code"] == "request_too_large"


def test_models_tokens_probes_metrics_and_the_page(client: OpenAI, url: str) -> None:
    assert [model.id for model in client.models.list()] == ["shipped"]
    extra = client.models.retrieve("shipped").model_extra
    assert extra is not None and (extra["drafter"], extra["num_speculative_tokens"]) == ("mtp", 3)
    body = json.dumps({"prompt": PROMPT}).encode()
    assert json.loads(get(f"{url}/tokenize", body)[1])["tokens"] == TOKENIZER(PROMPT)["input_ids"]
    assert get(f"{url}/health")[0] == get(f"{url}/ready")[0] == 200
    client.completions.create(model="shipped", prompt=PROMPT, **GREEDY)
    metrics = get(f"{url}/metrics")[1].decode()
    values = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if not line.startswith("#"))
    assert float(values["mla_ready"]) == 1 and float(values["mla_tokens_total"]) >= 24
    assert float(values['mla_accepted_tokens_total{draft_position="1"}']) > 0
    assert float(values["mla_time_to_first_token_seconds_count"]) > 0
    assert float(values["mla_time_between_tokens_seconds_count"]) > 0
    assert b"<title>" in get(url)[1]


def test_those_that_ask_at_once_get_what_they_get_alone(url: str, engine: Engine) -> None:
    params = [SamplingParams(temperature=0.9, seed=seed, max_tokens=20) for seed in range(24)]
    want = [expected(engine, each)[0].text for each in params]

    async def run() -> list[str]:
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:

            async def one(seed: int) -> str:
                stream = await client.completions.create(
                    model="shipped", prompt=PROMPT, temperature=0.9, seed=seed, max_tokens=20, stream=True
                )
                return "".join([chunk.choices[0].text async for chunk in stream])

            return await asyncio.gather(*map(one, range(24)))

    assert asyncio.run(run()) == want


def test_the_client_of_the_docs(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    pages = (ROOT / "README.md", ROOT / "docs" / "server.md")
    blocks = [each for page in pages for each in blocks_of(page) if each.mark == "server"]
    chat, program, commands = (
        re.sub('"(mine|zai-org/[^"]+)"', '"shipped"', each.code.replace("http://127.0.0.1:8000", url))
        for each in blocks
    )
    exec(chat, {})
    exec(program, {})
    assert len(capsys.readouterr().out) > 64
    if shutil.which("curl"):
        models, completion = (
            json.loads(subprocess.check_output(shlex.split(each))) for each in commands.splitlines()
        )
        assert models["data"][0]["id"] == "shipped" and completion["usage"]["completion_tokens"] > 0


def running(url: str) -> int:
    return metric(url, "mla_rows_in_use")


def metric(url: str, name: str) -> int:
    text = get(f"{url}/metrics")[1].decode()
    return sum(int(float(line.split()[1])) for line in text.splitlines() if line.startswith(f"{name} "))


LONG = {"model": "shipped", "prompt": PROMPT, "temperature": 0, "max_tokens": 500, "ignore_eos": True}


def test_a_client_that_leaves_ends_its_request(client: OpenAI, url: str) -> None:
    extra = {"ignore_eos": True}
    stream = client.completions.create(
        model="shipped", prompt=PROMPT, max_tokens=500, stream=True, extra_body=extra
    )
    next(iter(stream))
    stream.close()
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.5).completions.create(
            model="shipped", prompt=PROMPT, max_tokens=500, extra_body=extra
        )
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as raw:
        body = json.dumps(LONG).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
        raw.sendall(head + body)
        time.sleep(0.5)
        raw.sendall(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n")
        time.sleep(0.2)
        assert running(url) == 1
    client.completions.create(model="shipped", prompt=PROMPT, max_tokens=4)  # the engine reports its stats
    assert running(url) == 0


def test_a_full_queue_is_429_and_no_request_is_lost(client: OpenAI) -> None:
    async def run() -> list[str | None]:
        async with AsyncOpenAI(base_url=client.base_url, api_key="any", max_retries=0) as many:

            async def one() -> str | None:
                try:
                    await many.completions.create(model="shipped", prompt=PROMPT, max_tokens=30, n=4)
                except openai.RateLimitError as error:
                    return error.response.headers["retry-after"]
                return None

            return await asyncio.gather(*(one() for _ in range(20)))

    waits = asyncio.run(run())
    assert waits.count(None) >= 8 and set(waits) == {None, "1"}


def test_a_plain_request_beside_four_heavy_clients_gets_the_next_row() -> None:
    """Each heavy one asks for as many completions as run at once; the room has no place left."""
    flags = ("--max-rows", "4", "--max-waiting", "12", "--client-header", "X-Client")

    def ask_as(client: str, **fields: Any) -> tuple[int, Any]:
        body = json.dumps({"model": "shipped", "prompt": PROMPT, "ignore_eos": True} | fields).encode()
        return get(f"{url}/v1/completions", body, **{"X-Client": client, "Content-Type": "application/json"})

    with served(*flags) as server, ThreadPoolExecutor(8) as threads:
        url = server.url()
        heavy = [threads.submit(ask_as, "a", n=4, max_tokens=160)]
        deadline = time.monotonic() + 60
        while running(url) < 4:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        heavy += [threads.submit(ask_as, client, n=4, max_tokens=40) for client in "bcd"]
        while metric(url, "mla_waiting") < 12:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        before = sum(each.done() for each in heavy)
        status, _ = ask_as("plain", max_tokens=4)
        assert status == 200, "the room is full, and it has less than its share"
        assert sum(each.done() for each in heavy) <= before + 1, "it waited only for the running rows"
        assert [each.result()[0] for each in heavy] == [200] * 4


def test_keys() -> None:
    with served(MLA_COMPILE_API_KEY="secret") as server:
        url = server.url()
        good = OpenAI(base_url=f"{url}/v1", api_key="secret")
        assert good.models.list().data[0].id == "shipped"
        for key in ("wrong", "secre", "secret2", "sécret"):
            with pytest.raises((openai.AuthenticationError, UnicodeEncodeError)):
                OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0).models.list()
        assert get(f"{url}/v1/models")[0] == 401
        assert get(f"{url}/health")[0] == 200
        assert PROMPT not in "".join(server.log)
        server.signal(signal.SIGTERM)
        assert server.ends() == 0 and "mla-compile: shutting down: nothing is running\n" in server.log


def ask(url: str, into: list[Any]) -> threading.Thread:
    """Request a long completion in a thread; returns when it has begun."""
    body = json.dumps(LONG).encode()
    thread = threading.Thread(target=lambda: into.append(get(f"{url}/v1/completions", body)))
    thread.start()
    while not running(url):
        time.sleep(0.02)
    return thread


def test_sigterm_lets_running_requests_end_and_takes_no_more() -> None:
    with served("--shutdown-timeout", "120") as server:
        url, results = server.url(), list[Any]()
        thread = ask(url, results)
        server.signal(signal.SIGTERM)
        while get(f"{url}/ready")[0] == 200:
            time.sleep(0.02)
        assert get(f"{url}/v1/completions", json.dumps(LONG).encode())[0] == 503
        thread.join()
        assert results[0][0] == 200
        assert server.ends() == 0
        assert "mla-compile: shutting down: 1 request may take 120 s more\n" in server.log


def test_sigterm_ends_what_takes_too_long_by_name() -> None:
    with served("--shutdown-timeout", "0.3") as server:
        url, results = server.url(), list[Any]()
        thread = ask(url, results)
        server.signal(signal.SIGTERM)
        thread.join()
        assert results[0][0] == 500 and results[0][1]["error"]["message"] == "the server is shutting down"
        assert server.ends() == 0


def test_an_engine_that_dies_is_a_500_and_comes_back() -> None:
    with served() as server:
        url, results = server.url(), list[Any]()
        thread = ask(url, results)
        os.kill(children(server.process.pid)[0], signal.SIGKILL)
        thread.join()
        status, body = results[0]
        assert status == 500 and body["error"]["type"] == "server_error"
        assert "the engine failed: its process exited with status -9" in body["error"]["message"]
        assert get(f"{url}/ready")[0] == 503
        assert get(f"{url}/v1/completions", json.dumps(LONG).encode())[0] == 503
        while get(f"{url}/ready")[0] != 200:
            time.sleep(0.1)
        assert get(f"{url}/v1/completions", json.dumps(LONG).encode())[0] == 200


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_what_runs(stop: signal.Signals) -> None:
    with served() as server:
        url, results = server.url(), list[Any]()
        thread = ask(url, results)
        if stop == signal.SIGTERM:
            server.signal(stop)
            while get(f"{url}/ready")[0] == 200:
                time.sleep(0.02)
        server.signal(stop)
        thread.join()
        assert results[0][1]["error"]["message"] == "the server is shutting down"
        assert server.ends(10) == 0 and "Traceback" not in "".join(server.log)


def test_an_engine_that_cannot_be_started_is_one_line() -> None:
    with served() as server:
        server.url(ready=False)
        os.kill(children(server.process.pid)[0], signal.SIGKILL)
        assert server.ends() == 1
        assert server.log[-1] == "mla-compile: the engine failed: its process exited with status -9\n"


def test_where_it_cannot_listen_it_names_the_flag() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with served("--port", str(port)) as server:
            assert server.ends() == 2
            expected = (
                f"--port: expected a free port, got {port} (Address already in use); 0 takes any free one"
            )
            assert server.log[-1] == f"mla-compile: {expected}\n" and "Errno" not in "".join(server.log)
    with served("--host", "999.1.1.1") as server:
        assert server.ends() == 2
        assert "--host: expected an address of this machine, got 999.1.1.1 (" in server.log[-1]


def test_a_mistake_in_the_flags_is_one_line() -> None:
    with served("--num-pages", "5") as server:
        assert server.ends() == 2
        assert "--num-pages: expected at least" in server.log[-1]

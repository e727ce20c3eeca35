"""Answers in OpenAI's form: the official client's types take each, and chunks join to the whole."""

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from mla_compile import SamplingParams, load_tokenizer
from mla_compile.defaults import SHIPPED_MODEL
from mla_compile.engine.detokenizer import TextReader
from mla_compile.engine.reports import Logprob
from mla_compile.serving.failures import BadRequest, CompletionFailed, Failure
from mla_compile.serving.messages import ModelLimits, Update
from mla_compile.serving.openai_bodies import ChatBody, CompletionBody
from mla_compile.serving.openai_requests import CompletionsAsked
from mla_compile.serving.openai_responses import Response, models_object, tokenize_object
from mla_compile.serving.token_bytes import Vocabulary
from tests.engine.tokenizers_of_every_kind import text_of

TOKENIZER = load_tokenizer(SHIPPED_MODEL)
assert TOKENIZER is not None
VOCABULARY = Vocabulary(TOKENIZER)
LIMITS = ModelLimits("shipped", vocab_size=3072, max_model_len=256)
TEXTS = st.text(alphabet="ab \né🙂—漢", max_size=30)


def asked_for(
    num_prompts: int = 1,
    *,
    n: int = 1,
    stop: Sequence[str] = (),
    top_logprobs: int | None = None,
    is_chat: bool = False,
    include_usage: bool = False,
    draft_positions: bool = False,
    echoes: list[str] | None = None,
) -> CompletionsAsked:
    kind, what = (
        (ChatBody, {"messages": [{"role": "user", "content": "Hi"}]})
        if is_chat
        else (CompletionBody, {"prompt": "Hi"})
    )
    options = {"include_usage": include_usage}
    body = kind(model="shipped", stream_options=options, draft_positions=draft_positions, **what)
    params = SamplingParams(n=n, stop=stop, max_tokens=50, logprobs=top_logprobs)
    return CompletionsAsked(body, [[1, 2, 3]] * num_prompts, params, echoes=echoes)


def updates_of(
    token_ids: list[int], draw: random.Random, *, stop: Sequence[str] = (), top_logprobs: int | None = None
) -> list[Update]:
    """The engine's updates of a completion, in steps of a few tokens or none; a stop string ends it with the step
    that completes it."""
    found = TextReader(TOKENIZER, SamplingParams(stop=stop)).feed(token_ids)
    token_ids = token_ids if found is None else token_ids[: found.num_tokens]
    updates: list[Update] = []
    while token_ids:
        new, token_ids = token_ids[: (count := draw.randrange(5))], token_ids[count:]
        places = None if top_logprobs is None else [place_of(token, top_logprobs, draw) for token in new]
        updates.append(Update(new, [draw.randrange(4) for _ in new], places))
    end = Update(finish_reason="length") if found is None else Update(finish_reason="stop", text=found.text)
    if found is not None or (updates and draw.random() < 0.5):
        updates[-1].finish_reason, updates[-1].text = end.finish_reason, end.text
        return updates
    return [*updates, end]


def place_of(token: int, n: int, draw: random.Random) -> dict[int, Logprob]:
    """In the engine's order: the chosen token, then the n most likely ones, which may include it."""
    likely = draw.sample(range(3072), n)
    if n and token not in likely and draw.random() < 0.5:
        likely[draw.randrange(n)] = token
    values = sorted((-draw.expovariate(0.3) for _ in range(n)), reverse=True)
    place = {token: Logprob(-float("inf"), n + 1)}
    return place | {other: Logprob(values[i], i + 1) for i, other in enumerate(likely)}


def check_official(answer: dict[str, Any]) -> None:
    """The official client's types take it, and JSON does."""
    json.dumps(answer, allow_nan=False).encode()
    match answer["object"]:
        case "chat.completion":
            ChatCompletion.model_validate(answer, strict=True)
        case "chat.completion.chunk":
            ChatCompletionChunk.model_validate(answer, strict=True)
        case "text_completion":  # the type knows no choice that goes on, which the client lets pass
            choices = [
                choice | {"finish_reason": choice["finish_reason"] or "stop"} for choice in answer["choices"]
            ]
            Completion.model_validate(answer | {"choices": choices}, strict=True)
        case kind:
            pytest.fail(kind)


def joined(chunks: list[dict[str, Any]], index: int) -> dict[str, Any]:
    """What a client makes of a choice's chunks: the choice of a whole completion."""
    whole: dict[str, Any] = {"index": index}
    for choice in [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]:
        assert whole.get("finish_reason") is None, "a chunk comes after the last"
        whole["finish_reason"] = choice["finish_reason"]
        if "delta" in choice:
            message = whole.setdefault("message", {"content": "", "refusal": None})
            message["content"] += choice["delta"].get("content", "")
            message |= {key: value for key, value in choice["delta"].items() if key == "role"}
        else:
            whole["text"] = whole.get("text", "") + choice["text"]
        for name in ("token_ids", "token_texts", "draft_positions"):
            if name in choice:
                whole[name] = whole.get(name, []) + choice[name]
        whole.setdefault("logprobs", None)
        for name, values in (choice["logprobs"] or {}).items():
            whole["logprobs"] = whole["logprobs"] or {}
            before = whole["logprobs"].get(name)
            whole["logprobs"][name] = values if before is None or values is None else before + values
    return whole


@given(
    texts=st.lists(TEXTS, min_size=1, max_size=3),
    stop=st.lists(st.text(alphabet="ab é🙂", min_size=1, max_size=3), max_size=2),
    top_logprobs=st.sampled_from([None, 0, 3]),
    is_chat=st.booleans(),
    draft_positions=st.booleans(),
    include_usage=st.booleans(),
    echo=st.none() | TEXTS,
    draw=st.randoms(use_true_random=False),
)
def test_chunks_join_to_the_whole(
    texts: list[str],
    stop: list[str],
    top_logprobs: int | None,
    is_chat: bool,
    draft_positions: bool,
    include_usage: bool,
    echo: str | None,
    draw: random.Random,
) -> None:
    echoes = None if echo is None or is_chat or top_logprobs is not None else [echo]
    asked = asked_for(
        n=len(texts), stop=stop, top_logprobs=top_logprobs, is_chat=is_chat, include_usage=include_usage,
        draft_positions=draft_positions, echoes=echoes,
    )  # fmt: skip
    streamed, at_once = Response(asked, VOCABULARY), Response(asked, VOCABULARY)
    pending = [
        updates_of(TOKENIZER(text)["input_ids"] if text else [], draw, stop=stop, top_logprobs=top_logprobs)
        for text in texts
    ]
    ends = [updates[-1] for updates in pending]
    all_ids = [[token for update in updates for token in update.token_ids] for updates in pending]
    chunks = streamed.opening()
    while any(pending):
        index = draw.choice([i for i, updates in enumerate(pending) if updates])
        update = pending[index].pop(0)
        at_once.add(index, update)
        if (chunk := streamed.feed(index, update)) is not None:
            chunks.append(chunk)
    chunks += streamed.closing()
    whole = at_once.whole()
    for answer in (*chunks, whole):
        check_official(answer)
        assert ("usage" in answer) == (include_usage or answer is whole)
    assert len({(chunk["id"], chunk["object"], chunk["created"]) for chunk in chunks}) == 1
    assert streamed.usage() == at_once.usage() == whole["usage"]
    assert [chunk["usage"] for chunk in chunks if chunk.get("usage")] == [whole["usage"]] * include_usage
    for index, choice in enumerate(whole["choices"]):
        assert joined(chunks, index) == choice
        text = choice["message"]["content"] if is_chat else choice["text"]
        own = text_of(TOKENIZER, all_ids[index]) if ends[index].text is None else ends[index].text
        assert text == (echoes or [""])[0] + (own or "")
        assert choice["finish_reason"] == ends[index].finish_reason
        assert choice.get("token_ids", all_ids[index]) == all_ids[index]
        if choice["logprobs"] is not None:
            check_logprobs(choice["logprobs"], all_ids[index], top_logprobs or 0)


def check_logprobs(logprobs: dict[str, Any], token_ids: list[int], n: int) -> None:
    """Of each token, in the shape of either endpoint."""
    if "content" in logprobs:
        given = b"".join(bytes(place["bytes"]) for place in logprobs["content"])
        assert len(logprobs["content"]) == len(token_ids)
        assert given.decode(errors="replace") == text_of(TOKENIZER, token_ids)
        for place in logprobs["content"]:
            logprobs = [likely["logprob"] for likely in place["top_logprobs"]]
            assert len(logprobs) == n and logprobs == sorted(logprobs, reverse=True)
        return
    text = "".join(logprobs["tokens"])
    assert text_of(TOKENIZER, token_ids).rstrip("�") == text
    assert {len(values) for values in logprobs.values()} == {len(token_ids)}
    for offset, token in zip(logprobs["text_offset"], logprobs["tokens"], strict=True):
        assert text[offset:].startswith(token)


def test_a_token_has_its_draft_position_and_likely_tokens() -> None:
    hello = TOKENIZER(" hello")["input_ids"][0]
    place = {hello: Logprob(-3.0, 3), 0: Logprob(-0.5, 1), 7: Logprob(-float("inf"), 2)}
    update = Update([hello], [2], [place])
    chunk = Response(asked_for(top_logprobs=2, draft_positions=True), VOCABULARY).feed(0, update)
    text = VOCABULARY.text_of(hello)
    assert chunk is not None and chunk["choices"] == [
        {
            "index": 0, "text": text, "finish_reason": None, "token_ids": [hello], "draft_positions": [2],
            "token_texts": [text],
            "logprobs": {
                "tokens": [text], "token_logprobs": [-3.0], "text_offset": [0],
                "top_logprobs": [{text: -3.0, "<|endoftext|>": -0.5, VOCABULARY.text_of(7): -9999.0}],
            },
        }
    ]  # fmt: skip
    chunk = Response(asked_for(top_logprobs=2, is_chat=True), VOCABULARY).feed(0, update)
    assert chunk is not None
    (content,) = chunk["choices"][0]["logprobs"]["content"]
    assert (content["token"], content["bytes"], content["logprob"]) == (text, list(text.encode()), -3.0)
    assert [likely["logprob"] for likely in content["top_logprobs"]] == [-0.5, -9999.0]


def test_a_character_comes_with_its_last_token() -> None:
    token_ids = TOKENIZER("🙂")["input_ids"]
    assert len(token_ids) > 1
    plain = Response(asked_for(), VOCABULARY)
    chunks = [plain.feed(0, Update([token], [0])) for token in token_ids]
    assert chunks[:-1] == [None] * (len(token_ids) - 1)
    assert chunks[-1] is not None and chunks[-1]["choices"][0]["text"] == "🙂"
    response = Response(asked_for(draft_positions=True), VOCABULARY)
    chunks = [response.feed(0, Update([token], [0])) for token in token_ids]
    assert [chunk["choices"][0]["token_ids"] for chunk in chunks if chunk] == [[token] for token in token_ids]


@pytest.mark.parametrize("is_chat", [False, True])
def test_updates_without_news_make_no_chunk_until_the_last(is_chat: bool) -> None:
    response = Response(asked_for(draft_positions=True, top_logprobs=0, is_chat=is_chat), VOCABULARY)
    assert response.feed(0, Update()) is None
    chunk = response.feed(0, Update(finish_reason="length"))
    assert chunk is not None
    (choice,) = chunk["choices"]
    assert choice["finish_reason"] == "length" and choice["token_ids"] == choice["draft_positions"] == []
    assert choice.get("delta", choice.get("text")) == ({} if is_chat else "")


def test_what_may_begin_a_stop_string_is_held_back() -> None:
    response = Response(asked_for(stop=["ab!"]), VOCABULARY)
    (a,), (b,) = TOKENIZER("a")["input_ids"], TOKENIZER("b")["input_ids"]
    assert response.feed(0, Update([a, b], [1, 0])) is None
    chunk = response.feed(0, Update([a], [0], finish_reason="stop", text=""))
    assert chunk is not None and chunk["choices"][0]["text"] == ""
    assert chunk["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("is_chat", [False, True])
def test_what_the_engine_did_not_complete_is_an_error(is_chat: bool) -> None:
    for update, match in (
        (Update(finish_reason="error", error="the model's logits are NaN"), "are NaN"),
        (Update([5], [0], finish_reason="abort"), "abort"),
    ):
        for method in ("feed", "add"):
            response = Response(asked_for(is_chat=is_chat), VOCABULARY)
            with pytest.raises(CompletionFailed, match=match):
                getattr(response, method)(0, update)


def test_each_choice_begins_with_its_own_prompt() -> None:
    for names in (["first", "second"], None):
        response = Response(asked_for(num_prompts=2, n=2, echoes=names), VOCABULARY)
        found = [choice["text"] for chunk in response.opening() for choice in chunk["choices"]]
        assert found == (["first", "first", "second", "second"] if names else [])


def test_a_prompt_counts_once() -> None:
    response = Response(asked_for(num_prompts=2, n=2), VOCABULARY)
    for index in range(4):
        response.add(index, Update([5] * index, [0] * index, finish_reason="length"))
    assert response.usage() == {"prompt_tokens": 6, "completion_tokens": 6, "total_tokens": 12}
    assert [choice["index"] for choice in response.whole()["choices"]] == [0, 1, 2, 3]


def test_the_servers_other_objects() -> None:
    models = models_object(LIMITS, created=5)
    assert models["object"] == "list"
    (model,) = [Model.model_validate(model, strict=True) for model in models["data"]]
    assert (model.id, model.created) == ("shipped", 5)
    assert models["data"][0]["drafter"] is None, "nothing drafts"
    (drafted,) = models_object(replace(LIMITS, drafter="ngram", num_speculative_tokens=2), created=5)["data"]
    assert (drafted["drafter"], drafted["num_speculative_tokens"]) == ("ngram", 2)
    assert tokenize_object([3, 4], LIMITS) == {"count": 2, "max_model_len": 256, "tokens": [3, 4]}
    assert BadRequest("no such model", "model", "model_not_found", 404).body() == {
        "error": {
            "message": "no such model", "type": "invalid_request_error", "param": "model", "code": "model_not_found",
        }
    }  # fmt: skip
    kinds = {
        401: "authentication_error",
        413: "invalid_request_error",
        429: "rate_limit_error",
        500: "server_error",
    }
    for status, kind in kinds.items():
        assert Failure("x", status=status).body()["error"] == {
            "message": "x",
            "type": kind,
            "param": None,
            "code": None,
        }


def sentencepiece_tokenizer() -> PreTrainedTokenizerFast:
    """As Llama's: spaces are ▁, and what has no token is spelt in bytes."""
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "é", "▁a"]
    backend = Tokenizer(BPE({name: i for i, name in enumerate(names)}, [("▁", "a")], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    backend.add_special_tokens(["<s>", "<｜end▁of▁text｜>"])  # as DeepSeek's are written
    return PreTrainedTokenizerFast(tokenizer_object=backend)


@given(st.text(max_size=20))
@example("a🙂é <|endoftext|><s>\x00")
def test_tokens_bytes_join_to_the_text(text: str) -> None:
    token_ids = TOKENIZER(text)["input_ids"] if text else []
    assert b"".join(map(VOCABULARY.bytes_of, token_ids)) == text.encode()
    tokenizer = sentencepiece_tokenizer()
    vocabulary = Vocabulary(tokenizer)
    token_ids = tokenizer(text.replace(" ", "▁"))["input_ids"] if text else []
    assert b"".join(map(vocabulary.bytes_of, token_ids)) == text.replace("▁", " ").encode()


def test_special_tokens_go_by_their_names() -> None:
    tokenizer = sentencepiece_tokenizer()
    for name in ("<s>", "<｜end▁of▁text｜>"):
        assert Vocabulary(tokenizer).text_of(tokenizer.convert_tokens_to_ids(name)) == name


def test_every_id_has_a_text_of_its_own() -> None:
    known = [VOCABULARY.text_of(token) for token in range(len(TOKENIZER))]
    assert len(set(known)) == len(known) and "" not in known
    assert VOCABULARY.text_of(3072) == "" and VOCABULARY.bytes_of(3072) == b""
    assert "bytes:\\xf0" in known and " the" in known

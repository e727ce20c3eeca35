"""Response objects of OpenAI's API: completions and chats, whole and in chunks, models and tokens."""

import itertools
import logging
import time
import traceback
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from mla_compile.engine.completion import Completion
from mla_compile.engine.detokenizer import Detokenizer, TextStream
from mla_compile.engine.reports import Logprob
from mla_compile.errors import is_request_error
from mla_compile.serving.failures import CompletionFailed
from mla_compile.serving.messages import ModelLimits, Update
from mla_compile.serving.openai_requests import CompletionsAsked
from mla_compile.serving.token_bytes import Vocabulary

log = logging.getLogger(__name__)
T = TypeVar("T")

MIN_LOGPROB = -9999.0
"""OpenAI's value for probability 0, as JSON has no infinity."""


class Response:
    """The response to one request, built from updates: a chunk for each (`feed`), or one object for all (`add`).

    A response uses only one of `feed` and `add`.

    asked: the request. vocabulary: of the server's tokenizer.
    """

    def __init__(self, asked: CompletionsAsked, vocabulary: Vocabulary) -> None:
        self._asked = asked
        count = len(asked.prompts) * asked.params.n
        self._choices = _made(lambda: [Choice(asked, index, vocabulary) for index in range(count)])
        prefix, kind = ("chatcmpl", "chat.completion") if asked.is_chat else ("cmpl", "text_completion")
        name = f"{prefix}-{uuid.uuid4().hex}"
        self._head = {"id": name, "object": kind, "created": int(time.time()), "model": asked.body.model}

    def opening(self) -> list[dict[str, Any]]:
        """The first chunks of a stream: the role of each choice of a chat, or the prompt that it begins with."""
        if self._asked.echoes is not None:
            return [self._chunk([choice.opening()]) for choice in self._choices]
        if not self._asked.is_chat:
            return []
        delta = {"role": "assistant", "content": ""}
        return [
            self._chunk([{"index": i, "delta": delta, "logprobs": None, "finish_reason": None}])
            for i in range(len(self._choices))
        ]

    def feed(self, index: int, update: Update) -> dict[str, Any] | None:
        """The chunk of a choice's update; None if it has nothing new for the client.

        Raises:
            CompletionFailed: the engine did not complete the choice, or the tokenizer has no text for it.
        """
        choice = _made(lambda: self._choices[index].feed(update))
        return None if choice is None else self._chunk([choice])

    def closing(self) -> list[dict[str, Any]]:
        """The last chunks of a stream: the usage, if requested."""
        return [self._chunk([], self.usage())] if self._asked.include_usage else []

    def add(self, index: int, update: Update) -> None:
        """Add a choice's update; raises like `feed`."""
        self._choices[index].add(update)

    def whole(self) -> dict[str, Any]:
        """The object of all choices, once they have ended; raises like `feed`."""
        choices = _made(lambda: [choice.whole() for choice in self._choices])
        return self._head | {"choices": choices, "usage": self.usage()}

    def usage(self) -> dict[str, int]:
        """Tokens so far; a prompt counts once, whatever its number of completions."""
        prompt = sum(map(len, self._asked.prompts))
        completion = sum(choice.num_tokens for choice in self._choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }

    def _chunk(self, choices: list[dict[str, Any]], usage: dict[str, int] | None = None) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._asked.is_chat else "text_completion"
        chunk = self._head | {"object": kind, "choices": choices}
        return chunk | {"usage": usage} if self._asked.include_usage else chunk


class Choice:
    """One completion of a response. It uses only one of `feed` and `add`."""

    def __init__(self, asked: CompletionsAsked, index: int, vocabulary: Vocabulary) -> None:
        self._asked, self._index, self._vocabulary = asked, index, vocabulary
        self._completion = Completion(logprobs=None if asked.params.logprobs is None else [])
        tokenizer, params = vocabulary.tokenizer, asked.params
        self._text = TextStream(tokenizer, params)
        self._pieces = Detokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens)
        self._echo = "" if asked.echoes is None else asked.echoes[index // params.n]
        self._num_shaped = 0
        self._with_tokens = asked.body.draft_positions or asked.params.logprobs is not None

    @property
    def num_tokens(self) -> int:
        """Tokens so far."""
        return len(self._completion.token_ids)

    def add(self, update: Update) -> None:
        """Add an update.

        Raises:
            CompletionFailed: it ended with an error or was aborted.
        """
        completion = self._completion
        completion.token_ids += update.token_ids
        completion.draft_positions += update.draft_positions
        if completion.logprobs is not None:
            completion.logprobs += update.logprobs or []
        completion.finish_reason, completion.text = update.finish_reason, update.text
        if update.finish_reason not in (None, "stop", "length"):
            raise CompletionFailed(update.error or f"the completion ended with {update.finish_reason!r}")

    def feed(self, update: Update) -> dict[str, Any] | None:
        """Add an update; return the choice of a chunk with the new text, or None if there is nothing new.

        Holds back bytes of an incomplete character, and text that may begin a stop string.
        """
        self.add(update)
        text = self._new_text()
        if not text and update.finish_reason is None and not (self._with_tokens and update.token_ids):
            return None
        if self._asked.is_chat:
            return self._shaped({"delta": {"content": text} if text else {}})
        return self._shaped({"text": text})

    def opening(self) -> dict[str, Any]:
        """The choice of a first chunk, with the prompt."""
        return self._shaped({"text": self._echo})

    def whole(self) -> dict[str, Any]:
        """The choice of a whole completion."""
        text = self._echo + self._new_text()
        if self._asked.is_chat:
            return self._shaped({"message": {"role": "assistant", "content": text, "refusal": None}})
        return self._shaped({"text": text})

    def _new_text(self) -> str:
        text = self._text.feed(self._completion)
        text.encode()  # JSON cannot have what UTF-8 cannot encode
        return text

    def _shaped(self, text: dict[str, Any]) -> dict[str, Any]:
        """A choice with this text, and the requested details of its new tokens."""
        completion, new = self._completion, slice(self._num_shaped, None)
        self._num_shaped = self.num_tokens
        token_ids, logprobs = completion.token_ids[new], None
        before = len(self._pieces.text)
        # A piece is empty while its character is incomplete: all pieces join to the text.
        pieces = [self._pieces.feed(token) for token in token_ids] if self._with_tokens else []
        if pieces and completion.finish_reason is not None:
            pieces[-1] += self._pieces.finish()
        if completion.logprobs is not None and self._asked.is_chat:
            logprobs = self._chat_logprobs(token_ids, completion.logprobs[new])
        elif completion.logprobs is not None:
            logprobs = self._completion_logprobs(token_ids, completion.logprobs[new], pieces, before)
        choice = {
            "index": self._index,
            **text,
            "logprobs": logprobs,
            "finish_reason": completion.finish_reason,
        }
        if self._asked.body.draft_positions:
            choice["token_ids"] = token_ids
            choice["token_texts"] = pieces
            choice["draft_positions"] = completion.draft_positions[new]
        return choice

    def _completion_logprobs(
        self,
        token_ids: Sequence[int],
        places: Sequence[Mapping[int, Logprob]],
        pieces: list[str],
        before: int,
    ) -> dict[str, Any]:
        """pieces: what each token adds to a text of `before` characters."""
        text_of = self._vocabulary.text_of
        offsets = [*itertools.accumulate(map(len, pieces), initial=before)]
        return {
            "tokens": pieces,
            "token_logprobs": [_finite(place[token]) for token, place in zip(token_ids, places, strict=True)],
            "top_logprobs": [
                {text_of(likely): _finite(logprob) for likely, logprob in place.items()} for place in places
            ],
            "text_offset": offsets[:-1],
        }

    def _chat_logprobs(
        self, token_ids: Sequence[int], places: Sequence[Mapping[int, Logprob]]
    ) -> dict[str, Any]:
        content = []
        for token, place in zip(token_ids, places, strict=True):
            # The chosen token comes first, and may be beyond the number requested.
            likely = list(place.items())[len(place) - (self._asked.params.logprobs or 0) :]
            likely.sort(key=lambda item: -item[1].logprob)
            top = [self._token_logprob(*item) for item in likely]
            content.append(self._token_logprob(token, place[token]) | {"top_logprobs": top})
        return {"content": content, "refusal": None}

    def _token_logprob(self, token: int, logprob: Logprob) -> dict[str, Any]:
        given = list(self._vocabulary.bytes_of(token))
        return {"token": self._vocabulary.text_of(token), "logprob": _finite(logprob), "bytes": given}


def _made(make: Callable[[], T]) -> T:
    """The result of `make`. The client gets an error's text, which may quote the completion; the log gets its location.

    Raises:
        CompletionFailed: `make` failed.
    """
    try:
        return make()
    except CompletionFailed:
        raise
    except BaseException as error:
        if not is_request_error(error):
            raise
        at = traceback.extract_tb(error.__traceback__)[-1]
        log.error("detokenizing failed: %s at %s:%d", type(error).__name__, at.filename, at.lineno or 0)
        why = f"detokenizing the completion failed: {type(error).__name__}: {str(error)[:300]}"
        raise CompletionFailed(why) from None


def _finite(logprob: Logprob) -> float:
    return max(logprob.logprob, MIN_LOGPROB)


def model_object(limits: ModelLimits, created: int) -> dict[str, Any]:
    """The object of /v1/models/NAME; created: seconds since 1970."""
    return {
        "id": limits.model_name,
        "object": "model",
        "created": created,
        "owned_by": "mla-compile",
        "max_model_len": limits.max_model_len,
        "drafter": limits.drafter if limits.num_speculative_tokens else None,
        "num_speculative_tokens": limits.num_speculative_tokens,
    }


def models_object(limits: ModelLimits, created: int) -> dict[str, Any]:
    """The list of /v1/models."""
    return {"object": "list", "data": [model_object(limits, created)]}


def tokenize_object(token_ids: list[int], limits: ModelLimits) -> dict[str, Any]:
    """The response of /tokenize, as in vLLM."""
    return {"count": len(token_ids), "max_model_len": limits.max_model_len, "tokens": token_ids}

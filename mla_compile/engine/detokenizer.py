"""Text of tokens: of a whole completion, piece by piece as it grows, and up to a stop string."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenizers.decoders import DecodeStream

from mla_compile.engine.completion import Completion

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def decode(tokenizer: "PreTrainedTokenizerBase", token_ids: Sequence[int]) -> str:
    """The text of all tokens together, special ones left out."""
    return str(tokenizer.decode(list(token_ids), skip_special_tokens=True))


class Detokenizer:
    """The text of tokens as they come. Bytes of a character that is not complete yet are withheld."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._backend = tokenizer.backend_tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self.text = ""

    def feed(self, token: int) -> str:
        """What a token adds to the text."""
        piece = self._stream.step(self._backend, token) or ""
        self.text += piece
        return piece


@dataclass(frozen=True)
class Found:
    """A stop string. `num_tokens` of those fed in this call complete it; `text` is all that stands before it."""

    num_tokens: int
    text: str


class StopStrings:
    """Finds where a growing text first contains one of some strings, whatever the steps that it grows by.

    stops: the strings, none of them empty.
    """

    def __init__(self, stops: Sequence[str], tokenizer: "PreTrainedTokenizerBase") -> None:
        self._stops = stops
        self._known = Detokenizer(tokenizer)

    def feed(self, tokens: Sequence[int]) -> Found | None:
        """The first place where one of the strings is complete, the earliest beginning among equals."""
        for count, token in enumerate(tokens, start=1):
            before = len(self._known.text)
            if not self._known.feed(token):
                continue
            text = self._known.text
            begins = [text.find(stop, max(0, before - len(stop) + 1)) for stop in self._stops]
            if found := [begin for begin in begins if begin >= 0]:
                return Found(count, text[: min(found)])
        return None


class TextStream:
    """Text of a growing completion, piece by piece; together the pieces are `Completion.text` in the end.

    stop: the request's stop strings. What may turn out to be the beginning of one is held back.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._num_held = max(map(len, stop), default=1) - 1
        self._known = Detokenizer(tokenizer)
        self._num_seen = self._num_given = 0

    def feed(self, completion: Completion) -> str:
        """What the completion's new tokens add to the text."""
        for token in completion.token_ids[self._num_seen :]:
            self._known.feed(token)
        self._num_seen = len(completion.token_ids)
        text, ready = self._known.text, len(self._known.text) - self._num_held
        if completion.finish_reason is not None:
            text = completion.text or ""
            if completion.text is None:  # the engine has no tokenizer
                text = decode(self._tokenizer, completion.token_ids)
            ready = len(text)
        piece = text[self._num_given : max(ready, self._num_given)]
        self._num_given += len(piece)
        return piece

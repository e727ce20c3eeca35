"""Stop strings: where the text of a growing completion first contains one, whatever the steps that it grew by."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenizers.decoders import DecodeStream

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Found:
    """num_tokens: of those fed in this call, the last of which completes the string. text: of all before the string."""

    num_tokens: int
    text: str


class StopStrings:
    """Reads a completion's tokens as they come.

    stops: the strings, none of them empty.
    """

    def __init__(self, stops: Sequence[str], tokenizer: "PreTrainedTokenizerBase") -> None:
        self._stops = stops
        self._backend = tokenizer.backend_tokenizer
        # Withholds the bytes of a character that is not complete yet.
        self._stream = DecodeStream(skip_special_tokens=True)
        self._text = ""

    def feed(self, tokens: Sequence[int]) -> Found | None:
        """The first place where one of the strings is complete, the earliest beginning among equals."""
        for count, token in enumerate(tokens, start=1):
            piece = self._stream.step(self._backend, token) or ""
            before = len(self._text)
            self._text += piece
            begins = [
                at
                for stop in self._stops
                if (at := self._text.find(stop, max(0, before - len(stop) + 1))) >= 0
            ]
            if piece and begins:
                return Found(count, self._text[: min(begins)])
        return None

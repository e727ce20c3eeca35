"""Text of tokens: piece by piece as a completion grows, and up to a stop string.

The pieces of a text follow from its tokens alone, however many tokens each step adds. So the pieces of a stream join to
`Completion.text` for every tokenizer, though decoding all tokens at once may give another text: some decoders replace
all characters of a run of byte tokens if one byte is wrong.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from mla_compile.engine.completion import Completion
from mla_compile.errors import request_error
from mla_compile.sampling_params import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_DEFAULTS = SamplingParams()
_REPLACEMENT = "\ufffd"
_MAX_PARTS = 4
"""Bytes of the longest character in UTF-8, and so the tokens that it may be split over."""


def _decoder(
    tokenizer: "PreTrainedTokenizerBase", *, skip_special_tokens: bool
) -> Callable[[list[int]], str]:
    """The function that decodes token ids to text."""
    from transformers import PreTrainedTokenizerFast as Fast

    kind = type(tokenizer)
    if (
        issubclass(kind, Fast)
        and (kind.decode, kind._decode) == (Fast.decode, Fast._decode)
        and not tokenizer.clean_up_tokenization_spaces
    ):
        # The same in a sixth of the time.
        return partial(tokenizer.backend_tokenizer.decode, skip_special_tokens=skip_special_tokens)

    def decode(token_ids: list[int]) -> str:
        text: object = cast("Any", tokenizer.decode)(token_ids, skip_special_tokens=skip_special_tokens)
        if not isinstance(text, str):
            raise TypeError(f"it returned {type(text).__name__} instead of text")
        return text

    return decode


class Detokenizer:
    """The text of tokens as they arrive. The bytes of an incomplete character are withheld.

    text: all text returned so far.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", *, skip_special_tokens: bool = True) -> None:
        self._decode = _decoder(tokenizer, skip_special_tokens=skip_special_tokens)
        # Decoders treat the first token of a text differently, so new tokens are decoded after the last ones.
        self._context: list[int] = []
        self._context_text = ""
        self._pending: list[int] = []
        # Whether a token was seen that completes a character and begins another one, as byte-level decoders have. They
        # join the bytes of all tokens, so more tokens change only the last character; `_context_text` then includes
        # characters of pending tokens.
        self._straddles = False
        self.text = ""

    def feed(self, token: int) -> str:
        """The text that a token adds.

        Raises:
            RequestError: the tokenizer cannot decode the token. Every later call raises too.
        """
        self._pending.append(token)
        try:
            piece = self._text_of(self._pending)
            if piece and not piece.endswith(_REPLACEMENT):
                return self._give(piece, len(self._pending))
            if self._straddles or (piece.rstrip(_REPLACEMENT) and self._replaces_less(piece)):
                return self._give_complete(piece)
            if len(self._pending) < _MAX_PARTS:
                return ""
            # The first one belongs to no character that can still be completed.
            return self._give(self._text_of(self._pending[:1]), 1)
        except BaseException as error:
            raise request_error(f"the tokenizer cannot decode token {token}", error) from error

    def finish(self) -> str:
        """The withheld text, once no more tokens come."""
        if not self._pending:
            return ""
        try:
            return self._give(self._text_of(self._pending), len(self._pending))
        except BaseException as error:
            raise request_error(f"the tokenizer cannot decode tokens {self._pending}", error) from error

    def _text_of(self, pending: list[int]) -> str:
        readings = []
        behind = self._decode([*self._context, *pending])
        if self._straddles:
            return behind[len(self._context_text) :]
        if behind.startswith(self._context_text):
            readings.append(behind[len(self._context_text) :])
            if _REPLACEMENT not in readings[0]:
                return readings[0]
        # An invalid byte may corrupt others, or be in the context: the best reading has the fewest replacements.
        readings.append(self._decode(pending))
        readings += (self._decode(pending[:i]) + self._decode(pending[i:]) for i in range(1, len(pending)))
        return min(readings, key=lambda text: text.count(_REPLACEMENT))

    def _replaces_less(self, piece: str) -> bool:
        """Whether a character spans several of the pending tokens."""
        return piece.count(_REPLACEMENT) < sum(self._decode([i]).count(_REPLACEMENT) for i in self._pending)

    def _give(self, piece: str, count: int) -> str:
        """Return the text of the first `count` pending tokens."""
        given, self._pending = self._pending[:count], self._pending[count:]
        if piece:
            self._context, self._context_text = given, self._decode(given)
            self._straddles = False
            self.text += piece
        return piece

    def _give_complete(self, piece: str) -> str:
        """Return the text of the pending tokens except the last character, which is not complete."""
        self._pending = [*self._context, *self._pending][-_MAX_PARTS:]
        self._context, self._context_text = [], self._decode(self._pending)[:-1]
        self._straddles = True
        self.text += piece[:-1]
        return piece[:-1]


@dataclass(frozen=True)
class Found:
    """A stop string, which the first `num_tokens` tokens of this call complete; `text` is the text that it ends."""

    num_tokens: int
    text: str


def without_end(new: list[int], finish_reason: str | None, params: SamplingParams) -> list[int]:
    """New tokens of a completion, except the stop id that ended it: as in vLLM, its text is that of a stop string."""
    is_hidden = finish_reason == "stop" and not params.include_stop_str_in_output
    return new[:-1] if is_hidden else new


class TextReader:
    """Reads a growing text, and finds the first stop string in it, however many tokens each call adds.

    params: of the request: its stop strings, and which text they end.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", params: SamplingParams = _DEFAULTS) -> None:
        self._stops, self._includes = params.stop_strings, params.include_stop_str_in_output
        self._known = Detokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens)
        self._min_tokens, self._num_read = params.min_tokens, 0

    @property
    def text(self) -> str:
        """All text read so far."""
        return self._known.text

    def feed(self, tokens: Sequence[int], *, is_end: bool = False) -> Found | None:
        """The stop string that is completed first; among several completed by the same token, the earliest to begin.

        is_end: no more tokens come.

        Raises:
            RequestError: the tokenizer cannot decode one.
        """
        for count, token in enumerate(tokens, start=1):
            self._num_read += 1
            if found := self._find(self._known.feed(token), count):
                return found
        return self._find(self._known.finish(), len(tokens)) if is_end else None

    def _find(self, piece: str, num_tokens: int) -> Found | None:
        if not piece or not self._stops or self._num_read <= self._min_tokens:
            return None
        text, before = self.text, len(self.text) - len(piece)
        begins = [(text.find(stop, max(0, before - len(stop) + 1)), len(stop)) for stop in self._stops]
        if found := [(begin, length) for begin, length in begins if begin >= 0]:
            begin, length = min(found)
            return Found(num_tokens, text[: begin + length * self._includes])
        return None


class TextStream:
    """Text of a growing completion, piece by piece; together the pieces are `Completion.text` in the end.

    params: of the request. Text that may be the beginning of a stop string is withheld, unless the text includes it.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", params: SamplingParams = _DEFAULTS) -> None:
        stops = [] if params.include_stop_str_in_output else params.stop_strings
        self._num_held = max(map(len, stops), default=1) - 1
        self._params = params
        self._known = Detokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens)
        self._num_seen = self._num_given = 0

    def feed(self, completion: Completion) -> str:
        """The text that the completion's new tokens add.

        Raises:
            RequestError: the tokenizer cannot decode one, and the completion's engine has no tokenizer.
        """
        text = completion.text
        if text is None:  # it has not ended, or the engine has no tokenizer
            new = completion.token_ids[self._num_seen :]
            for token in without_end(new, completion.finish_reason, self._params):
                self._known.feed(token)
            self._num_seen = len(completion.token_ids)
            if completion.finish_reason is not None:
                self._known.finish()
            text = self._known.text
        end = len(text) - (self._num_held if completion.finish_reason is None else 0)
        piece = text[self._num_given : max(end, self._num_given)]
        self._num_given += len(piece)
        return piece

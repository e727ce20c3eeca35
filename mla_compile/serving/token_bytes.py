"""Bytes and texts of single tokens. Several tokens may share the bytes of one character."""

import re
from typing import TYPE_CHECKING

from transformers.convert_slow_tokenizer import bytes_to_unicode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Vocabulary:
    """Bytes and texts of a tokenizer's ids.

    tokenizer: a fast one, with byte-level BPE (like DeepSeek's and GLM's) or like SentencePiece's.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self.tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        self._added: dict[int, str] = {
            token: added.content for token, added in self._backend.get_added_tokens_decoder().items()
        }
        decoder = self._backend.decoder
        self._bytes = {char: bytes([byte]) for byte, char in bytes_to_unicode().items()}
        self._is_byte_level = decoder is not None and b'"ByteLevel"' in decoder.__getstate__()

    def bytes_of(self, token: int) -> bytes:
        """A token's bytes in a text; for a special token, its name."""
        if token in self._added:
            return self._added[token].encode()
        name: str = self._backend.id_to_token(token) or ""  # a model may have more ids than its tokenizer
        if self._is_byte_level:
            return b"".join(self._bytes.get(char, char.encode()) for char in name)
        if byte := re.fullmatch("<0x([0-9A-F]{2})>", name):
            return bytes.fromhex(byte[1])
        return name.replace("▁", " ").encode()

    def text_of(self, token: int) -> str:
        """A token's text; for part of a character, its bytes in OpenAI's notation: `bytes:\\xf0\\x9f`."""
        given = self.bytes_of(token)
        try:
            return given.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in given)

"""Small tokenizers of every kind that transformers has, without files."""

import functools
import random
from collections.abc import Callable, Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import ByT5Tokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from mla_compile.engine.detokenizer import TextReader

WORDS = ["the", "cat", "s", "é", "猫", "🚀", ".", ",", "'", "t", "n't", "!", "\ufffd"]
BYTES = [
    f"<0x{byte:02X}>"
    for byte in (0x0A, 0x20, 0x41, 0xC3, 0xA9, 0xE7, 0x8C, 0xAB, 0xF0, 0x9F, 0x9A, 0x80, 0xFF)
]


def text_of(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> str:
    """What a completion of these tokens has as its text."""
    reader = TextReader(tokenizer)
    reader.feed(token_ids, is_end=True)
    return reader.text


def _fast(made: Tokenizer, **settings: object) -> PreTrainedTokenizerFast:
    made.add_special_tokens([AddedToken("</s>", special=True), AddedToken("<|user|>", special=True)])
    made.add_tokens([AddedToken("<tool>")])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", **settings)


def byte_level() -> PreTrainedTokenizerBase:
    """As DeepSeek's and GLM's: single bytes, and some whole and half characters with a space before them."""
    alphabet = {byte: i for i, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    longer = ["Ġthe", "Ġcat", "ðŁ", "Ġð", "ł", "Ã©", "çĮ", "Ċ"]
    made = Tokenizer(models.BPE(alphabet | {word: 256 + i for i, word in enumerate(longer)}, []))
    made.decoder = decoders.ByteLevel()
    return _fast(made)


@functools.cache
def straddling() -> PreTrainedTokenizerBase:
    """Byte-level too: many tokens end a character and begin the next one, as some of DeepSeek's do in Hebrew."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    draw = random.Random(0)
    texts = [straddled_text(draw) for _ in range(1000)]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(texts, trainer)
    return _fast(made)


def straddled_text(draw: random.Random) -> str:
    """Words of characters of two to four bytes."""
    first, last = draw.choice([(0x5D0, 0x5EA), (0x3041, 0x3093), (0x1F600, 0x1F63F)])
    return " ".join(
        "".join(chr(draw.randint(first, last)) for _ in range(draw.randint(2, 8))) for _ in range(8)
    )


def byte_fallback() -> PreTrainedTokenizerBase:
    """As Llama's."""
    pieces = ["<unk>", *BYTES, "▁", *WORDS, *(f"▁{word}" for word in WORDS)]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    made = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _fast(made)


def metaspace() -> PreTrainedTokenizerBase:
    """As T5's: Unigram."""
    pieces = ["<unk>", "▁", *WORDS, *(f"▁{word}" for word in WORDS)]
    made = Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], unk_id=0))
    made.decoder = decoders.Metaspace()
    return _fast(made)


def word_piece() -> PreTrainedTokenizerBase:
    """As BERT's, with transformers' clean-up."""
    pieces = ["[UNK]", *WORDS, *(f"##{word}" for word in WORDS)]
    made = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    made.decoder = decoders.WordPiece()
    return _fast(made, clean_up_tokenization_spaces=True)


def end_of_word() -> PreTrainedTokenizerBase:
    """As GPT's and CLIP's: the end of a word is marked."""
    pieces = ["<unk>", *WORDS, *(f"{word}</w>" for word in WORDS)]
    made = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], end_of_word_suffix="</w>"))
    made.decoder = decoders.BPEDecoder()
    return _fast(made)


def in_python() -> PreTrainedTokenizerBase:
    """One without a Rust part."""
    return ByT5Tokenizer()


class _Raises(PreTrainedTokenizerFast):
    """Decodes no id that is a multiple of 41, as tokenizers of a padded vocabulary do."""

    def decode(self, token_ids: list[int], **settings: object) -> str:
        if any(token % 41 == 40 for token in token_ids):
            raise IndexError("list index out of range")
        return str(super().decode(token_ids, **settings))


def raises() -> PreTrainedTokenizerBase:
    return _Raises(tokenizer_object=byte_level().backend_tokenizer, eos_token="</s>")


KINDS: dict[str, Callable[[], PreTrainedTokenizerBase]] = {
    made.__name__: made
    for made in (byte_level, straddling, byte_fallback, metaspace, word_piece, end_of_word, in_python, raises)
}

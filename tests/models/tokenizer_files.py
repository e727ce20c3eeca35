"""Random directories of a tokenizer: tokens named by any of its files, in every form, at odds with one another."""

import json
import random
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, WordLevel

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")
# No two are equal once a normalizer has been over them: which of those is found first is by chance.
CONTENTS = (
    "<|user|>",
    "<|Bot|>",
    "<end>",
    "<begin>",
    "<tool>",
    "word",
    "Wo",
    " pad ",
    "é<",
    "t h",
    "[X]",
    "the",
)


def backend(draw: random.Random) -> Tokenizer:
    """Words or bytes, with tokens of its own."""
    if draw.random() < 0.3:
        words = ["<unk>", "word", "the", "<", ">", "|", "user", "end", "x"]
        tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    else:
        ids = {byte: i for i, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
        tokenizer = Tokenizer(BPE(vocab=ids | {"Ġt": 256, "he": 257}, merges=[("Ġ", "t"), ("h", "e")]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
    if draw.random() < 0.4:
        tokenizer.normalizer = draw.choice([normalizers.Lowercase(), normalizers.NFKC(), normalizers.Strip()])
    for content in draw.sample(CONTENTS, draw.randrange(4)):
        tokenizer.add_tokens([AddedToken(content, **flags(draw))])
    return tokenizer


def flags(draw: random.Random) -> dict[str, bool]:
    return {flag: draw.random() < 0.4 for flag in FLAGS}


def token(draw: random.Random, *, mark: bool = False) -> str | dict[str, Any]:
    """A token as files spell it."""
    content = draw.choice(CONTENTS)
    if draw.random() < 0.6:
        return content
    found: dict[str, Any] = {"content": content, **flags(draw)}
    if draw.random() < 0.5:
        del found["special"]
    return found | {"__type": "AddedToken"} if mark else found


def settings(draw: random.Random, *, mark: bool) -> dict[str, Any]:
    """What tokenizer_config.json and special_tokens_map.json may both say. mark: as the first one has objects."""
    found: dict[str, Any] = {
        name: None if draw.random() < 0.1 else token(draw, mark=mark)
        for name in (*NAMED, "image_token", "user_token")
        if draw.random() < 0.25
    }
    if draw.random() < 0.4:
        strings = [draw.choice(CONTENTS) for _ in range(draw.randrange(4))]
        found["additional_special_tokens"] = [token(draw, mark=True) for _ in strings] if mark else strings
    if draw.random() < 0.4:
        many = [token(draw, mark=mark) for _ in range(draw.randrange(4))]
        by_name = {f"{draw.choice('abc')}_token": draw.choice(CONTENTS) for _ in range(draw.randrange(3))}
        found["extra_special_tokens"] = draw.choice([many, by_name])
    return found


def write_random(directory: Path, draw: random.Random) -> None:
    """The files of a tokenizer; which ones there are, and what they say, is drawn."""
    (directory / "tokenizer.json").write_text(backend(draw).to_str())
    if draw.random() < 0.85:
        config = settings(draw, mark=True)
        if draw.random() < 0.4:
            config["added_tokens_decoder"] = {
                str(draw.randrange(300)): {"content": draw.choice(CONTENTS), **flags(draw)}
                for _ in range(draw.randrange(5))
            }
        if draw.random() < 0.25:
            names = draw.sample(("image_token", "user_token", "tool", "eos_token"), draw.randrange(3))
            config["model_specific_special_tokens"] = {name: token(draw, mark=True) for name in names}
        for name in ("clean_up_tokenization_spaces", "split_special_tokens", "add_bos_token", "legacy"):
            if draw.random() < 0.15:
                config[name] = draw.random() < 0.5
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
    if draw.random() < 0.5:
        (directory / "special_tokens_map.json").write_text(json.dumps(settings(draw, mark=False)))
    if draw.random() < 0.4:
        added = {draw.choice(CONTENTS): draw.randrange(400) for _ in range(draw.randrange(4))}
        (directory / "added_tokens.json").write_text(json.dumps(added))


def random_text(draw: random.Random) -> str:
    pieces = [*CONTENTS, " ", "  ", "a", "WORD", " the", "\n", ",", " .", "é", "<|", "Ⅷ", "x"]
    return "".join(draw.choice(pieces) for _ in range(draw.randrange(12)))

"""Build the training text of the shipped model from Debian packages, then its tokenizer and token arrays.

    python corpus.py            # needs apt-get and dpkg, writes ../../.corpus/ (ignored by git)

Two sources, both named with their licences in README.md:

- `bible`: the King James Version, read through the `bible-kjv` program; one document per chapter.
- `python`, `tests`: the standard library of Python 3.11 and its test suite; one document per file.

Whole chapters and whole library files are held out, so that no held-out line sits beside a training line.
"""

from __future__ import annotations

import random
import re
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

CORPUS = Path(__file__).resolve().parents[2] / ".corpus"
PACKAGES = (
    "bible-kjv",
    "bible-kjv-text",
    "libpython3.11-minimal",
    "libpython3.11-stdlib",
    "libpython3.11-testsuite",
)
END_OF_TEXT = "<|endoftext|>"
VOCAB_SIZE = 3072
SEED = 0
HELD_OUT = 0.02

# What the demonstration prompts for must be learnt, so these chapters are never held out.
ALWAYS_TRAINED = ("Genesis 1", "Psalms 23", "John 1", "Ecclesiastes 3")

# Tables rather than programs: they would teach the model nothing but digits.
NOT_PROSE = re.compile(
    r"encodings/|lib2to3/tests/data|pydoc_data|_sysconfigdata|html/entities|/data/|bad_coding|badsyntax"
)
IS_TEST = re.compile(r"(^|/)(test|tests|idle_test)/")
MIN_CHARS, MAX_CHARS, MAX_DIGITS = 300, 300_000, 0.08

# Words with underscores stay whole (`__init__`), digits are single, an indent is one token apart from its newline, so
# that a prompt may end anywhere on a line.
SPLIT = r" ?[\p{L}_]+| ?\p{N}| ?[^\s\p{L}\p{N}_]+|\n+|[^\S\n]+"

Documents = dict[str, str]


def unpack(folder: Path) -> None:
    """Download the packages and unpack them under `folder`, without installing anything."""
    subprocess.run(["apt-get", "download", *PACKAGES], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    for archive in sorted(folder.glob("*.deb")):
        subprocess.run(["dpkg", "-x", archive.name, "."], cwd=folder, check=True)


def read_bible(root: Path) -> Documents:
    """Chapters by title (`Genesis 1`): the title, an empty line, one verse per line without its number."""
    printed = subprocess.run(
        [root / "usr/bin/bible"],
        input="gen1:1-rev22:21\n",
        capture_output=True,
        text=True,
        check=True,
        cwd=root / "usr/lib",  # the program looks for its compressed text in the current folder first
    ).stdout
    chapters: dict[str, list[str]] = {}
    verses: list[str] = []
    for line in printed.splitlines():
        if re.fullmatch(r"[1-3A-Z][A-Za-z ]* \d+", line):
            verses = chapters.setdefault(line, [])
        elif verse := re.fullmatch(r"  \d+ (.*)", line):
            verses.append(verse[1])
        elif line and verses and "bible(KJV)" not in line:
            verses[-1] += " " + line
    return {title: f"{title}\n\n" + "\n".join(lines) + "\n" for title, lines in chapters.items()}


def read_python(root: Path, tests: bool) -> Documents:
    """Source files by path, only the test suite or only the rest."""
    library = root / "usr/lib/python3.11"
    documents: Documents = {}
    for path in sorted(library.rglob("*.py")):
        name = path.relative_to(library).as_posix()
        if path.is_symlink() or NOT_PROSE.search(name) or bool(IS_TEST.search(name)) != tests:
            continue
        try:
            text = path.read_text("utf-8")
        except UnicodeDecodeError:
            continue
        digits = sum(c.isdigit() for c in text) / max(len(text), 1)
        if MIN_CHARS <= len(text) <= MAX_CHARS and digits <= MAX_DIGITS and text.isascii():
            documents[name] = text.expandtabs(4)
    return documents


def hold_out(documents: Documents, seed: int) -> tuple[Documents, Documents]:
    """Split into (training, held out) by whole documents until `HELD_OUT` of the characters are held out."""
    names = [n for n in documents if n not in ALWAYS_TRAINED and len(documents[n]) < 40_000]
    random.Random(seed).shuffle(names)
    wanted = HELD_OUT * sum(map(len, documents.values()))
    held: Documents = {}
    while sum(map(len, held.values())) < wanted:
        name = names.pop()
        held[name] = documents[name]
    return {n: t for n, t in documents.items() if n not in held}, held


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Byte-level BPE; the end-of-text token has id 0."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, documents: Documents, seed: int) -> np.ndarray:
    """All documents in one uint16 array, shuffled, each with an end-of-text token before it and after it."""
    names = sorted(documents)
    random.Random(seed).shuffle(names)
    ids = [0]
    for encoding in tokenizer.encode_batch_fast([documents[n] for n in names]):
        ids += [*encoding.ids, 0]
    return np.array(ids, dtype=np.uint16)


def main() -> None:
    CORPUS.mkdir(exist_ok=True)
    splits: dict[str, Documents] = {}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        unpack(root)
        splits["bible_train"], splits["bible_held"] = hold_out(read_bible(root), SEED)
        splits["python_train"], splits["python_held"] = hold_out(read_python(root, tests=False), SEED + 1)
        splits["tests_train"] = read_python(root, tests=True)

    # The merges are learnt on the two domains that the model is shown with, in about equal parts.
    tokenizer = train_tokenizer([*splits["bible_train"].values(), *splits["python_train"].values()])
    tokenizer.save(str(CORPUS / "tokenizer.json"))
    for name, documents in splits.items():
        (CORPUS / f"{name}.txt").write_text(
            f"\n{END_OF_TEXT}\n".join(documents[n] for n in sorted(documents))
        )
        ids = encode(tokenizer, documents, SEED)
        np.save(CORPUS / f"{name}.npy", ids)
        chars = sum(map(len, documents.values()))
        print(f"{name}: {len(documents)} documents, {chars:,} characters, {len(ids):,} tokens")
    (CORPUS / "held_out.txt").write_text("\n".join([*splits["bible_held"], *splits["python_held"]]) + "\n")


if __name__ == "__main__":
    main()

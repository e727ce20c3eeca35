"""The code blocks of README.md and docs/, and the test of each.

A fence names its language. `python` blocks of a page are one program, from top to bottom. A comment above a fence
marks a block that does not run eagerly on the CPU:

    <!-- test: compiled -->    through Dynamo and the passes, with `aot_eager` in Inductor's place
    <!-- test: gpu -->         on a GPU only, as it stands
    <!-- test: slow -->        with `make test-all` only, as it stands
    <!-- test: server -->      with `make test-server` only, against a server
    <!-- test: parallel -->    with `make test-parallel` only, in two processes
    <!-- test: ray -->         with `make test-ray` only, as it stands

`sh` blocks are commands, see `test_docs.py`. `text` blocks are what something prints.
"""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
LANGUAGES = ("python", "sh", "text")
MARKS = ("", "compiled", "gpu", "slow", "server", "parallel", "ray")
_FENCE = re.compile(
    r"^(?:<!-- test: (?P<mark>.*?) -->\n)?```(?P<language>.*)\n(?P<code>(?:.*\n)*?)```$", re.MULTILINE
)
_INCLUDE = re.compile(r"--8<--\n(.+)\n--8<--\n")


@dataclass(frozen=True)
class Block:
    """A fenced block.

    line: number of its first line of code, from 1.
    mark: one of `MARKS`.
    """

    page: Path
    line: int
    language: str
    mark: str
    code: str

    @property
    def included(self) -> str | None:
        """The file of the repository that the site shows in its place."""
        found = _INCLUDE.fullmatch(self.code)
        return found and found[1]

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def pages() -> list[Path]:
    """README.md and the pages of the site."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks_of(page: Path) -> list[Block]:
    """All blocks of a page. Raises ValueError for a block that no test would find or run."""
    text = page.read_text(encoding="utf-8")
    blocks = []
    for found in _FENCE.finditer(text):
        line = text.count("\n", 0, found.start("code")) + 1
        block = Block(page, line, found["language"], found["mark"] or "", found["code"])
        if block.language not in LANGUAGES or block.mark not in MARKS:
            raise ValueError(
                f"{block}: language {block.language!r}, mark {block.mark!r}: see tests/examples/pages.py"
            )
        blocks.append(block)
    if len(re.findall(r"^\s*(?:```|~~~)", text, re.MULTILINE)) != 2 * len(blocks):
        raise ValueError(f"{page.name}: a fence is indented, open or made of ~~~: nothing would run it")
    if text.count("<!-- test:") != sum(block.mark != "" for block in blocks):
        raise ValueError(f"{page.name}: a mark does not stand right above a fence")
    return blocks


def commands_of(block: Block) -> list[str]:
    """The commands of a `sh` block, continued lines joined."""
    return [line for line in block.code.replace("\\\n", " ").splitlines() if line.strip()]

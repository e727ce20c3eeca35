"""Figures are those of the committed results, lines are short, every public name is on the API pages."""

import random
import re
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import mla_compile
from benchmarks import tables
from mla_compile.cli.app import app
from mla_compile.integrations import transformers
from tests.examples.pages import ROOT


@pytest.mark.parametrize("page", tables.pages(), ids=lambda page: page.name)
def test_made_parts_are_those_of_the_committed_results(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert tables.fill(text) == text, "run `python -m benchmarks.tables`"
    assert text.count("<!-- filled:") == len(tables.PLACE.findall(text)), "a mark is broken"


def test_every_part_stands_on_a_page_and_the_readme_has_the_four_figures() -> None:
    readme, *docs = (page.read_text(encoding="utf-8") for page in tables.pages())
    placed = set(re.findall(r"<!-- filled: ([\w.]+) -->", readme + "".join(docs)))
    assert placed == tables.PARTS.keys()
    assert len(readme.splitlines()) <= 220
    rows = [line for line in tables.figures().splitlines() if line.startswith("| ")][2:]
    assert len(rows) == 4 and all(row in readme.splitlines()[:25] for row in rows)


def test_filling_changes_what_is_between_marks_and_nothing_else() -> None:
    rng = random.Random(0)
    for _ in range(200):
        before, after = "", ""
        for _ in range(rng.randrange(1, 6)):
            if rng.random() < 0.4:
                text = rng.choice(["a paragraph\n", "\n", "<!-- test: gpu -->\n", "```sh\nmake docs\n```\n"])
                before, after = before + text, after + text
            else:
                name, old = (
                    rng.choice("xy"),
                    rng.choice(["", "\n", "\nold\n\n", "\n| old |\n\n| lines |\n\n"]),
                )
                before += f"<!-- filled: {name} -->\n{old}<!-- /filled -->\n"
                after += f"<!-- filled: {name} -->\n\nnew {name}\n\n<!-- /filled -->\n"
        parts = {"x": lambda: "new x\n", "y": lambda: "\nnew y"}
        assert tables.fill(before, parts) == after == tables.fill(after, parts)


def test_a_result_that_changes_changes_the_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    row = tables.row_of("decode", case="16 heads, 1 x 65536, q_len 1")
    before = tables.figures()
    monkeypatch.setitem(row, "gluon", 40.0)
    assert "**40.0 us**" in tables.figures() and "**40.0 us**" not in before


def prose() -> list[Path]:
    """All Markdown of the repository."""
    folders = ("docs", "examples", "benchmarks", "mla_compile")
    return [*ROOT.glob("*.md"), *(page for folder in folders for page in (ROOT / folder).rglob("*.md"))]


@pytest.mark.parametrize("page", prose(), ids=lambda page: str(page.relative_to(ROOT)))
def test_lines_are_at_most_120_characters(page: Path) -> None:
    lines = enumerate(page.read_text(encoding="utf-8").splitlines(), 1)
    too_long = [n for n, line in lines if len(line) > 120 and not line.lstrip().startswith("|")]
    assert not too_long, f"wrap these lines: {too_long}"


NOT_OURS = {"assert_indirect_indexing", "auto_functionalized_v2"}
"""Names of torch that the pages for developers mention."""
SOURCES = ("mla_compile", "tests", "examples", "benchmarks", "docs")
NOTES = sorted(page for page in (ROOT / "mla_compile").rglob("README.md") if page.parent.name != "shipped")
"""What the design of each package rests on."""
GUIDES = [
    ROOT / "docs" / f"{name}.md" for name in ("architecture", "add-a-pass", "add-a-drafter", "add-a-backend")
]
GUIDES += [ROOT / "docs" / "add-a-family.md", *NOTES]


def test_the_map_is_read_in_five_minutes() -> None:
    assert len((ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").splitlines()) <= 200


@pytest.mark.parametrize("page", NOTES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_notes_lead_to_files(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8"))
    assert links and all((page.parent / link).exists() for link in links)


def quoted(page: Path) -> set[str]:
    """Text in backticks on a page, without code blocks."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    return set(re.findall(r"`([^`\n]+)`", text))


@pytest.mark.parametrize("page", [*tables.pages(), *NOTES], ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_a_page_names_are_there(page: Path) -> None:
    files = [str(file) for folder in SOURCES for file in (ROOT / folder, *(ROOT / folder).rglob("*"))]
    named = {name.rstrip("/") for name in quoted(page) if re.fullmatch(r"[a-z_\d./-]+(\.py|/)", name)}
    missing = {name for name in named if not any(file.endswith(f"/{name}") for file in files)}
    assert not missing - {"site"}, "the page names files that were moved"


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: str(page.relative_to(ROOT)))
def test_names_that_a_page_for_developers_mentions_are_in_the_code(page: Path) -> None:
    code = "\n".join(file.read_text(encoding="utf-8") for file in (ROOT / "mla_compile").rglob("*.py"))
    words = {*re.findall(r"\w+", code), *NOT_OURS}
    named = {name for name in quoted(page) if re.fullmatch(r"[A-Za-z_][\w.]*", name)}
    named = {name for name in named if not name.endswith((".py", ".md"))}
    gone = {name for name in named if not words.issuperset(name.split("."))}
    assert not gone, "the page mentions names that were changed"


TERMS = {
    "latent": r"latents",
    "draft": r"draft(?:s|ers?|ing)?",
    "capture": r"CUDA graphs?|captured|captures",
    "host": r"the host",
    "verify": r"verif(?:y|ies|ied|ication)",
    "absorbed": r"absorbed|absorbs",
    "decode-backend": r"decode backends?",
    "acceptance-length": r"acceptance length",
    "aux-hidden-states": r"aux hidden states",
    "batch-invariant": r"batch-invariant",
    "inactive-row": r"inactive rows?",
    "page": r"block tables?|dummy page",
    "prefix-cache": r"prefix cache",
}
"""Terms of art by their anchor in the glossary; those that are everyday words too (row, plan) are left out."""


def prose_of(page: Path) -> str:
    """A page without headings, code and generated parts."""
    text = page.read_text(encoding="utf-8")
    return re.sub(
        r"```.*?```|<!-- filled.*?/filled -->|^#.*?$|`[^`\n]*`", "", text, flags=re.DOTALL | re.MULTILINE
    )


@pytest.mark.parametrize(
    "page",
    [page for page in tables.pages()[1:] if page.stem not in ("api", "changelog", "glossary")],
    ids=lambda page: page.name,
)
def test_a_term_links_to_the_glossary_on_its_first_use(page: Path) -> None:
    text = prose_of(page)
    unlinked = re.sub(r"\[[^\]]*\]\([^)]*\)", lambda link: " " * len(link[0]), text)
    for anchor, words in TERMS.items():
        use = re.search(rf"\b(?:{words})\b", unlinked, re.IGNORECASE)
        link = text.find(f"](glossary.md#{anchor})")
        assert use is None or 0 <= link < use.start(), (
            f"{use[0]!r} comes before a link to glossary.md#{anchor}"
        )


def test_the_glossary_defines_every_term_that_pages_link_to() -> None:
    linked = {
        anchor for page in tables.pages() for anchor in re.findall(r"glossary\.md#([\w-]+)", page.read_text())
    }
    anchors = re.findall(r"\{ #([\w-]+) \}", (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8"))
    assert linked | TERMS.keys() <= set(anchors) and len(anchors) == len(set(anchors))


# --- the API pages


def test_every_public_name_and_command_has_its_place() -> None:
    api = re.findall(r"^::: (\S+)$", (ROOT / "docs" / "api.md").read_text(encoding="utf-8"), re.MULTILINE)
    public = {f"mla_compile.{name}" for name in mla_compile.__all__}
    public |= {f"{transformers.__name__}.{name}" for name in transformers.__all__}
    assert public <= set(api) and len(api) == len(set(api))
    commands = [command.callback for command in app.registered_commands]
    assert {f"help.{command.__name__}" for command in commands if command is not None} <= tables.PARTS.keys()


def test_lines_that_describe_attributes_are_a_list_on_the_api_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "griffe", SimpleNamespace(Extension=object, Object=object))
    render = runpy.run_path(str(ROOT / "docs" / "docstrings.py"))["render"]
    text = """Rows: of a batch.

max_pages, rows: how many, see: this
    page.
q_len: one

Args:
    a, b: two
        of them.
    c: one"""
    assert (
        render(text)
        == """Rows: of a batch.

- **`max_pages`**, **`rows`**: how many, see: this
    page.
- **`q_len`**: one

Args:
    a: two
        of them.
    b: two
        of them.
    c: one"""
    )

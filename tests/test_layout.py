"""The package's outside: what importing it costs, and which part may use which."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import mla_compile

PACKAGE = Path(mla_compile.__file__).parent

# Lower parts first. A part may import those of lower levels and its own level's.
LEVELS = [
    {"defaults", "errors", "registration", "torch_internals", "waits"},
    {"batch", "sampling_params"},
    {"ops"},
    {"packing"},
    {"passes"},
    {"backend"},
    {"models"},
    {"speculate"},
    {"engine", "explanation"},
    {"cli", "integrations"},
]
LEVEL_OF = {part: level for level, parts in enumerate(LEVELS) for part in parts}


def imported_parts(file: Path) -> set[str]:
    """The parts of the package, `ops` say, that a file imports, inside functions too."""
    package = ("mla_compile", *file.relative_to(PACKAGE).parent.parts)
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, *filter(None, [node.module])))
            names |= {f"{module}.{alias.name}" for alias in node.names}
    return {name.split(".")[1] for name in names if name.startswith("mla_compile.")}


def test_every_part_has_a_level_and_every_level_names_parts_that_exist() -> None:
    parts = {file.stem for file in PACKAGE.glob("*.py")} | {
        file.parent.name for file in PACKAGE.glob("*/*.py")
    }
    assert parts - {"__init__"} == LEVEL_OF.keys(), "list the part in LEVELS, or remove it there"


@pytest.mark.parametrize("part", [part for parts in LEVELS for part in sorted(parts)])
def test_a_part_imports_only_what_lies_below_it(part: str) -> None:
    files = [*PACKAGE.glob(f"{part}.py"), *(PACKAGE / part).rglob("*.py")]
    upward = {
        (str(file.relative_to(PACKAGE)), other)
        for file in files
        for other in imported_parts(file)
        if LEVEL_OF.get(other, len(LEVELS)) > LEVEL_OF[part]
    }
    assert not upward, f"move what is shared to a lower part: {sorted(upward)}"


def test_importing_the_package_does_not_import_transformers() -> None:
    code = "import sys, mla_compile; sys.exit('transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent, check=False)
    assert done.returncode == 0, "import transformers where a checkpoint is loaded, not at the top of a file"

"""What importing the package costs, and which part may import which."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import mla_compile
from mla_compile.ops.library import tables

PACKAGE = Path(mla_compile.__file__).parent

# Lower parts first. A part may import those of lower levels and its own level's.
LEVELS = [
    {"defaults", "ending", "errors", "hub", "latents", "progress", "suggest", "torch_internals"},
    {"batch", "caches", "ranks", "sampling_params"},
    {"ops"},
    {"check_batches", "packing"},
    {"passes", "repeated_layers"},
    {"backend"},
    {"models"},
    {"speculate"},
    {"engine", "engine_settings", "explanation"},
    {"serving"},
    {"cli", "integrations"},
    {"testing"},
]
LEVEL_OF = {part: level for level, parts in enumerate(LEVELS) for part in parts}


OPS_LEVELS = [
    {"device", "dtypes", "ordering", "paging", "adjacent", "dispatch", "gluon"},
    {"batch_invariant", "dependent_launch", "validate"},
    {"library"},
    {"materialize", "reductions", "collectives"},
    {"norm", "sampling"},
    {"linear"},
    {"attention", "experts"},
]
"""The same for the packages and modules of `ops`."""
OPS_LEVEL_OF = {part: level for level, parts in enumerate(OPS_LEVELS) for part in parts}


def module_of(file: Path) -> str:
    return ".".join(("mla_compile", *file.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(
        ".__init__"
    )


MODULES = {module_of(file): file for file in PACKAGE.rglob("*.py")}


def part_of(module: str) -> str:
    """`ops` for `mla_compile.ops.attention.append`; nothing for the package itself, which only has the version."""
    return module.partition(".")[2].partition(".")[0]


def imports_of(file: Path) -> set[str]:
    """The modules of the package that a file imports, also inside functions and for type checkers."""
    package = ("mla_compile", *file.relative_to(PACKAGE).parent.parts)
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, *filter(None, [node.module])))
            names |= {
                name if (name := f"{module}.{alias.name}") in MODULES else module for alias in node.names
            }
    return (names & MODULES.keys()) - {module_of(file)}


def ops_part_of(module: str) -> str:
    """`attention` for `mla_compile.ops.attention.append`; nothing for modules that are not in a part of `ops`."""
    return part_of(module.removeprefix("mla_compile.")) if module.startswith("mla_compile.ops.") else ""


IMPORTS = {module: imports_of(file) for module, file in MODULES.items()}


def behind(module: str) -> set[str]:
    """All modules that it imports, directly or not."""
    found: set[str] = set()
    pending = [module]
    while pending:
        new = IMPORTS[pending.pop()] - found
        found |= new
        pending += new
    return found


def test_every_part_has_a_level_and_every_level_names_parts_that_exist() -> None:
    parts = {file.stem for file in PACKAGE.glob("*.py")} | {
        file.parent.name for file in PACKAGE.glob("*/*.py")
    }
    assert parts - {"__init__"} == LEVEL_OF.keys(), "list the part in LEVELS, or remove it there"


@pytest.mark.parametrize("part", [part for parts in LEVELS for part in sorted(parts)])
def test_a_part_imports_only_what_lies_below_it(part: str) -> None:
    upward = {
        (module, other)
        for module, others in IMPORTS.items()
        for other in others
        if part_of(module) == part and part_of(other) and LEVEL_OF[part_of(other)] > LEVEL_OF[part]
    }
    assert not upward, f"move what is shared to a lower part: {sorted(upward)}"


def test_a_part_of_ops_imports_only_parts_of_lower_levels() -> None:
    parts = {ops_part_of(module) for module in MODULES} - {""}
    assert parts == OPS_LEVEL_OF.keys(), "list the part in OPS_LEVELS, or remove it there"
    upward = {
        (module, other)
        for module, others in IMPORTS.items()
        for other in others
        if (mine := ops_part_of(module)) and (theirs := ops_part_of(other)) and mine != theirs
        if OPS_LEVEL_OF[theirs] >= OPS_LEVEL_OF[mine]
    }
    assert not upward, f"move what is shared to a lower level: {sorted(upward)}"


def test_no_file_imports_itself_through_others() -> None:
    circle = {module for module in MODULES if module in behind(module)}
    assert not circle, f"import what is shared from a lower file, or pass it in: {sorted(circle)}"


MADE_OF_OTHERS = ("mla_compile.ops.linear.norm_linear", "mla_compile.ops.experts.norm_router")
"""Ops that call other ops where they have no kernel."""


def test_implementations_of_ops_import_no_other_implementation() -> None:
    """A kernel's folder counts as one. The plain torch implementation is in the op's file."""
    rows = [row.function.partition(":")[0] for table in tables.values() for row in table]
    owner_of = {}
    for module in rows:
        in_folder = Path(MODULES[module]).parents[1].name == "kernels"
        owner = module.rpartition(".")[0] if in_folder else module
        owner_of |= {other: owner for other in MODULES if other == owner or other.startswith(f"{owner}.")}
    assert len(set(owner_of.values())) == len({*rows}) > 10
    across = {
        (module, other)
        for module, owner in owner_of.items()
        for other in IMPORTS[module]
        if owner_of.get(other, owner) != owner and module not in MADE_OF_OTHERS
    }
    assert not across, (
        f"move what two share to a file of neither; an op made of others is in MADE_OF_OTHERS: {sorted(across)}"
    )


def test_importing_the_package_does_not_import_transformers() -> None:
    code = "import sys, mla_compile; sys.exit('transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent, check=False)
    assert done.returncode == 0, "import transformers where a checkpoint is loaded, not at the top of a file"

"""What importing the package loads, and that torch finds the backend by name."""

import ast
import copy
import inspect
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest

import mla_compile

ROOT = Path(mla_compile.__file__).parents[1]


def names_for_type_checkers() -> dict[str, set[str]]:
    """The names of the block for type checkers, by the module that they come from."""
    tree = ast.parse(inspect.getsource(mla_compile))
    (block,) = (
        node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    named: dict[str, set[str]] = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom) and node.module is not None
        assert all(alias.name == alias.asname for alias in node.names), "else it is no name of the package"
        part = node.module.removeprefix("mla_compile.")
        named.setdefault(part, set()).update(alias.name for alias in node.names)
    return named


def test_type_checkers_and_python_find_the_same_names_in_the_same_places():
    told = names_for_type_checkers()
    assert told == {part: set(names) for part, names in mla_compile._PARTS.items() if names}
    assert sorted(name for names in told.values() for name in names) == mla_compile.__all__
    for name in mla_compile.__all__:
        assert getattr(mla_compile, name) is getattr(
            sys.modules[f"mla_compile.{mla_compile._PART_OF[name]}"], name
        )


def test_the_package_looks_as_if_it_had_imported_everything():
    everything: dict[str, object] = {}
    exec("from mla_compile import *", everything)
    assert everything.keys() >= set(mla_compile.__all__)
    assert set(mla_compile.__all__) | {"errors", "engine", "__version__"} <= set(dir(mla_compile))
    assert mla_compile.errors.MLAError is mla_compile.MLAError
    assert not hasattr(mla_compile, "no_such_name")
    with pytest.raises(ImportError, match="cannot import name 'no_such_name'"):
        exec("from mla_compile import no_such_name")


def test_the_version_is_that_of_the_changelogs_top_section():
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    top = re.search(r"^## (\S+) - (unreleased|\d{4}-\d\d-\d\d)$", changelog, re.MULTILINE)
    assert top is not None and top[1] == mla_compile.__version__


def test_what_it_exports_can_be_pickled():
    for value in (
        mla_compile.SamplingParams(seed=3),
        mla_compile.Engine,
        mla_compile.generate,
    ):
        assert pickle.loads(pickle.dumps(value)) == value
    batch = mla_compile.MLABatch(mla_compile.DecodeSegment(None, None, None, page_size=4))
    assert pickle.loads(pickle.dumps(batch)).page_size == 4
    error = mla_compile.MLAError("rows", "at least 1", 0, "add one")
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert (str(again), again.name) == (str(error), "rows")


def run(code: str) -> str:
    """In a new process."""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_the_package_imports_nothing_heavy():
    code = "import sys, mla_compile\n"
    code += "print([name for name in ('torch', 'transformers', 'numpy', 'rich') if name in sys.modules])\n"
    code += "mla_compile.SamplingParams(), mla_compile.MLAError\nprint('torch' in sys.modules)"
    assert run(code) == "[]\nFalse\n"


@pytest.mark.long
def test_an_engine_that_compiles_nothing_does_not_wait_for_the_compiler_to_load() -> None:
    is_loaded = "print('torch._dynamo' in sys.modules)"
    if run(f"import sys\nfrom transformers import DeepseekV3Config\n{is_loaded}") == "True\n":
        pytest.skip("this version of transformers loads it with a config")
    code = "import sys, mla_compile\nmla_compile.generate(['In the'], compile=False, max_new_tokens=4)\n"
    assert run(code + is_loaded) == "False\n"


@pytest.mark.long
@pytest.mark.parametrize(
    "imports", ["import mla_compile, torch", "import torch; torch._dynamo.list_backends()"]
)
def test_torch_finds_the_backend_by_its_entry_point(imports: str) -> None:
    code = f"{imports}\nfrom torch._dynamo.backends.registry import lookup_backend\n"
    assert run(code + "print(lookup_backend('mla').__module__)") == "mla_compile.backend\n"


@pytest.mark.long
def test_ops_are_registered_at_once_where_torch_is_loaded():
    assert run("import torch, mla_compile; print(torch.ops.mla_compile.mla_decode.default)").startswith(
        "mla_compile."
    )

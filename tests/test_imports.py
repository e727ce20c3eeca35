"""What importing the package brings, and that the backend is known by name whatever was imported first."""

import ast
import copy
import inspect
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import mla_compile
from mla_compile.registration import GROUP, NAME, VALUE

ROOT = Path(mla_compile.__file__).parents[1]
BACKENDS = "from torch._dynamo.backends.registry import lookup_backend"


def names_for_type_checkers() -> dict[str, set[str]]:
    """Of the block that only they read: the names by the part that they come from."""
    tree = ast.parse(inspect.getsource(mla_compile))
    (block,) = (
        node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    return {
        node.module.removeprefix("mla_compile."): {alias.name for alias in node.names}
        for node in block.body
        if isinstance(node, ast.ImportFrom)
    }


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
    """In a new process that has no installed `mla_compile`, as from a source tree."""
    hidden = "import importlib.metadata as m; find = m.MetadataPathFinder.find_distributions\n"
    hidden += "only = lambda cls, context=m.DistributionFinder.Context(): "
    hidden += "(d for d in find(context) if 'mla_compile' not in str(getattr(d, '_path', '')))\n"
    hidden += "m.MetadataPathFinder.find_distributions = classmethod(only)\n"
    done = subprocess.run(
        [sys.executable, "-c", hidden + code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_the_package_imports_nothing_heavy():
    code = "import sys, mla_compile\n"
    code += "print([name for name in ('torch', 'transformers', 'numpy', 'rich') if name in sys.modules])\n"
    code += "mla_compile.SamplingParams(), mla_compile.MLAError\nprint('torch' in sys.modules)"
    assert run(code) == "[]\nFalse\n"


def test_the_entry_point_is_that_of_the_installed_package():
    text = (ROOT / "pyproject.toml").read_text()
    assert f'[project.entry-points.{GROUP}]\n{NAME} = "{VALUE}"' in text


def test_torch_will_find_an_entry_point_when_it_looks_for_backends():
    code = "import mla_compile, sys; from importlib.metadata import entry_points\n"
    code += f"print([point.value for point in entry_points(group={GROUP!r}) if point.name == {NAME!r}])\n"
    code += "print('torch' in sys.modules)"
    assert run(code) == f"['{VALUE}']\nFalse\n"


@pytest.mark.long
def test_torch_that_has_looked_already_is_told():
    code = f"{BACKENDS}, _BACKENDS\n_BACKENDS.pop('mla', None)\nimport sys, mla_compile\n"
    code += "print('mla_compile.backend' in sys.modules, lookup_backend('mla').__module__)"
    assert run(code) == "False mla_compile.backend\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    "imports",
    ["import mla_compile, torch", "import torch; torch._dynamo.list_backends(); import mla_compile"],
)
def test_compile_knows_the_backend_from_a_source_tree_in_any_order_of_imports(imports):
    code = f"{imports}\nprint(torch.compile(lambda x: x + 1, backend='mla')(torch.ones(2)).tolist())"
    assert run(code) == "[2.0, 2.0]\n"


@pytest.mark.long
def test_ops_are_registered_at_once_where_torch_is_loaded():
    assert run("import torch, mla_compile; print(torch.ops.mla_compile.mla_decode.default)").startswith(
        "mla_compile."
    )

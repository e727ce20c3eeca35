"""The tools of a release: the matrix of versions and the check of archives."""

import tarfile
import zipfile
from pathlib import Path

import pytest

from tests import matrix, release


def test_a_combination_of_the_matrix_replaces_its_own_pins_only() -> None:
    given = (Path(__file__).parents[1] / "constraints.txt").read_text().splitlines()
    made = matrix.constraints("2.11.0", "5.15.1").splitlines()
    assert {"torch==2.11.0", "transformers==5.15.1"} <= set(made)
    changed = {line.partition("==")[0] for line in set(given) - set(made)}
    assert changed == matrix.OWN_PINS, "a pin that is gone, or that no constraint has"


def test_an_outcome_is_pytests_closing_line_or_what_came_last() -> None:
    assert (
        matrix.outcome("x\n2 failed, 80 passed, 3 skipped, 1 warning in 9.1s")
        == "2 failed, 80 passed, 3 skipped"
    )
    assert matrix.outcome("ERROR: no such file") == "ERROR: no such file"
    assert matrix.outcome("") == "nothing printed"


@pytest.mark.skipif(not (release.ROOT / ".git").exists(), reason="git lists the package's files")
def test_an_archive_that_lacks_a_file_or_has_another_is_noticed(tmp_path: Path) -> None:
    wheel = tmp_path / "mla_compile.whl"
    with zipfile.ZipFile(wheel, "w") as opened:
        opened.writestr("mla_compile/__init__.py", "")
        opened.writestr("tests/test_x.py", "")
        opened.writestr("mla_compile/__pycache__/x.pyc", "")
    found = release.faults(wheel)
    assert "lacks mla_compile/py.typed" in found
    assert "lacks mla_compile/models/shipped/model-00001-of-00002.safetensors" in found
    assert "has tests/test_x.py" in found and "has mla_compile/__pycache__/x.pyc" in found
    assert "lacks mla_compile/__init__.py" not in found
    sdist = tmp_path / "mla_compile.tar.gz"
    (tmp_path / "x.so").write_bytes(b"")
    with tarfile.open(sdist, "w:gz") as opened:
        opened.add(tmp_path / "x.so", "mla_compile-0/build/x.so")
    assert "has build/x.so" in release.faults(sdist)

"""Which row of an op's table serves on one model of GPU, as it was measured there: `GPU.json` in this folder.

A line says of some calls of an op which row serves them. Calls of which no line speaks, or which its row does not take,
are left to the order and the limits of the op's own table. Nothing is timed while a model runs, so all processes choose
alike.

`mla-compile tune` writes such a file, and `MLA_COMPILE_TUNED=FILE` puts it in the place of the one in this folder. Only
ops choose by it, when they run: no pass asks, so no compiled graph, and nothing in a compile cache, depends on it.
"""

import functools
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mla_compile.errors import MLAError
from mla_compile.ops.implementations import Implementation, at_least, is_nvidia_gpu_here

VARIABLE = "MLA_COMPILE_TUNED"
TOKENS = "tokens"
"""The fact that is no fact of the weights."""
_MEND = "write it anew with `mla-compile tune`"


@dataclass(frozen=True)
class Tunable:
    """An op of which lines may speak: its rows, and the facts of its weights that a line may limit."""

    rows: tuple[Implementation, ...]
    weights: tuple[str, ...]


tunable: dict[str, Tunable] = {}
"""By the op's name; `define_op` puts them here."""


@dataclass(frozen=True)
class Line:
    """Calls of an op, batch-invariant ones or the others, of which all these facts are in these ranges, and their row.

    Where all rows of an op are batch-invariant, all of its calls are.
    """

    op: str
    batch_invariant: bool
    takes: Mapping[str, range]
    row: str


@dataclass(frozen=True)
class Tuned:
    """A table: where it is from, what it was measured on, and its lines. The first that speaks of a call counts."""

    file: str
    gpu: str
    versions: str
    lines: tuple[Line, ...]

    def row_of(self, op: str, batch_invariant: bool, facts: Mapping[str, object]) -> str | None:
        """The name of the row that serves a call; None where no line speaks of it."""
        for line in self.lines:
            if (line.op, line.batch_invariant) == (op, batch_invariant) and _are_in(facts, line.takes):
                return line.row
        return None

    def dump(self) -> str:
        """The file's text, a line for each line."""
        lines = [
            json.dumps(vars(line) | {"takes": {fact: _word(taken) for fact, taken in line.takes.items()}})
            for line in self.lines
        ]
        head = (
            f'{{\n  "gpu": {json.dumps(self.gpu)},\n  "versions": {json.dumps(self.versions)},\n  "lines": ['
        )
        return head + ",".join(f"\n    {line}" for line in lines) + "\n  ]\n}\n"


@functools.cache
def table_of(device: torch.device) -> Tuned | None:
    """The table for a device; None where there is none. It is read once.

    Raises:
        MLAError: a file that cannot be read, of another GPU, or a line in it that says what no table may say.
    """
    gpu, given = gpu_name(device), os.environ.get(VARIABLE)
    if gpu is None:
        return None
    file = Path(given) if given else Path(__file__).parent / file_name(gpu)
    if not given and not file.exists():
        return None
    table = read(file)
    if table.gpu != gpu:
        raise MLAError(f"{file}: gpu", f"the GPU of this machine, {gpu!r}", repr(table.gpu), _MEND)
    return table


def gpu_name(device: torch.device) -> str | None:
    """What the driver calls an NVIDIA GPU of this machine; None for other devices."""
    return torch.cuda.get_device_name(device) if is_nvidia_gpu_here(device) else None


def file_name(gpu: str) -> str:
    """What the table of a GPU is called."""
    return re.sub(r"[^a-z0-9]+", "_", gpu.lower()) + ".json"


def read(file: Path) -> Tuned:
    """The table in a file, checked.

    Raises:
        MLAError: a file that cannot be read, or a line in it that says what no table may say.
    """
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise MLAError(str(file), "a table that `mla-compile tune` wrote", error, _MEND) from error
    _check_keys(raw, {"gpu": str, "versions": str, "lines": list}, str(file))
    lines = tuple(_line(line, f"{file}: lines[{i}]") for i, line in enumerate(raw["lines"]))
    return Tuned(str(file), raw["gpu"], raw["versions"], lines)


def _line(raw: Any, name: str) -> Line:
    """A line, if the rows of its op may be exchanged so.

    A batch-invariant call has the same bits in every batch. Two rows that are so need not have each other's: which one
    serves may depend on the weights, never on the number of tokens.
    """
    _check_keys(raw, {"op": str, "batch_invariant": bool, "takes": dict, "row": str}, name)
    op, exact = tunable.get(raw["op"]), raw["batch_invariant"]
    if op is None:
        raise MLAError(f"{name}.op", "one of " + ", ".join(tunable), repr(raw["op"]), _MEND)
    if not exact and all(row.batch_invariant for row in op.rows):
        raise MLAError(f"{name}.batch_invariant", f"true, as all calls of {raw['op']} are so", "false", _MEND)
    rows = [row.name for row in op.rows if row.batch_invariant or not exact]
    if raw["row"] not in rows:
        which = "batch-invariant row" if exact else "row"
        raise MLAError(f"{name}.row", f"a {which} of {raw['op']}: {', '.join(rows)}", repr(raw["row"]), _MEND)
    facts = op.weights if exact else (*op.weights, TOKENS)
    for fact in raw["takes"]:
        if fact not in facts:
            what = "facts of the weights, as bits may not depend on the batch" if exact else "facts"
            raise MLAError(f"{name}.takes", f"{what}: {', '.join(facts)}", repr(fact), _MEND)
    takes = {fact: _range(x, f"{name}.takes[{fact!r}]") for fact, x in raw["takes"].items()}
    return Line(raw["op"], exact, takes, raw["row"])


def _check_keys(raw: Any, types: dict[str, type], name: str) -> None:
    if not isinstance(raw, dict) or raw.keys() != types.keys():
        got = ", ".join(map(repr, raw)) or "none" if isinstance(raw, dict) else type(raw).__name__
        raise MLAError(name, "an object with " + ", ".join(types), got, _MEND)
    for key, kind in types.items():
        if type(raw[key]) is not kind:
            raise MLAError(f"{name}.{key}", f"a {kind.__name__}", type(raw[key]).__name__, _MEND)


def _range(raw: Any, name: str) -> range:
    first, last = raw if isinstance(raw, list) and len(raw) == 2 else (raw, raw)
    if type(first) is int and first >= 1 and last is None:
        return at_least(first)
    if type(first) is int and type(last) is int and 1 <= first <= last:
        return range(first, last + 1)
    raise MLAError(name, "a size, or the least and the most, null for no limit", f"{raw!r:.80}", _MEND)


def _word(taken: range) -> int | list[int | None]:
    if taken == at_least(taken.start):
        return [taken.start, None]
    return taken[0] if len(taken) == 1 else [taken[0], taken[-1]]


def _are_in(facts: Mapping[str, object], takes: Mapping[str, range]) -> bool:
    """Whether sizes are in ranges; a symbolic one is not: to look would add a guard."""
    return all(type(facts.get(fact)) is int and facts[fact] in taken for fact, taken in takes.items())

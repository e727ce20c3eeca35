"""Dispatch of an op: a table of candidates, each with its constraints, and the choice among them.

Each op's file has its table, fastest first (decode's: `attention/decode_backends.py`). The last candidate, plain torch,
serves every call. If its bits depend on the batch, a slower one serves the calls that ask for `batch_invariant`.
To add a candidate, add an entry to the table and the function that it names. `mla-compile env --verbose` prints all
tables. `TORCH_LOGS="+mla_compile"` logs, for each kind of call, the chosen candidate and why faster ones were rejected.
"""

import functools
import importlib.util
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch

HALF = (torch.float16, torch.bfloat16)
FLOATS = (*HALF, torch.float32)
"""The dtypes that the Triton kernels take."""
ANY = range(2**63 - 1)
"""Every size."""
SOME = range(1, 2**63 - 1)
"""Every size but 0."""
UNIT = range(1, 2)
FLOAT8 = (8, 9)
"""The oldest NVIDIA GPU whose Triton converts float8_e4m3fn."""


def at_least(least: int) -> range:
    """Every size from `least` on."""
    return range(least, SOME.stop)


Allowed = range | tuple[object, ...]
"""The values of a fact that an implementation takes."""


@dataclass(frozen=True)
class Call:
    """What decides who can serve a call: the device and facts about the arguments, no value of a tensor.

    None, like a fact that is missing, stands for what is not known: a symbolic size, or everything but the device when
    only that is asked about.

    device_type: "cpu", "cuda", "hip" (an AMD GPU, which torch calls "cuda" too) or another one of torch's.
    capability: the compute capability of a CUDA device.
    captured: whether the call may be recorded in a CUDA graph, so that nothing may be read or computed on the host.
    facts: sizes, strides and dtypes, by the names that `Candidate.constraints` uses.
    batch_invariant: whether a token's bits may not depend on what is computed beside it, other tokens of its row among
        that.
    """

    device_type: str
    capability: tuple[int, int] | None = None
    captured: bool | None = None
    facts: Mapping[str, object] = field(default_factory=dict, hash=False)
    batch_invariant: bool = False


@dataclass(frozen=True)
class Candidate:
    """One way to compute an op.

    function: `module:function`, imported by the first call. It takes the arguments of the op by position, or
        the record that the op makes of them (`define_op`).
    device_types: those that it runs on; None for all.
    min_capability, max_capability: the oldest and the newest CUDA device.
    packages: Python packages that it needs, as they are imported.
    takes: what it takes of each fact that limits it.
    capturable: whether a call does no work on the host that depends on values.
    batch_invariant: whether a token gets the same bits in every call with the same keys, experts and weights, whatever
        is computed beside it.
    takes_flag: whether its function takes the op's argument `batch_invariant` too. It calls other ops, which are so
        where they are asked to be.
    """

    name: str
    description: str
    function: str
    device_types: tuple[str, ...] | None = None
    min_capability: tuple[int, int] = (0, 0)
    max_capability: tuple[int, int] | None = None
    packages: tuple[str, ...] = ()
    constraints: Mapping[str, Allowed] = field(default_factory=dict, hash=False)
    capturable: bool = True
    batch_invariant: bool = False
    accepts_flag: bool = False

    def why_not(self, call: Call) -> str | None:
        """The first reason why it cannot serve a call, with the values; None where it can."""
        reason = self.why_not_on(call.device_type, call.capability) or self.why_not_given(call.facts)
        if reason is None and call.batch_invariant and not self.batch_invariant:
            return "gives a token bits that depend on what is computed beside it"
        if reason is None and call.captured and not self.capturable:
            return "needs the host in every step, so it serves by name only, where no CUDA graph is captured"
        return reason

    def why_not_on(self, device_type: str, capability: tuple[int, int] | None) -> str | None:
        """The first reason why it cannot run on a device, a package that is broken among them."""
        if self.device_types is not None and device_type not in self.device_types:
            return f"runs on {' and '.join(self.device_types)}, got {device_type}"
        if capability is not None:
            newest = self.max_capability
            if capability < self.min_capability or (newest is not None and capability > newest):
                return f"runs on {self.architectures()}, got {_sm(capability)}"
        for package in self.packages:
            if not _installed(package):
                return f"needs the Python package {package}, which is not installed"
        return _import_error(self.function)

    def why_not_given(self, facts: Mapping[str, object]) -> str | None:
        """The first reason why it cannot serve arguments of which these are the facts."""
        for fact, taken in self.constraints.items():
            value = facts.get(fact)
            if value is not None and value not in taken:
                of = " of" if isinstance(taken, range) else ""
                return f"takes {fact}{of} {in_words(taken)}, got {_word(value)}"
        return None

    def architectures(self) -> str:
        """The GPUs it runs on, in words."""
        if self.max_capability == self.min_capability:
            return _sm(self.min_capability)
        newest = self.max_capability
        return f"{_sm(self.min_capability)} {'and newer' if newest is None else f'to {_sm(newest)}'}"

    def load(self) -> Callable[..., Any]:
        """The function, imported."""
        return (_on_its_device if "triton" in self.packages else _imported)(self.function)


def triton(
    description: str,
    function: str,
    *,
    constraints: Mapping[str, Allowed],
    name: str = "triton",
    min_capability: tuple[int, int] = (8, 0),
    batch_invariant: bool = False,
) -> Candidate:
    """A row for a function whose Triton kernels run on NVIDIA GPUs, from SM 80 unless they ask for more."""
    return Candidate(
        name,
        description,
        function,
        ("cuda",),
        min_capability=min_capability,
        packages=("triton",),
        constraints=constraints,
        batch_invariant=batch_invariant,
    )


def reference(function: str) -> Candidate:
    """The row of a table for a function in plain torch that serves every call, if its bits may depend on the batch."""
    return Candidate("reference", "plain torch, any device", function)


def by_token(function: str, name: str = "by_token") -> Candidate:
    """The row for a function in plain torch of which a token's bits depend on nothing but the token."""
    return Candidate(name, "plain torch, any device, each token by itself", function, batch_invariant=True)


def apart(function: str) -> Candidate:
    """The row for a function that does what an op does by several others, for every call."""
    return Candidate(
        "apart", "any device: one op after the other", function, batch_invariant=True, accepts_flag=True
    )


Row = TypeVar("Row", bound=Candidate, covariant=True)


@dataclass(frozen=True)
class Selection(Generic[Row]):
    """The implementation that serves a call, and why the faster ones do not: names with reasons."""

    chosen: Row
    rejected: tuple[tuple[str, str], ...] = ()

    def explain(self) -> str:
        """A line for each implementation that was looked at."""
        lines = [f"{name}: {reason}" for name, reason in self.rejected]
        return "\n".join([*lines, f"{self.chosen.name}: chosen ({self.chosen.description})"])


def select(table: tuple[Row, ...], call: Call) -> Selection[Row]:
    """The first row of a table that serves a call."""
    rejected: list[tuple[str, str]] = []
    for row in table:
        reason = row.why_not(call)
        if reason is None:
            return Selection(row, tuple(rejected))
        rejected.append((row.name, reason))
    raise AssertionError("some row of a table serves every call")


def first_serves(table: tuple[Candidate, ...], x: torch.Tensor, **facts: object) -> bool:
    """Whether the fastest row of a table runs where a tensor is, in its dtype, given more facts.

    A symbolic size is not known: to look for it among those that are taken would add guards.
    """
    assert facts.keys() <= table[0].constraints.keys(), (
        f"{table[0].function} takes {list(table[0].constraints)}, got {facts}"
    )
    known = {name: fact for name, fact in facts.items() if not isinstance(fact, torch.SymInt)}
    call = Call(*describe_device(x.device), facts={"dtype": x.dtype, **known})
    return select(table, call).chosen is table[0]


@functools.cache
def describe_device(device: torch.device) -> tuple[str, tuple[int, int] | None]:
    """`device_type` and `capability` of a `Call`."""
    if device.type != "cuda":
        return device.type, None
    return ("cuda", torch.cuda.get_device_capability(device)) if torch.version.hip is None else ("hip", None)


def is_nvidia_gpu_here(device: torch.device) -> bool:
    """Whether a device, that of a fake tensor perhaps, is an NVIDIA GPU of this machine."""
    return device.type == "cuda" and torch.cuda.is_available() and describe_device(device)[0] == "cuda"


@functools.cache
def _imported(function: str) -> Callable[..., Any]:
    found: Callable[..., Any] = pkgutil.resolve_name(function)
    return found


@functools.cache
def _on_its_device(function: str) -> Callable[..., Any]:
    """The function, called where its first tensor is: Triton launches on the current device."""
    found = _imported(function)

    def run(first: Any, *others: Any) -> Any:
        with torch.cuda.device_of(first if isinstance(first, torch.Tensor) else first[0]):
            return found(first, *others)

    return run


@functools.cache
def _import_error(function: str) -> str | None:
    try:
        _imported(function)
    except Exception as error:  # whatever a broken install raises
        return f"does not import: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return None


@functools.cache
def _installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # what it is a part of
        return False


def _sm(capability: tuple[int, int]) -> str:
    return f"SM {capability[0]}{capability[1]}"


def in_words(taken: Allowed) -> str:
    """The values that are taken: "16..512 by 16", "any", "float16, bfloat16"."""
    if not isinstance(taken, range):
        return ", ".join(map(_word, taken))
    if taken == ANY:
        return "any"
    if taken == at_least(taken.start):
        return f"{taken.start} or more"
    if len(taken) == 1:
        return str(taken[0])
    return f"{taken[0]}..{taken[-1]}" + (f" by {taken.step}" if taken.step > 1 else "")


def _word(value: object) -> str:
    return str(value).removeprefix("torch.")

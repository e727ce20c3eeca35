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
"""The dtypes that the Triton kernels support."""
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
"""The values of a fact that a candidate supports."""


@dataclass(frozen=True)
class Call:
    """The inputs of a choice among candidates: the device and facts about the arguments, no value of a tensor.

    None, like a missing fact, means unknown: a symbolic size, or everything but the device if the question is only
    about the device.

    device_type: "cpu", "cuda", "hip" (an AMD GPU, which torch calls "cuda" too) or another one of torch's.
    capability: the compute capability of a CUDA device.
    captured: whether the call may be recorded in a CUDA graph, so that nothing may be read or computed on the host.
    facts: sizes, strides and dtypes, by the names that `Candidate.constraints` uses.
    batch_invariant: whether a token's bits must not depend on the other new tokens of the batch, of any row.
    """

    device_type: str
    capability: tuple[int, int] | None = None
    captured: bool | None = None
    facts: Mapping[str, object] = field(default_factory=dict, hash=False)
    batch_invariant: bool = False


@dataclass(frozen=True)
class Candidate:
    """One implementation of an op.

    function: `module:function`, imported by the first call. It takes the arguments of the op by position, or
        the record that the op makes of them (`define_op`).
    device_types: the supported devices; None for all.
    min_capability, max_capability: the oldest and the newest supported CUDA device.
    packages: required Python packages, by the names that are imported.
    constraints: the supported values of each fact that is limited.
    capturable: whether a call does no work on the host that depends on values.
    batch_invariant: whether a token gets the same bits in every call with the same keys, experts and weights, whatever
        else is in the batch.
    accepts_flag: whether the function also takes the op's argument `batch_invariant`, to pass it to the ops it calls.
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
        """The first reason why it cannot serve a call, with the values; None if it can."""
        reason = self.why_not_on(call.device_type, call.capability) or self.why_not_given(call.facts)
        if reason is None and call.batch_invariant and not self.batch_invariant:
            return "is not batch-invariant: a token's bits depend on the rest of the batch"
        if reason is None and call.captured and not self.capturable:
            return "needs the host in every step, so it serves by name only, without CUDA graphs"
        return reason

    def why_not_on(self, device_type: str, capability: tuple[int, int] | None) -> str | None:
        """The first reason why it cannot run on a device; a package that fails to import is one."""
        if self.device_types is not None and device_type not in self.device_types:
            return f"runs on {' and '.join(self.device_types)}, not {device_type}"
        if capability is not None:
            newest = self.max_capability
            if capability < self.min_capability or (newest is not None and capability > newest):
                return f"runs on {self.architectures()}, not {_sm(capability)}"
        return self.why_not_installed()

    def why_not_installed(self) -> str | None:
        """The package that it lacks, or the error of its import."""
        for package in self.packages:
            if not _installed(package):
                return f"needs the Python package {package}, which is not installed"
        return _import_error(self.function)

    def why_not_given(self, facts: Mapping[str, object]) -> str | None:
        """The first reason why it cannot serve arguments with these facts."""
        for fact, allowed in self.constraints.items():
            value = facts.get(fact)
            if value is not None and value not in allowed:
                of = " of" if isinstance(allowed, range) else ""
                return f"supports {fact}{of} {in_words(allowed)}, not {_word(value)}"
        return None

    def architectures(self) -> str:
        """The supported GPUs, in words."""
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
    """A candidate whose Triton kernels run on NVIDIA GPUs, from SM 80 or `min_capability` on."""
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
    """A candidate in plain torch that serves every call whose bits may depend on the batch."""
    return Candidate("reference", "plain torch, any device", function)


def by_token(function: str, name: str = "by_token") -> Candidate:
    """A candidate in plain torch that computes each token by itself, so nothing else changes the token's bits."""
    return Candidate(name, "plain torch, any device, each token by itself", function, batch_invariant=True)


def unfused(function: str) -> Candidate:
    """A candidate that calls the ops that a fused op replaces, and serves every call."""
    return Candidate(
        "unfused", "any device: one op after the other", function, batch_invariant=True, accepts_flag=True
    )


AnyCandidate = TypeVar("AnyCandidate", bound=Candidate, covariant=True)


@dataclass(frozen=True)
class Selection(Generic[AnyCandidate]):
    """The candidate that serves a call, and the faster ones that do not: names with reasons."""

    chosen: AnyCandidate
    rejected: tuple[tuple[str, str], ...] = ()

    def explain(self) -> str:
        """A line for each candidate that was considered."""
        lines = [f"{name}: {reason}" for name, reason in self.rejected]
        return "\n".join([*lines, f"{self.chosen.name}: chosen ({self.chosen.description})"])


def select(table: tuple[AnyCandidate, ...], call: Call) -> Selection[AnyCandidate]:
    """The first candidate of a table that serves a call."""
    rejected: list[tuple[str, str]] = []
    for candidate in table:
        reason = candidate.why_not(call)
        if reason is None:
            return Selection(candidate, tuple(rejected))
        rejected.append((candidate.name, reason))
    raise AssertionError("some candidate of a table serves every call")


def first_serves(table: tuple[Candidate, ...], x: torch.Tensor, **facts: object) -> bool:
    """Whether the fastest candidate of a table serves a tensor's device and dtype, given more facts.

    A symbolic size counts as unknown: comparing it with a constraint would add guards.
    """
    assert facts.keys() <= table[0].constraints.keys(), (
        f"{table[0].function} is limited by {list(table[0].constraints)}, got {facts}"
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
    """Whether a device, perhaps a fake tensor's, is an NVIDIA GPU of this machine."""
    return device.type == "cuda" and torch.cuda.is_available() and describe_device(device)[0] == "cuda"


@functools.cache
def _imported(function: str) -> Callable[..., Any]:
    found: Callable[..., Any] = pkgutil.resolve_name(function)
    return found


@functools.cache
def _on_its_device(function: str) -> Callable[..., Any]:
    """The function, with its first tensor's device made current: Triton launches on the current device."""
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
    except ModuleNotFoundError:  # its parent package
        return False


def _sm(capability: tuple[int, int]) -> str:
    return f"SM {capability[0]}{capability[1]}"


def in_words(allowed: Allowed) -> str:
    """The supported values in words: "16..512 by 16", "any", "float16, bfloat16"."""
    if not isinstance(allowed, range):
        return ", ".join(map(_word, allowed))
    if allowed == ANY:
        return "any"
    if allowed == at_least(allowed.start):
        return f"{allowed.start} or more"
    if len(allowed) == 1:
        return str(allowed[0])
    return f"{allowed[0]}..{allowed[-1]}" + (f" by {allowed.step}" if allowed.step > 1 else "")


def _word(value: object) -> str:
    return str(value).removeprefix("torch.")

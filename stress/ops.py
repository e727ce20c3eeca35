"""Random calls of all ops: results against float64, invalid calls refused by name with nothing changed.

Sizes, dtypes, strides, page sizes and lengths from 0 are drawn, and memory that no row owns is NaN. In a third of the
cases one argument is then changed. Such a call is either refused, by an error that names an argument, or its result is
still that of the definition. One of the candidates that serve a call computes it, which is drawn.

A kernel compiles for a second on a GPU. So there `BLOCK` cases share, op by op, what it is compiled for, and what is
changed; each draws its own lengths, rows, values and candidate.
"""

import argparse
import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

import mla_compile.passes.pipeline  # noqa: F401 - it imports the ops that passes alone emit
from mla_compile import MLAError, mla_decode
from mla_compile.ops import library
from mla_compile.ops.attention.decode_backends import DECODE_BACKENDS, decode_call
from mla_compile.ops.attention.operands import DecodeOperands
from stress.runner import Case, Draw, command
from tests.kernel_cases import TOLERANCE
from tests.ops.random_calls import OPS, Args, Call, attention

DTYPES = [*TOLERANCE, torch.int32, torch.int64, torch.bool, torch.uint8]
BLOCK = 4000
CHANGES = 4
"""The changes of a block to one op's arguments."""
GAP = 512
"""Bytes between the memories of two arguments, which are aligned to as many: those that torch aligns to."""

UNCHECKED = ("top_k", "position", "seed")
"""Whose values the callers of an op check."""
UNBOUNDED = ("kv_cache", "index_cache", "block_table", "key_slots")
"""Whose sizes bound values that are read on a CPU only: with smaller ones a GPU would read past their ends."""


def changed(name: str, value: Any, draw: Draw, device: str) -> Any:
    """Another value for an argument; whether it is valid is open."""
    if not isinstance(value, Tensor):
        if value is None:
            return draw.choice((torch.zeros(2), 5, "x"))
        others: list[Any] = [None, "x", [1], 1 + 2j]
        if isinstance(value, int) and not isinstance(value, bool):
            others += [0, -1, value + 1, 2**12, 1.5]
        return draw.choice(others)
    dim = draw.randrange(max(1, value.dim()))
    kinds: list[Callable[[], Any]] = [
        lambda: value.to(draw.choice(DTYPES)),
        lambda: value[None],
        lambda: value.flatten(0, 1) if value.dim() > 1 else value.view(1, -1),
        lambda: value.to("meta"),
        lambda: None,
        lambda: value.tolist(),
        lambda: value.transpose(0, -1).contiguous().transpose(0, -1),
    ]
    if device == "cpu" or name not in UNBOUNDED:
        kinds += [
            lambda: value.narrow(dim, 0, max(0, value.shape[dim] - 1)),
            lambda: torch.cat([value, value], dim),
            lambda: value.narrow(dim, 0, 0),
        ]
    if (
        value.dtype in (torch.int32, torch.int64)
        and device == "cpu"
        and value.numel()
        and name not in UNCHECKED
    ):

        def other() -> Tensor:
            out = value.clone()
            out.view(-1)[draw.randrange(out.numel())] = draw.choice((-1, -5, 2**30))
            return out

        kinds += [other] * 5
    return draw.choice(kinds)()


class Memory:
    """The memory of a call's tensors in one piece, with NaN between them: two copies bring all to a GPU and back."""

    def __init__(self, args: Args) -> None:
        self.args = args
        self.tensors = {k: x for k, x in args.items() if isinstance(x, Tensor) and x.device.type != "meta"}
        pieces = {(piece := x.untyped_storage()).data_ptr(): piece for x in self.tensors.values()}
        self.starts, end = {}, GAP
        for key, piece in pieces.items():
            self.starts[key] = end
            end += -(-piece.nbytes() // GAP) * GAP + GAP
        self.bytes = torch.full((end,), 0xFF, dtype=torch.uint8)
        for key, piece in pieces.items():
            own = self.bytes[self.starts[key] :][: piece.nbytes()]
            own.copy_(torch.empty(0, dtype=torch.uint8).set_(piece))

    def view(self, memory: Tensor, name: str) -> Tensor:
        """An argument in a copy of this memory."""
        x = self.tensors[name]
        start = self.starts[x.untyped_storage().data_ptr()] // x.element_size() + x.storage_offset()
        return memory.view(x.dtype).as_strided(x.shape, x.stride(), start)

    def args_in(self, memory: Tensor) -> Args:
        return self.args | {name: self.view(memory, name) for name in self.tensors}

    def check_unchanged(self, after: Tensor, written: tuple[str, ...] = ()) -> None:
        kept = after.clone() if written else after
        for name in written:
            if name in self.tensors:
                self.view(kept, name).copy_(self.tensors[name])
        if not torch.equal(kept, self.bytes):
            changed = [
                name
                for name, x in self.tensors.items()
                if not torch.equal(
                    *(y.contiguous().view(-1).view(torch.uint8) for y in (self.view(kept, name), x))
                )
            ]
            raise AssertionError(f"{', '.join(changed) or 'memory outside the arguments'} has changed")


def is_named(error: BaseException, args: Args) -> bool:
    """Whether an error names an argument, in our form or in that of torch's schemas."""
    text = str(error)
    if isinstance(error, MLAError):
        word = re.split(r"\W", text)[0]
        return "\n" not in text and (word in args or word in ("batch", "row"))
    return isinstance(error, TypeError | RuntimeError) and any(f"argument '{name}'" in text for name in args)


def candidates(call: Call, args: Args) -> list[tuple[str, Any, Args]]:
    """What may run a valid call."""
    found: list[tuple[str, Any, Args]] = []
    if call.function is mla_decode:
        given = DecodeOperands(*(args[name] for name in DecodeOperands._fields))
        facts = decode_call(given, captured=False, batch_invariant=args["batch_invariant"])
        found = [(b.name, None, {"backend": b.name}) for b in DECODE_BACKENDS if b.why_not(facts) is None]
    elif table := library.tables.get(call.name):
        values = [args.get(name) for name in inspect.signature(call.function).parameters]
        facts = library.call_of(call.name, values)
        found = [(c.name, c, {}) for c in table if c.why_not(facts) is None]
    return found or [("", None, {})]


@contextmanager
def chosen(op: str, candidate: Any) -> Iterator[None]:
    """Calls of the op run this candidate; None leaves the choice."""
    serving = library.serving
    if candidate is not None:
        setattr(library, "serving", lambda name, args: candidate if name == op else serving(name, args))  # noqa: B010
    try:
        yield
    finally:
        setattr(library, "serving", serving)  # noqa: B010


def run(draw: Draw, device: str) -> str:
    makers = [make for make in OPS if device == "cpu" or make is not attention]
    make = draw.choice(makers)
    if device == "cuda":
        draw.share(BLOCK, make.__name__)
    call = make(draw, device)
    args, name = dict(call.args), None
    if draw.random() < 0.35:
        if device == "cuda":
            draw.share(BLOCK, f"{make.__name__} {draw.randrange(CHANGES)}")
        # The pass that adds shared experts checks their weights.
        name = draw.block.choice([key for key in args if not key.startswith("shared_")])
        args[name] = changed(name, args[name], draw.block, device)
    draw.note(
        lambda: " ".join(
            (call.name, *(f"{key}={shown(value)}" for key, value in args.items()), f"changed: {name}")
        )
    )
    memory = Memory(args)
    there = memory.bytes.to(device, copy=True)
    given, candidate = memory.args_in(there), None
    if name is None:
        label, candidate, more = draw.choice(candidates(call, given))
        draw.note("candidate", label)
        given |= more
    with chosen(call.name, candidate):
        return f"{call.name}, {compute(call, memory, there, given, name)}"


def compute(call: Call, memory: Memory, there: Tensor, given: Args, name: str | None) -> str:
    """Run and check a call with arguments in memory `there`; `name` of them was changed."""
    try:
        result = call.function(**given)
    except Exception as error:
        memory.check_unchanged(there.cpu())
        if name is None or not is_named(error, given):
            raise
        return "refused"
    after = there.cpu()
    memory.check_unchanged(after, call.mutates)
    if not any(isinstance(x, Tensor) and x.device.type == "meta" for x in given.values()):
        written = {key: memory.tensors[key].clone() for key in call.mutates if key in memory.tensors}
        call.check(memory.args | written, memory.args_in(after), tree_map_only(Tensor, Tensor.cpu, result))
    return "valid" if name is None else "changed and still valid"


def shown(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"{value!r:.60}"
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}{list(value.stride())}"


@cache
def case_on(device: str) -> Case:
    return lambda draw: run(draw, device)


def make(args: argparse.Namespace) -> Case:
    return case_on(args.device)


def main() -> None:
    command("ops", make, devices=("cpu", "cuda"))


if __name__ == "__main__":
    main()

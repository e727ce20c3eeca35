"""Random calls of all ops: results against float64, invalid calls refused by name with nothing changed.

Sizes, dtypes, strides, page sizes and lengths from 0 are drawn, and memory that no row owns is NaN. In a third of the
cases one argument is then changed. Such a call is either refused, by an error that names an argument, or its result is
still that of the definition. On a GPU every candidate that serves a call computes it, in few shapes, as each compiles.
"""

import argparse
import copy
import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

import mla_compile.passes.pipeline  # noqa: F401 - it imports the ops that passes alone emit
from mla_compile import MLAError, mla_decode
from mla_compile.ops import library
from mla_compile.ops.attention.decode_backends import DECODE_BACKENDS, decode_call
from mla_compile.ops.attention.operands import DecodeOperands
from stress.runner import Case, Draw, command
from tests.kernel_cases import TOLERANCE
from tests.ops.random_calls import OPS, Args, Call, attention

DTYPES = [*TOLERANCE, torch.int32, torch.int64, torch.bool, torch.uint8]


UNCHECKED = ("top_k", "position", "seed")
"""Whose values the callers of an op check."""
UNBOUNDED = ("kv_cache", "index_cache", "block_table", "key_slots")
"""Whose sizes bound values that are read on a CPU only: with smaller ones a GPU would read past their ends."""


def changed(name: str, value: Any, draw: Draw, device: str) -> Any:
    """Another value for an argument; whether it is valid is open."""
    if not isinstance(value, Tensor):
        if value is None:
            return draw.choice((torch.zeros(2, device=device), 5, "x"))
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


def storage(x: Tensor) -> Tensor:
    """A copy of all bytes that a tensor's memory has."""
    return torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage()).clone()


def outside(x: Tensor) -> Tensor:
    """The bytes of its memory that are not its own."""
    marks = torch.zeros(x.untyped_storage().nbytes() // x.element_size(), dtype=torch.bool, device=x.device)
    marks.as_strided(x.shape, x.stride(), x.storage_offset()).fill_(True)
    return storage(x)[~marks.repeat_interleave(x.element_size())]


def check_unchanged(before: dict[str, Tensor], args: Args, written: tuple[str, ...]) -> None:
    for name, bytes_before in before.items():
        if name not in written:
            assert torch.equal(bytes_before, storage(args[name])), f"{name} has changed"


def is_named(error: BaseException, args: Args) -> bool:
    """Whether an error names an argument, in our form or in that of torch's schemas."""
    text = str(error)
    if isinstance(error, MLAError):
        word = re.split(r"\W", text)[0]
        return "\n" not in text and (word in args or word in ("batch", "row"))
    return isinstance(error, TypeError | RuntimeError) and any(f"argument '{name}'" in text for name in args)


def candidates(call: Call, args: Args, device: str, draw: Draw) -> list[tuple[str, Any, Args]]:
    """What runs a valid call: on a GPU all candidates that serve it, on a CPU one of them."""
    found: list[tuple[str, Any, Args]] = []
    if call.function is mla_decode:
        given = DecodeOperands(*(args[name] for name in DecodeOperands._fields))
        facts = decode_call(given, captured=False, batch_invariant=args["batch_invariant"])
        found = [(b.name, None, {"backend": b.name}) for b in DECODE_BACKENDS if b.why_not(facts) is None]
    elif table := library.tables.get(call.name):
        values = [args.get(name) for name in inspect.signature(call.function).parameters]
        facts = library.call_of(call.name, values)
        found = [(c.name, c, {}) for c in table if c.why_not(facts) is None]
    found = found or [("", None, {})]
    return found if device == "cuda" else [draw.choice(found)]


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
    call = draw.choice(makers)(draw, device)
    args, name = dict(call.args), None
    if draw.random() < 0.35:
        # The pass that adds shared experts checks their weights.
        name = draw.choice([key for key in args if not key.startswith("shared_")])
        args[name] = changed(name, args[name], draw, device)
    draw.note(
        lambda: " ".join(
            (call.name, *(f"{key}={shown(value)}" for key, value in args.items()), f"changed: {name}")
        )
    )
    if name is None:
        for label, candidate, more in candidates(call, args, device, draw):
            draw.note("candidate", label)
            given = copy.deepcopy(args) | more if device == "cuda" else args | more
            with chosen(call.name, candidate):
                compute(call, given, name)
        return f"{call.name}, valid"
    return f"{call.name}, {compute(call, args, name)}"


def compute(call: Call, args: Args, name: str | None) -> str:
    """Run and check a call; `name` of its arguments was changed."""
    tensors = {key: x for key, x in args.items() if isinstance(x, Tensor) and x.device.type != "meta"}
    memory = {key: storage(x) for key, x in tensors.items()}
    before = args | {key: tensors[key].clone() for key in call.mutates if key in tensors}
    around = {key: outside(tensors[key]) for key in call.mutates if key in tensors}
    try:
        result = call.function(**args)
    except Exception as error:
        check_unchanged(memory, args, ())
        if name is None or not is_named(error, args):
            raise
        return "refused"
    check_unchanged(memory, args, call.mutates)
    for key, bytes_before in around.items():
        assert torch.equal(bytes_before, outside(args[key])), f"memory around {key} has changed"
    if not any(isinstance(x, Tensor) and x.device.type == "meta" for x in args.values()):
        call.check(before, args, result)
    return "changed and still valid"


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

"""Random modules through all passes, against the same module run eagerly, in float64.

A third of the cases are programs of 2 to 6 steps around calls of `mla_attention` (`tests/passes/random_programs.py`).
Half of these are the layers of a model, compiled once where `lower_layers_once` can. The other cases are MLA in plain
torch, which must be absorbed, or must not. The graph then runs op by op; Inductor compiles one program of 200, and the
layers of one model of 16, for three batches. Results, inputs and buffers are compared.
"""

import argparse
import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.exc import BackendCompilerFailed

from mla_compile.check_batches import checked, checks_of
from mla_compile.passes import PASSES, pipeline
from mla_compile.passes.make_batch_invariant import make_batch_invariant
from mla_compile.repeated_layers import lower_layers_once
from mla_compile.torch_internals import know_least_sizes
from stress.runner import Case, Draw, command
from tests.passes.capture import make_inputs, without_kernels
from tests.passes.random_programs import STEPS, Layers, Program
from tests.passes.test_absorb_random import CHANGES, Form
from tests.passes.test_absorb_random import check as check_form

torch._dynamo.config.recompile_limit = 64
WITHOUT_KERNELS = without_kernels(*PASSES)
"""All passes; they also act where the op that they insert has no kernel, as on a CPU."""


class Backend:
    """The passes, then "eager", which runs the graph's nodes, or "aot_eager", which checks aliasing and writes too.

    captured: that of `lower_layers_once`; None: without it.
    """

    def __init__(self, passes: Sequence[Any], lower: str, captured: bool | None = None) -> None:
        self.passes, self.lower, self.captured = passes, lower, captured
        self.is_whole = True

    def __call__(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        know_least_sizes(inputs)
        checks = checks_of(gm)
        gm = pipeline.run(gm, inputs, self.passes)
        lower = lookup_backend(self.lower)
        if self.captured is None:
            return checked(lower(gm, list(inputs)), checks)

        def counted(part: fx.GraphModule, examples: Sequence[Any], _: object) -> Callable[..., Any]:
            self.is_whole = part is gm
            return lower(part, list(examples))

        return checked(lower_layers_once(gm, inputs, {}, counted, self.captured), checks)


def drawn_batch(draw: Draw) -> dict[str, Any]:
    batch: dict[str, Any] = {}
    if draw.random() < 0.7:
        batch = {"rows": draw.randint(1, 4), "q_len": draw.randint(1, 3)}
        if draw.random() < 0.4:
            batch["q_lens"] = [draw.randint(0, batch["q_len"]) for _ in range(batch["rows"])]
    if not batch or draw.random() < 0.5:
        batch["chunks"] = tuple(draw.randint(1, 5) for _ in range(draw.randint(1, 3)))
    return batch


def lowered(draw: Draw) -> str:
    return draw.choices(("eager", "aot_eager"), (4, 1))[0]


def program(draw: Draw) -> str:
    kind = draw.choices(
        ("passes", "all passes", "batch-invariant", "inductor", "layers", "layers, inductor"),
        (20, 60, 18, 1, 94, 6),
    )[0]
    by_inductor = kind.endswith("inductor")
    # Sizes of batches have no values while torch traces, as those of `pack_batch`; not all steps allow that.
    unbacked = kind == "layers, inductor" and draw.random() < 0.7
    attends = [name for name in STEPS if name.startswith("attend")]
    others = [name for name in STEPS if name not in attends]
    count = draw.randint(2, 3 if kind == "layers, inductor" else 6)
    names = [draw.choice(attends if unbacked or draw.random() < 0.35 else others) for _ in range(count)]
    steps = [
        (name, draw.choice((-1, draw.randrange(9))), draw.choice((-1, draw.randrange(9)))) for name in names
    ]
    results = [-1, *(draw.randrange(9) for _ in range(draw.randrange(3)))]
    drawn = steps, results, draw.randint(1, 2), draw.randrange(100)
    batches = [drawn_batch(draw) for _ in range(3 if by_inductor else draw.choice((1, 1, 2)))]
    lower = lowered(draw)
    draw.note(kind, lower, *steps, "results", results, batches, "unbacked:", unbacked)
    backend: Any = Backend(WITHOUT_KERNELS if kind == "all passes" else PASSES, lower)
    model: nn.Module
    if not kind.startswith("layers"):
        model = Program(*drawn)
    else:
        count, shared = draw.randint(5, 6), draw.choice(("nothing", "nothing", "caches", "all"))
        model, captured = Layers(*drawn, count, shared), draw.random() < 0.5
        backend = Backend(
            draw.choice((PASSES, WITHOUT_KERNELS)), draw.choice(("eager", "aot_eager")), captured
        )
        draw.note(count, "layers, shared:", shared, "captured:", captured, backend.lower)
    if kind == "batch-invariant":
        backend = Backend([*WITHOUT_KERNELS, make_batch_invariant], lower)
    eager = copy.deepcopy(model)
    compiled = torch.compile(model, backend="mla" if by_inductor else backend, fullgraph=True)
    # Programs with a step in float32 agree to its precision.
    tolerance = 1e-5 if any("float32" in name for name in names) else 1e-9
    for sizes in batches:
        x, batch = make_inputs(**sizes, unbacked=unbacked)
        x, mine = x.double(), x.double()
        with torch.no_grad():
            expected = eager(x, batch)
            try:
                found = compiled(mine, batch)
            except BackendCompilerFailed as error:
                if kind == "batch-invariant" and str(error.inner_exception).startswith(
                    "batch_invariant: expected calls"
                ):
                    return "program, batch-invariant, refused by name"
                raise
        if kind.startswith("layers") and not all(value.isfinite().all() for value in expected):
            return "layers, overflown"
        for one, other in zip(
            (*found, mine, *model.buffers()), (*expected, x, *eager.buffers()), strict=True
        ):
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
    if kind == "layers":
        return f"layers, compiled {'whole' if backend.is_whole else 'once'}"
    return kind if kind == "layers, inductor" else f"program, {kind}"


def plain(draw: Draw) -> str:
    """MLA in plain torch, with a change that must not be absorbed in half of the cases."""

    def form() -> Form:
        return Form(
            attention=draw.choice(("sdpa", "matmul")),
            projection=draw.choice(("by head", "halves", "two weights")),
            join=draw.choice(("cat", "repeat", "copy")),
            rope_first=draw.random() < 0.5,
            batch=draw.randint(1, 2),
            q_len=draw.randint(1, 3),
            mask=draw.choice(("none", "bool", "float", "causal")),
            change=draw.choice((None, draw.choice(CHANGES))),
        )

    drawn = form()
    while not drawn.is_one():
        drawn = form()
    draw.note(drawn)
    check_form(drawn, lowered(draw))
    return "plain MLA, absorbed" if drawn.change is None else "plain MLA, left as it is"


def run(draw: Draw) -> str:
    torch._dynamo.reset()
    return program(draw) if draw.random() < 0.33 else plain(draw)


def make(_: argparse.Namespace) -> Case:
    return run


def main() -> None:
    command("passes", make)


if __name__ == "__main__":
    main()

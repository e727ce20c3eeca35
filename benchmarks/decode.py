"""Every decode backend, FlashInfer's fa3, FlashMLA and the floor, with the shapes of real models.

    python -m benchmarks.decode --output benchmarks/results/decode.json --plot docs/decode.png
    python -m benchmarks.decode --choice --output benchmarks/results/decode_choice.json

Each result is checked against float64 in the same run before it is timed. Times are of replayed CUDA graphs, in
microseconds, over copies of the inputs in turn, so that the cache holds no data that other layers of a model would
evict. The floor is the longer of two times: reading the latents once at the rate of a plain sum, and the products at
the rate of a large cuBLAS product, both measured in the same run.

fa3 (`pip install '.[flashinfer]'`) and FlashMLA (`pip install --no-deps sgl-flash-mla`) run if they are installed.
"FlashMLA" is its kernel alone, `flash_mla` the backend, which packs queries and unpacks results. Times exclude the plan
before each step: fa3's `plan` runs on the host and is reported separately, in wall time; FlashMLA's is a kernel, which
`--choice` times.
"""

import importlib.util
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from benchmarks.kernels import graph_us, relative_error
from benchmarks.reporting import add_row, command_parser, write_report
from mla_compile.ops.attention.decode import decode_torch
from mla_compile.ops.attention.decode_backends import (
    DECODE_BACKENDS,
    backend_named,
    decode_call,
    of_any_size,
)
from mla_compile.ops.attention.operands import DecodeOperands

RANK, ROPE = 512, 64
SCALE = (128 + ROPE) ** -0.5


@dataclass(frozen=True)
class Case:
    heads: int
    lengths: tuple[int, ...]
    q_len: int = 1
    page_size: int = 64
    name: str = ""

    def title(self) -> str:
        rows, longest = len(self.lengths), max(self.lengths)
        what = self.name or f"{rows} x {longest}"
        page = "" if self.page_size == 64 else f", page {self.page_size}"
        return f"{self.heads} heads, {what}, q_len {self.q_len}{page}"


def uniform(heads: int, rows: int, context: int, q_len: int, page_size: int = 64) -> Case:
    return Case(heads, (context,) * rows, q_len, page_size)


CASES = [
    *(
        uniform(16, rows, 4096, q_len)
        for rows, q_len in ((128, 1), (128, 4), (32, 1), (32, 4), (8, 1), (1, 1))
    ),
    uniform(16, 1, 65536, 1),
    *(uniform(20, rows, 4096, q_len) for rows in (1, 8, 32, 128) for q_len in (1, 4)),
    *(uniform(20, rows, 1024, 1) for rows in (1, 8, 32)),
    *(uniform(128, rows, 4096, q_len) for rows, q_len in ((128, 1), (128, 4), (32, 4), (8, 1))),
    uniform(128, 128, 1024, 1),
    uniform(128, 1, 65536, 4),
    Case(16, (65536, *(1024,) * 31), name="1 x 65536 and 31 x 1024"),
    Case(20, tuple(64 * 2 ** (i % 8) for i in range(64)), name="64 rows of 64 to 8192"),
    *(uniform(16, 128, 4096, 1, page_size) for page_size in (1, 16)),
]
CHOICE = [
    *(
        uniform(20, rows, context, q_len)
        for context in (1024, 4096)
        for q_len in (1, 4)
        for rows in (1, 8, 32, 64, 128, 256)
    ),
    *(uniform(16, rows, 4096, q_len) for rows, q_len in ((32, 1), (32, 4), (128, 1), (128, 4))),
    *(uniform(64, rows, 4096, q_len) for rows, q_len in ((8, 1), (32, 1), (32, 4))),
    *(uniform(128, rows, 4096, q_len) for rows, q_len in ((1, 1), (8, 1), (32, 4), (128, 1), (128, 4))),
    *(uniform(heads, 1, 65536, q_len) for heads, q_len in ((16, 1), (20, 4), (128, 1), (128, 4))),
    Case(20, tuple(64 * 2 ** (i % 8) for i in range(64)), 4, name="64 rows of 64 to 8192"),
]
"""Cases about the border between `gluon` and FlashMLA."""
_SECONDS = 0.05
"""How long a time of these is measured."""


def inputs(case: Case, copies: int) -> Iterator[tuple[Any, ...]]:
    """Positional arguments of `mla_decode`'s op, with pages in random order."""
    rows, page = len(case.lengths), case.page_size
    pages = torch.tensor([-(-length // page) for length in case.lengths])
    columns = int(pages.max())
    for _ in range(copies):
        order = torch.randperm(int(pages.sum()), dtype=torch.int32).split(pages.tolist())
        table = torch.nn.utils.rnn.pad_sequence(list(order), batch_first=True)[:, :columns].cuda()
        cache, q_latent, q_pe = (
            torch.randn(shape, device="cuda", dtype=torch.bfloat16)
            for shape in (
                (int(pages.sum()), page, RANK + ROPE),
                (rows * case.q_len, case.heads, RANK),
                (rows * case.q_len, case.heads, ROPE),
            )
        )
        lengths = torch.tensor(case.lengths, dtype=torch.int32, device="cuda")
        yield q_latent, q_pe, cache, table, lengths, None, case.q_len, SCALE


def expected(args: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    """out and lse in float64, row by row."""
    q_latent, q_pe, cache, table, lengths, _, q_len, scale = args
    rows = []
    for row in range(len(lengths)):
        tokens = slice(row * q_len, (row + 1) * q_len)
        used = table[row, : -(-int(lengths[row]) // cache.shape[1])]
        own = torch.arange(len(used), dtype=torch.int32, device="cuda")[None]
        rows.append(
            decode_torch(
                DecodeOperands(
                    q_latent[tokens].double(),
                    q_pe[tokens].double(),
                    cache[used].double(),
                    own,
                    lengths[row : row + 1],
                    None,
                    q_len,
                    scale,
                )
            )
        )
    return torch.cat([out for out, _ in rows]), torch.cat([lse for _, lse in rows])


Run = Callable[[], tuple[Tensor, Tensor | None]]
"""A call whose launches are captured: out as `mla_decode` gives it, and lse where it has the same meaning."""


def ours(args: tuple[Any, ...]) -> Iterator[tuple[str, Run]]:
    operands = DecodeOperands(*args)
    call = of_any_size(decode_call(operands, captured=True))
    for backend in DECODE_BACKENDS:
        if backend.why_not(call) is None and backend.packages:
            plan = backend.plan(operands, 0) if backend.planner else None
            yield backend.name, partial(backend.run, operands, plan)


class Fa3:
    """FlashInfer's Hopper kernels, planned once."""

    plan_us: ClassVar[list[float]] = []
    """Wall times of all plans so far."""

    def __init__(self, args: tuple[Any, ...]) -> None:
        from flashinfer.mla import BatchMLAPagedAttentionWrapper

        q_latent, q_pe, cache, table, lengths, _, q_len, scale = args
        pages = (lengths.cpu() + cache.shape[1] - 1) // cache.shape[1]
        used = torch.arange(table.shape[1]) < pages[:, None]
        workspace = torch.empty(128 * 2**20, dtype=torch.int8, device="cuda")
        self.wrapper = BatchMLAPagedAttentionWrapper(workspace, backend="fa3")
        self.args = q_latent, q_pe, cache[..., :RANK], cache[..., RANK:]
        plan = (
            torch.arange(len(lengths) + 1, dtype=torch.int32) * q_len,
            torch.nn.functional.pad(pages.cumsum(0), (1, 0)).int(),
            table[used.cuda()],
            lengths.cpu(),
            q_latent.shape[1],
            RANK,
            ROPE,
            cache.shape[1],
            q_len > 1,
            scale,
            torch.bfloat16,
            torch.bfloat16,
        )
        for _ in range(5):
            torch.cuda.synchronize()
            start = time.perf_counter()
            self.wrapper.plan(*plan)
            self.plan_us.append((time.perf_counter() - start) * 1e6)

    def __call__(self) -> tuple[Tensor, None]:
        return self.wrapper.run(*self.args), None


class FlashMLA:
    """FlashMLA's dense decode kernel, with metadata computed once."""

    def __init__(self, args: tuple[Any, ...]) -> None:
        from flash_mla import get_mla_metadata

        q_latent, q_pe, self.cache, self.table, self.lengths, _, q_len, _ = args
        heads = q_latent.shape[1]
        self.q = torch.cat([q_latent, q_pe], -1).view(-1, q_len, heads, RANK + ROPE)
        self.metadata = get_mla_metadata()[0]

    def __call__(self) -> tuple[Tensor, None]:
        from flash_mla import flash_mla_with_kvcache

        out, _ = flash_mla_with_kvcache(
            self.q,
            self.cache[:, :, None],
            self.table,
            self.lengths,
            RANK,
            self.metadata,
            softmax_scale=SCALE,
            causal=True,
            use_legacy=True,
        )
        return out.flatten(0, 1), None


def peers(case: Case, args: tuple[Any, ...]) -> Iterator[tuple[str, Run]]:
    # fa3's causal mask is wrong where its tile of 64 queries splits a token's heads.
    if importlib.util.find_spec("flashinfer") and (case.q_len == 1 or 64 % case.heads in (0, 64)):
        yield "fa3", Fa3(args)
    if importlib.util.find_spec("flash_mla") and case.page_size == 64:
        yield "FlashMLA", FlashMLA(args)


def read_rate() -> float:
    """Bytes per microsecond that a maximum over 4 GiB reads."""
    data = torch.ones(2**29, dtype=torch.int64, device="cuda")
    return data.numel() * 8 / graph_us([data.amax], 0.1)


def product_rate() -> float:
    """FLOPs per microsecond that an 8192 x 8192 x 8192 bfloat16 product sustains."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / graph_us([lambda: a @ b], 0.5)


def measure(
    case: Case,
    bytes_per_us: float,
    flops_per_us: float,
    names: tuple[str, ...] | None = None,
    seconds: float = 0.2,
) -> dict[str, Any]:
    """The floor, and times of the kernels with these names, by default of all."""
    tokens = sum(case.lengths)
    bytes_read = tokens * (RANK + ROPE) * 2
    flops = 2 * case.heads * case.q_len * tokens * (2 * RANK + ROPE)
    row: dict[str, Any] = {
        "case": case.title(),
        "floor": max(bytes_read / bytes_per_us, flops / flops_per_us),
    }
    copies = list(inputs(case, max(2, min(16, int(2e8 / bytes_read)))))
    want_out, want_lse = expected(copies[0])
    calls = [dict((*ours(args), *peers(case, args))) for args in copies]
    for name in names or calls[0]:
        out, lse = calls[0][name]()
        error = relative_error(out, want_out)
        assert error < 2e-2, f"{name}: {case.title()}: error {error}"
        assert lse is None or (lse - want_lse).abs().max() < 1e-2, f"{name}: {case.title()}: lse"
        row[name] = graph_us([of_copy[name] for of_copy in calls], seconds)
    return row


def choice(output: Path | None) -> None:
    """Microseconds of `CHOICE`, and of FlashMLA's plan for all layers of a step."""
    names = ("gluon", "flash_mla", "triton", "FlashMLA")
    report: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": []}
    for case in CHOICE:
        operands = DecodeOperands(*next(inputs(case, 1)))
        plan_us = graph_us([partial(backend_named("flash_mla").plan, operands, 0)] * 8, _SECONDS)
        row = measure(case, 1e9, 1e9, names, _SECONDS)
        times = {name: round(row[name], 1) for name in names}
        sizes = {"case": case.title(), "queries": case.heads * len(operands.q_latent)}
        add_row(report, {**sizes, **times, "plan": round(plan_us, 1)}, output)
        torch.cuda.empty_cache()


def plot(report: dict[str, Any], path: Path) -> None:
    import matplotlib.pyplot as plt

    rows = report["rows"]
    names = [name for name in ("triton", "fa3", "FlashMLA", "gluon") if any(name in row for row in rows)]
    figure, axes = plt.subplots(figsize=(9, 0.32 * len(rows) + 1))
    for offset, name in enumerate(names):
        has = [(i, row[name] / row["floor"]) for i, row in enumerate(rows) if name in row]
        height = 0.8 / len(names)
        axes.barh(
            [i + (offset + 0.5) * height - 0.4 for i, _ in has], [x for _, x in has], height, label=name
        )
    axes.set_yticks(range(len(rows)), [row["case"] for row in rows], fontsize=7)
    axes.invert_yaxis()
    axes.set_xscale("log", base=2)
    axes.set_xlabel("time / floor")
    axes.axvline(1, color="black", linewidth=0.8)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = command_parser(__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument(
        "--choice", action="store_true", help="time only the backends that FlashMLA is chosen among"
    )
    args = parser.parse_args()
    torch.manual_seed(0)
    if args.choice:
        choice(args.output)
        return
    rates = read_rate(), product_rate()
    report: dict[str, Any] = {
        "machine": {
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
        },
        "read_TB_per_s": round(rates[0] / 1e6, 2),
        "product_TFLOP_per_s": round(rates[1] / 1e6),
        "rows": [],
    }
    print(json.dumps(report), flush=True)
    for case in CASES:
        row = {k: v if k == "case" else round(v, 1) for k, v in measure(case, *rates).items()}
        add_row(report, row, args.output)
        torch.cuda.empty_cache()
    gains = [
        min(row[peer] for peer in ("fa3", "FlashMLA") if peer in row) / row["gluon"]
        for row in report["rows"]
        if "gluon" in row and row.keys() & {"fa3", "FlashMLA"}
    ]
    if gains:
        report["geometric_mean_over_the_faster_peer"] = round(
            math.exp(statistics.fmean(map(math.log, gains))), 3
        )
    if Fa3.plan_us:
        report["fa3_plan_us"] = round(statistics.median(Fa3.plan_us))
    print(json.dumps({k: v for k, v in report.items() if k not in ("rows", "machine")}), flush=True)
    write_report(report, args.output)
    if args.plot:
        plot(report, args.plot)


if __name__ == "__main__":
    main()

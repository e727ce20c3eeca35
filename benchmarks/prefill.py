"""Prefill attention with the shapes of real models, and torch's own.

    python -m benchmarks.prefill --output benchmarks/results/prefill.json

Each result is checked against float64 in the same run before it is timed. Times are of replayed CUDA graphs, medians,
in microseconds, over copies of the inputs in turn. The times include all work of `mla_prefill`: gathering the latents
of all keys, expanding them, attention, or absorbed attention over the latents. The floor is the smaller number of flops
of the two forms, at the rate that a large cuBLAS product sustains in the same run, or the time to read latents and
weights if that is longer. `sdpa` is torch's own attention on chunks of equal length without cached tokens, with queries
and keys concatenated and expanded before; `sdpa_expanded` includes the expansion.
"""

import json
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.decode import product_rate
from benchmarks.kernels import BYTES_PER_US, relative_error
from benchmarks.reporting import add_row, command_parser
from mla_compile import prefill_segment
from mla_compile.ops.attention.kernels.keys import expanded_keys
from mla_compile.ops.attention.operands import PrefillOperands
from mla_compile.ops.attention.prefill import PREFILL, prefill_torch
from mla_compile.ops.dispatch import Call, describe_device

RANK, ROPE, PAGE = 512, 64, 64
MODELS = {"V3, 16 heads": (16, 128, 128), "V3, 128 heads": (128, 128, 128), "GLM": (20, 192, 256)}
# Above: heads, qk_nope_head_dim, v_head_dim; below: rows, new tokens and cached tokens of each.
CHUNKS = [(1, 4096, 0), (8, 1024, 0), (1, 256, 0), (4, 512, 4096), (1, 512, 16384)]
SHORT_EXTENDS = [(1, 16, 8192), (4, 32, 4096)]
REPLAYS = 30


def inputs(model: str, rows: int, new: int, cached: int) -> tuple[Any, ...]:
    """Positional arguments of `mla_prefill`'s op, with pages in random order."""
    heads, nope, v = MODELS[model]
    columns = -(-(new + cached) // PAGE)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    table = torch.randperm(rows * columns, device="cuda").int().view(rows, columns)
    segment, _ = prefill_segment([new] * rows, [cached] * rows, table, page_size=PAGE)
    return (
        randn(rows * new, heads, nope + ROPE),
        randn(rows * columns, PAGE, RANK + ROPE),
        randn(heads, nope, RANK) * RANK**-0.5,
        randn(heads, RANK, v) * RANK**-0.5,
        segment.cu_seqlens_q,
        segment.cu_seqlens_k,
        segment.key_slots,
        (nope + ROPE) ** -0.5,
    )


def calls_of(args: tuple[Any, ...], rows: int, cached: int) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    here = Call(*describe_device(torch.device("cuda")))
    for row in PREFILL:
        if row.name not in ("reference", "by_token") and row.why_not(here) is None:
            yield row.name, partial(row.load(), PrefillOperands(*args))
    if cached:
        return
    q, kv_cache, w_uk, w_uv, _, cu_seqlens_k, key_slots, scale = args

    def attend(key: Tensor, value: Tensor) -> Tensor:
        by_row = (x.unflatten(0, (rows, -1)).transpose(1, 2) for x in (q, key, value))
        out = scaled_dot_product_attention(*by_row, is_causal=True, scale=scale)
        return out.transpose(1, 2).flatten(0, 1)

    before = expanded_keys(kv_cache, key_slots[0], cu_seqlens_k[0], w_uk, w_uv)[:2]
    yield "sdpa", lambda: attend(*before)
    yield (
        "sdpa_expanded",
        lambda: attend(*expanded_keys(kv_cache, key_slots[0], cu_seqlens_k[0], w_uk, w_uv)[:2]),
    )


def median_us(calls: list[Callable[[], Tensor]]) -> float:
    graphs, times = [], []
    for call in calls:
        call()
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            call()
    for i in range(REPLAYS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graphs[i % len(graphs)].replay()
        end.record()
        times.append((begin, end))
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) * 1e3 for begin, end in times)


def floor_us(model: str, rows: int, new: int, cached: int, flops_per_us: float) -> float:
    heads, nope, v = MODELS[model]
    tokens, keys = rows * new, rows * (cached + new)
    pairs = rows * (new * cached + new * (new + 1) // 2)
    expanded = 2 * heads * (pairs * (nope + ROPE + v) + keys * RANK * (nope + v))
    absorbed = 2 * heads * (pairs * (2 * RANK + ROPE) + tokens * RANK * (nope + v))
    read = 2 * (keys * (RANK + ROPE) + heads * RANK * (nope + v))
    return max(min(expanded, absorbed) / flops_per_us, read / BYTES_PER_US)


def measure(model: str, rows: int, new: int, cached: int, flops_per_us: float) -> dict[str, Any]:
    title = f"{model}: {rows} x {new} after {cached}"
    row: dict[str, Any] = {"case": title, "floor": round(floor_us(model, rows, new, cached, flops_per_us), 1)}
    copies = [inputs(model, rows, new, cached) for _ in range(3)]
    wide = (x.double() if torch.is_tensor(x) and x.is_floating_point() else x for x in copies[0])
    want = prefill_torch(PrefillOperands(*wide))
    calls = [dict(calls_of(args, rows, cached)) for args in copies]
    for name in calls[0]:
        error = relative_error(calls[0][name](), want)
        assert error < 2e-2, f"{name}: {title}: error {error}"
        row[name] = round(median_us([of_copy[name] for of_copy in calls]), 1)
    return row


def main() -> None:
    parser = command_parser(__doc__)
    parser.add_argument("--output", type=Path)
    output = parser.parse_args().output
    torch.manual_seed(0)
    rate = product_rate()
    machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda}
    try:
        machine["flash-attn-4"] = version("flash-attn-4")
    except PackageNotFoundError:
        print("flash-attn-4 is not installed: pip install '.[flash-attn]'")
    report: dict[str, Any] = {"machine": machine, "product_TFLOP_per_s": round(rate / 1e6), "rows": []}
    print(json.dumps(report))
    for model, case in product(MODELS, CHUNKS + SHORT_EXTENDS):
        add_row(report, measure(model, *case, rate), output)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

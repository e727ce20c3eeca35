"""Prefill attention over the shapes of real models, beside torch's own.

    python -m benchmarks.prefill --output benchmarks/results/prefill.json

Each result is checked against float64 in the same run before it is timed. Times are medians of eager calls, in
microseconds, over copies of the inputs in turn. The floor is the products, with those that expand the context, at the
rate that a large cuBLAS product sustains, measured in the same run. `sdpa` is torch's own where it serves, on chunks of
one length without context; `sdpa_joined` includes putting its queries and keys together, which `mla_prefill` is spared.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from itertools import cycle, pairwise, product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.decode import product_rate
from benchmarks.kernels import relative_error
from benchmarks.reporting import add_row
from mla_compile.ops.kernels.prefill import prefill_triton
from mla_compile.ops.prefill import prefill_torch

RANK, ROPE, PAGE = 512, 64, 64
MODELS = {"V3, 16 heads": (16, 128, 128), "V3, 128 heads": (128, 128, 128), "GLM": (20, 192, 256)}
# Above: heads, qk_nope_head_dim, v_head_dim; below: rows, new tokens and cached tokens of each.
CASES = [(1, 4096, 0), (8, 1024, 0), (4, 512, 4096), (1, 512, 16384)]
CALLS = 30


def inputs(model: str, rows: int, new: int, cached: int) -> tuple[Any, ...]:
    """Positional arguments of `mla_prefill`'s op, with pages in random order."""
    heads, nope, v = MODELS[model]
    columns = -(-(new + cached) // PAGE)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    host_lens = torch.tensor([[new, new + cached]] * rows, dtype=torch.int32)
    return (
        *(randn(rows * new, heads, width) for width in (nope, ROPE, nope)),
        randn(rows * new, ROPE),
        randn(rows * new, heads, v),
        randn(rows * columns, PAGE, RANK + ROPE),
        randn(heads, nope, RANK) * RANK**-0.5,
        randn(heads, RANK, v) * RANK**-0.5,
        torch.arange(rows + 1, dtype=torch.int32, device="cuda") * new,
        host_lens[:, 1].contiguous().cuda(),
        torch.randperm(rows * columns, device="cuda").int().view(rows, columns),
        host_lens,
        (nope + ROPE) ** -0.5,
    )


def calls_of(args: tuple[Any, ...], rows: int, cached: int) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    q_nope, q_pe, k_nope, k_pe, v = args[:5]
    yield "ours", lambda: prefill_triton(*args)
    if cached:
        return

    def joined() -> tuple[Tensor, Tensor, Tensor]:
        query = torch.cat([q_nope, q_pe], -1)
        key = torch.cat([k_nope, k_pe[:, None].expand(-1, v.shape[1], -1)], -1)
        query, key, value = (x.unflatten(0, (rows, -1)).transpose(1, 2) for x in (query, key, v))
        return query, key, value

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = scaled_dot_product_attention(query, key, value, is_causal=True, scale=args[-1])
        return out.transpose(1, 2).flatten(0, 1)

    before = joined()
    yield "sdpa", lambda: attend(*before)
    yield "sdpa_joined", lambda: attend(*joined())


def median_us(calls: list[Callable[[], Tensor]]) -> float:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(CALLS)]
    for call, event in zip(cycle(calls), events):
        event.record()
        call()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) * 1e3 for a, b in pairwise(events))


def measure(model: str, rows: int, new: int, cached: int, flops_per_us: float) -> dict[str, Any]:
    heads, nope, v = MODELS[model]
    pairs = rows * (new * cached + new * (new + 1) // 2)
    flops = 2 * heads * (pairs * (nope + ROPE + v) + rows * cached * RANK * (nope + v))
    title = f"{model}: {rows} x {new} after {cached}"
    row: dict[str, Any] = {"case": title, "floor": round(flops / flops_per_us, 1)}
    copies = [inputs(model, rows, new, cached) for _ in range(3)]
    *tensors, host_lens, scale = copies[0]
    want = prefill_torch(*(x.double() if x.is_floating_point() else x for x in tensors), host_lens, scale)
    calls = [dict(calls_of(args, rows, cached)) for args in copies]
    for name in calls[0]:
        error = relative_error(calls[0][name](), want)
        assert error < 2e-2, f"{name}: {title}: error {error}"
        row[name] = round(median_us([of_copy[name] for of_copy in calls]), 1)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path)
    output = parser.parse_args().output
    torch.manual_seed(0)
    rate = product_rate()
    machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda}
    report: dict[str, Any] = {"machine": machine, "product_TFLOP_per_s": round(rate / 1e6), "rows": []}
    print(json.dumps(report))
    for model, case in product(MODELS, CASES):
        add_row(report, measure(model, *case, rate), output)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

"""The sampler of a step, `sample_tokens`, beside one sort of the same logits.

    python -m benchmarks.sampling --output benchmarks/results/sampling.json

Logits of GLM's 154,880 ids, normal with a standard deviation of 2.5; rows with 4 positions, as with 3 drafts. Tokens
are compared with those of plain torch in the same run. Times are of replayed CUDA graphs, in microseconds.
"""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels import graph_us
from benchmarks.measuring import DEVICE
from benchmarks.reporting import add_row, command_parser
from mla_compile.ops.sampling.sample import sample_tokens_op, sample_torch

VOCAB, POSITIONS = 154_880, 4
FILTERS = {  # temperature, top_k, top_p, min_p
    "none": (1.0, 0, 1.0, 0.0),
    "min_p 0.05": (1.0, 0, 1.0, 0.05),
    "top_p 0.95": (0.6, 0, 0.95, 0.0),
    "top_k 50": (1.0, 50, 1.0, 0.0),
    "top_k 50, top_p 0.9": (0.8, 50, 0.9, 0.0),
}


def arguments(rows: int, settings: tuple[float, int, float, float], vocab: int = VOCAB) -> tuple[Tensor, ...]:
    """Those of `sample_tokens`."""
    generator = torch.Generator(DEVICE).manual_seed(rows)
    logits = 2.5 * torch.randn(rows, POSITIONS, vocab, generator=generator, device=DEVICE)
    position = torch.randint(2**31, (rows, POSITIONS), generator=generator, device=DEVICE)
    seed = torch.randint(2**62, (rows,), generator=generator, device=DEVICE)
    temperature, top_k, top_p, min_p = (torch.full((rows,), value, device=DEVICE) for value in settings)
    return logits, position, seed, temperature, top_k.int(), top_p, min_p


def main() -> None:
    parser = command_parser(__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    args = parser.parse_args()
    report: dict[str, Any] = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if DEVICE == "cuda" else DEVICE,
        "rows": [],
    }
    for rows in args.rows:
        row: dict[str, Any] = {"rows": rows, "different_tokens": 0}
        for name, settings in FILTERS.items():
            given = arguments(rows, settings)
            row["different_tokens"] += int((sample_tokens_op(*given) != sample_torch(*given)).sum())
            row[name] = round(graph_us([partial(sample_tokens_op, *given)]))
        sort = partial(torch.sort, given[0], dim=-1, descending=True, stable=True)
        add_row(report, {**row, "a sort": round(graph_us([sort]))}, args.output)


if __name__ == "__main__":
    main()

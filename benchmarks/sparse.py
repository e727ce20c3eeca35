"""Sparse MLA on a GPU: selection of keys and attention over them, beside dense attention over all keys.

    python -m benchmarks.sparse

Shapes of DeepSeek-V3.2 (128 heads, 64 of the indexer) and GLM-5 (64 and 32), 2,048 keys selected, bfloat16. Every
kernel is checked against plain torch in the same run. Times are of replayed CUDA graphs, in microseconds.
"""

import argparse
from functools import partial

import torch

from benchmarks.kernels import BYTES_PER_US, graph_us, relative_error
from mla_compile.ops.attention.decode import decode_op
from mla_compile.ops.attention.select_keys import (
    decode_select_op,
    decode_select_torch,
    prefill_select_op,
    prefill_select_torch,
)
from mla_compile.ops.attention.sparse import sparse_op, sparse_torch

MODELS = {"DeepSeek-V3.2": (128, 64), "GLM-5": (64, 32)}
TOPK, PAGE, RANK, ROPE, WIDTH = 2048, 64, 512, 64, 128


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda").bfloat16()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 8192, 32768])
    parser.add_argument("--q-lens", type=int, nargs="+", default=[1, 2])
    parser.add_argument(
        "--cached", type=int, nargs="*", default=[0, 28672], help="keys before a prompt chunk"
    )
    args = parser.parse_args()
    print(torch.cuda.get_device_name(), torch.__version__)
    print(
        "rows context q_len: select attend | dense | plain torch's select attend | bytes' floor: sparse dense"
    )
    for name, (heads, index_heads) in MODELS.items():
        print(name)
        for rows, context, q_len in (
            (r, c, q) for r in args.rows for c in args.contexts for q in args.q_lens
        ):
            measure(heads, index_heads, rows, context, q_len)
        for cached in args.cached:
            measure_prompt(index_heads, cached)


def measure(heads: int, index_heads: int, rows: int, context: int, q_len: int) -> None:
    columns, tokens, scale = context // PAGE, rows * q_len, (RANK + ROPE) ** -0.5
    table = torch.randperm(rows * columns, device="cuda").int().view(rows, columns)
    lens = torch.full((rows,), context, dtype=torch.int32, device="cuda")
    latents, keys = randn(rows * columns, PAGE, RANK + ROPE), randn(rows * columns, PAGE, WIDTH)
    q_latent, q_pe = randn(tokens, heads, RANK), randn(tokens, heads, ROPE)
    q, weights = randn(tokens, index_heads, WIDTH), torch.randn(tokens, index_heads, device="cuda")
    select = q, weights, keys, table, lens, None, q_len, TOPK
    selected = decode_select_op(*select)
    # Scores that are nearly equal may change places.
    both = zip(selected.tolist(), decode_select_torch(*select).tolist(), strict=True)
    assert all(len({*mine} ^ {*its}) <= 8 for mine, its in both), "another selection than plain torch's"
    attend = q_latent, q_pe, latents, selected, scale
    assert relative_error(sparse_op(*attend), sparse_torch(*attend)) < 2e-2
    dense = q_latent, q_pe, latents, table, lens, None, q_len, scale
    if context <= TOPK:
        assert relative_error(sparse_op(*attend), decode_op(*dense)[0]) < 2e-2
    calls = [
        partial(decode_select_op, *select),
        partial(sparse_op, *attend),
        partial(decode_op, *dense),
        partial(decode_select_torch, *select),
        partial(sparse_torch, *attend),
    ]
    us = [f"{graph_us([call], 0.02):8.1f}" for call in calls]
    sparse_bytes = rows * context * WIDTH * 2 + tokens * min(TOPK, context) * (RANK + ROPE) * 2
    floors = sparse_bytes, rows * context * (RANK + ROPE) * 2
    floor = " ".join(f"{each / BYTES_PER_US:6.1f}" for each in floors)
    print(f"{rows:3} {context:6} {q_len}: {us[0]} {us[1]} | {us[2]} | {us[3]} {us[4]} | {floor}", flush=True)


def measure_prompt(index_heads: int, cached: int, tokens: int = 4096) -> None:
    """The selection of a prompt chunk's keys."""
    keys = cached + tokens
    slots = torch.arange(keys, device="cuda").view(-1, PAGE)[torch.randperm(keys // PAGE)].view(1, -1)
    ends = [torch.tensor([0, n], dtype=torch.int32, device="cuda") for n in (tokens, keys)]
    q, weights = randn(tokens, index_heads, WIDTH), torch.randn(tokens, index_heads, device="cuda")
    select = q, weights, randn(keys // PAGE, PAGE, WIDTH), ends[0], ends[1][None], slots, TOPK
    some = q[-8:], weights[-8:], select[2], ends[0].clamp(max=8), *select[4:]
    both = zip(prefill_select_op(*select)[-8:].tolist(), prefill_select_torch(*some).tolist(), strict=True)
    assert all(len({*mine} ^ {*its}) <= 8 for mine, its in both), "another selection than plain torch's"
    us = graph_us([partial(prefill_select_op, *select)], 0.02)
    products = tokens * (cached + tokens / 2) * index_heads * WIDTH * 2
    print(
        f"prompt of {tokens} after {cached}: {us:8.1f} | all products {products / us / 1e6:4.0f} TFLOP/s",
        flush=True,
    )


if __name__ == "__main__":
    main()

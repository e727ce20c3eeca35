"""Attention over selected keys: its kernels for both dtypes of latents, and steps of DeepSeek-V3.2's shape.

    python -m benchmarks.sparse_attention kernels --output benchmarks/results/sparse_attention.kernels.json
    python -m benchmarks.sparse_attention steps --output benchmarks/results/sparse_attention.steps.json

`kernels`: each candidate of `mla_sparse_attention` for the heads of DeepSeek-V3.2 (128) and GLM-5 (64), 2,048 keys a
token, checked against float64 in the same run; microseconds of replayed CUDA graphs. Tokens of decode rows select
anywhere in memory; those of a prompt select among the keys before them. The floor is the larger one of a plain read of
the selected latents and of the products at the rate of large ones.

`steps`: DeepSeek-V3.2's shape with few layers and experts and random FP8 weights. Caches are filled, not computed: a
step's time does not depend on their values. For each context, rows and drafts: ms of a captured step, with latents in
bfloat16 and FP8; with fixed selections instead of indexers; with dense attention instead of both; and the floors, the
bytes of weights, latents and indexer keys that a step must read over the bandwidth of a plain read. A run replaces the
rows that it measures.
"""

import statistics
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args
from unittest.mock import patch

import torch
from torch import Tensor, nn

from benchmarks.kernels import FLOPS_PER_US, graph_us, relative_error
from benchmarks.random_weights import random_model, settings_of
from benchmarks.reporting import add_row, command_parser, drop_rows, with_known_rows
from benchmarks.transformers_generate import DEVICE, Marks, floor_bytes, read_bandwidth
from mla_compile import Engine
from mla_compile.defaults import KvCacheDtype
from mla_compile.latents import FP8, fp8_width, pack, unpack
from mla_compile.models import MLAForCausalLM
from mla_compile.models.attention import MLAAttention
from mla_compile.ops.attention.sparse import SPARSE, sparse_torch
from mla_compile.ops.library import call_of

HEADS = {"DeepSeek-V3.2": 128, "GLM-5": 64}
TOPK, PAGE, RANK, ROPE = 2048, 64, 512, 64
SLOTS = 2**18
"""Slots of the kernels' cache: more bytes than a GPU keeps."""
DTYPES: tuple[KvCacheDtype, ...] = ("auto", "fp8")
Variant = Literal["sparse", "fixed", "dense"]


def packed(latents: Tensor) -> Tensor:
    """Latents `[..., RANK + ROPE]` in FP8, in pieces that memory holds."""
    flat = latents.flatten(0, -2)
    pieces = [pack(piece[:, :RANK], piece[:, RANK:]) for piece in flat.split(2**16)]
    return torch.cat(pieces).unflatten(0, latents.shape[:-1])


def selections(tokens: int, context: int | None, count: int) -> Iterator[Tensor]:
    """Slots of tokens: `context` is that of a prompt whose last tokens these are; None for decode rows."""
    for _ in range(count):
        if context is None:
            yield torch.randint(SLOTS, (tokens, TOPK), device=DEVICE, dtype=torch.int32)
            continue
        scores = torch.rand(tokens, context, device=DEVICE)
        seen = context - tokens + 1 + torch.arange(tokens, device=DEVICE)
        scores.masked_fill_(torch.arange(context, device=DEVICE) >= seen[:, None], -1)
        best = scores.topk(min(TOPK, context))
        chosen = torch.where(best.values < 0, -1, best.indices).int()
        yield nn.functional.pad(chosen, (0, TOPK - chosen.shape[1]), value=-1)


def kernels(report: dict[str, Any], output: Path | None, cases: Sequence[tuple[int, int | None]]) -> None:
    """cases: tokens, and the context of a prompt or None."""
    bandwidth = read_bandwidth(2**32)
    latents = torch.randn(SLOTS // PAGE, PAGE, RANK + ROPE, device=DEVICE).bfloat16()
    caches = {"auto": latents, "fp8": packed(latents)}
    for (model, heads), (tokens, context) in ((m, c) for m in HEADS.items() for c in cases):
        q_latent = torch.randn(tokens, heads, RANK, device=DEVICE).bfloat16()
        q_pe = torch.randn(tokens, heads, ROPE, device=DEVICE).bfloat16()
        chosen = list(selections(tokens, context, max(1, 64 // tokens) if context is None else 1))
        keys = sum(int((each >= 0).sum()) for each in chosen) / len(chosen)
        for name, cache in caches.items():
            calls = [(q_latent, q_pe, cache, each, (RANK + ROPE) ** -0.5) for each in chosen]
            call = call_of("mla_sparse_attention", calls[0])
            read = min(keys, SLOTS if context is None else context) * cache.shape[2] * cache.element_size()
            products = 2 * keys * heads * (2 * RANK + ROPE) / FLOPS_PER_US
            row: dict[str, Any] = {"model": model, "tokens": tokens, "context": context}
            row |= {"kv_cache_dtype": name, "floor_us": round(max(read / bandwidth * 1e6, products), 1)}
            some = torch.arange(0, tokens, max(1, tokens // 8))
            for candidate in SPARSE:
                if candidate.why_not(call) is not None or candidate.name == "reference":
                    continue
                run = candidate.load()
                error = relative_error(run(*calls[0])[some], in_float64(*calls[0], some))
                assert error < 2e-2, f"{candidate.name}: {error}"
                us = graph_us([partial(run, *each) for each in calls], 0.02)
                row["triton" if candidate.name == "triton" else "flash_mla"] = round(us, 1)
            add_row(report, row, output)


def in_float64(
    q_latent: Tensor, q_pe: Tensor, cache: Tensor, chosen: Tensor, scale: float, some: Tensor
) -> Tensor:
    flat, slots = cache.flatten(0, 1), chosen[some]
    gathered = flat[slots.flatten().clamp(min=0).long()]
    values = unpack(gathered, RANK, torch.float64) if cache.dtype == FP8 else gathered.double()
    places = torch.arange(slots.numel(), device=slots.device, dtype=torch.int32).view(slots.shape)
    own = torch.where(slots < 0, -1, places)
    return sparse_torch(q_latent[some].double(), q_pe[some].double(), values[None], own, scale)


class Fixed(nn.Module):
    """In an indexer's place: the same slots in every step."""

    slots: Tensor

    def __init__(self, tokens: int, topk: int, slots: int) -> None:
        super().__init__()
        chosen = torch.randint(PAGE, slots, (tokens, topk), dtype=torch.int32, device=DEVICE)
        self.register_buffer("slots", chosen, persistent=False)

    def cache_specs(self, *_: Any) -> list[Any]:
        return []

    def forward(self, x: Tensor, *_: Any) -> Tensor:
        return self.slots[torch.arange(x.shape[0], device=x.device)]  # torch 2.11 cannot compile a slice here


def step_floor(
    model: MLAForCausalLM, rows: int, context: int, k: int, dtype: KvCacheDtype, variant: Variant
) -> float:
    """Bytes of a step: weights, the latents that are attended to, and an indexer's keys."""
    arch = model.arch
    assert arch.indexer is not None
    of_token = (
        arch.latent_width * 2 if dtype == "auto" else fp8_width(arch.kv_lora_rank, arch.qk_rope_head_dim)
    )
    keys = rows * context * arch.indexer.head_dim * 2 if variant == "sparse" else 0
    least = min(arch.indexer.topk, context)
    of_layer = [
        keys + of_token * (rows * context if variant == "dense" else tokens * least)
        for tokens in (rows * (1 + k), rows)
    ]
    return floor_bytes(model, rows, 0, drafts=k) + arch.num_layers * of_layer[0] + k * of_layer[1]


def fill(engine: Engine) -> None:
    """Random latents and keys in all caches."""
    block = torch.randn(2**12, RANK + ROPE, device=DEVICE).bfloat16()
    for spec in engine._caches.specs:
        flat = spec.cache.flatten(0, 1)
        rank = spec.kv_lora_rank
        some = block if flat.dtype != FP8 else pack(block[:, :rank], block[:, rank : rank + ROPE])
        for piece in flat.split(len(some)):
            piece.copy_(some[: len(piece), : piece.shape[1]])


def ms_per_step(engine: Engine, rows: int, context: int, steps: int) -> float:
    """The median of steps of rows that all have this many tokens, without prompts before them."""
    config = engine.config
    launcher = engine._launcher
    state, k = launcher.steps.state_for(rows, sampled=False), config.num_speculative_tokens
    assert len(state.active) == rows, f"{rows}: the number of rows of a bucket"
    table = 1 + torch.arange(rows * config.pages_per_row, dtype=torch.int32).view(rows, -1)
    for tensor, value in (
        (state.block_table, table),
        (state.last_token, torch.arange(rows) + 1),
        (state.active, torch.tensor(True)),
        (state.max_len, torch.tensor(2**30)),
        (state.drafts, torch.tensor(7)),
        (state.num_drafts, torch.tensor(k)),
        (state.num_cached, torch.tensor(context)),
    ):
        tensor.copy_(value)
    step, marks = launcher.steps.whole(sampled=False, prompts=False), Marks()
    with torch.inference_mode():
        for i in range(4 + steps):
            if i == 4:
                state.num_cached.fill_(context)
            if i >= 4:
                marks.mark()
            step(state)
        marks.mark()
    assert bool(state.active.all()), "a row ended, so its steps are not those of a row that goes on"
    return statistics.median(marks.intervals_ms())


def steps(
    report: dict[str, Any],
    output: Path | None,
    *,
    settings: dict[str, Any],
    contexts: Sequence[int],
    all_rows: Sequence[int],
    drafts: Sequence[int],
    variants: Sequence[Variant],
    num_steps: int,
    compiled: bool,
) -> None:
    model = random_model(settings, "fp8", mtp=any(drafts), device=DEVICE)
    assert model.arch.indexer is not None
    topk, longest = model.arch.indexer.topk, max(contexts) + PAGE * (1 + max(drafts))
    bandwidth = read_bandwidth(2**32 if DEVICE == "cuda" else 2**24)
    layers = [module for module in model.modules() if isinstance(module, MLAAttention)]
    kinds: list[tuple[Variant, KvCacheDtype]] = [("sparse", "auto"), ("sparse", "fp8")]
    kinds += [("fixed", "auto"), ("dense", "auto")]
    for variant, dtype in (kind for kind in kinds if kind[0] in variants):
        for layer in layers:
            if variant == "fixed":
                tokens = max(all_rows) * (1 + max(drafts))
                layer.indexer = Fixed(tokens, topk, PAGE * max(all_rows) * (longest // PAGE))  # type: ignore[assignment]
            elif variant == "dense":
                layer.indexer = None
        for k in drafts if variant != "fixed" else drafts[:1]:
            with patch("mla_compile.engine.steps._compiles_mixed", lambda *_: False):
                engine = Engine(
                    model,
                    num_speculative_tokens=k,
                    max_rows=max(all_rows),
                    max_model_len=longest,
                    page_size=PAGE,
                    kv_cache_dtype=dtype,
                    prefix_caching=False,
                    compile=None if compiled else False,
                )
            fill(engine)
            for context, rows in ((c, r) for c in contexts for r in all_rows):
                ms = ms_per_step(engine, rows, context, num_steps)
                read = step_floor(model, rows, context, k, dtype, variant)
                row: dict[str, Any] = {"variant": variant, "kv_cache_dtype": dtype, "drafts": k}
                row |= {"context": context, "rows": rows}
                drop_rows(report, row)
                row |= {"ms": round(ms, 3), "floor_ms": round(read / bandwidth * 1e3, 3)}
                add_row(report, row, output)
            engine.close()
            del engine  # and its graphs


def main() -> None:
    parser = command_parser(__doc__)
    parser.add_argument("what", choices=["kernels", "steps"])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--tokens", type=int, nargs="*", default=[1, 2, 8, 16, 32, 64, 128, 256])
    parser.add_argument("--prompts", type=int, nargs="*", default=[512, 4096])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--contexts", type=int, nargs="*", default=[8192, 32768])
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--drafts", type=int, nargs="*", default=[0, 1])
    parser.add_argument("--variants", nargs="*", choices=get_args(Variant), default=get_args(Variant))
    parser.add_argument("--tiny", action="store_true", help="a small shape without compilation, for a CPU")
    args = parser.parse_args()
    torch.manual_seed(0)
    report: dict[str, Any] = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if DEVICE == "cuda" else DEVICE,
        "rows": [],
    }
    if args.what == "kernels":
        # A prompt of 512 tokens comes after 7,680 others.
        cases: list[tuple[int, int | None]] = [(n, None) for n in args.tokens]
        cases += [(n, 8192 if n < 4096 else n) for n in args.prompts]
        kernels(report, args.output, cases)
        return
    settings = settings_of("v3.2", args.layers, tiny=args.tiny) | {"first_k_dense_replace": 1}
    settings |= {"index_topk": 64, "index_n_heads": 4} if args.tiny else {"n_routed_experts": args.experts}
    report |= {"layers": args.layers, "experts": settings["n_routed_experts"]}
    report = with_known_rows(report, args.output)
    steps(
        report,
        args.output,
        settings=settings,
        contexts=args.contexts,
        all_rows=args.rows,
        drafts=args.drafts,
        variants=args.variants,
        num_steps=2 if args.tiny else 30,
        compiled=not args.tiny,
    )


if __name__ == "__main__":
    main()

"""One layer of a decode step, or of a step with prompts, kernel by kernel.

    python -m benchmarks.layer --output benchmarks/results/layer.glm.json
    python -m benchmarks.layer --exact --output benchmarks/results/layer.glm.json
    python -m benchmarks.layer --weights fp8 --without fuse_linear --output benchmarks/results/layer.glm.json
    python -m benchmarks.layer --prompts --batches 1 4 16 --output benchmarks/results/layer.prompts.json

Traces the replayed CUDA graph of the package's own model with random weights and few layers. A layer runs from one
append to the cache to the next. The output has a row for each kernel in the order of the layer: its name, and `us`, the
median time from the end of the previous kernel to its own end. So overlapping kernels count once, idle time counts too,
and the rows add up to the layer. `floor_us`: the bytes of a layer's weights and latents over the bandwidth of a plain
read in the same run.

`--prompts`: a step that reads that many prompts, compiled. `floor_us`: the operations of a layer over the rate of a
large bfloat16 product in the same run.

`--without` measures the layer again without each of these graph passes, to show the gain of the pass.

A run replaces the rows of the output that it measures.
"""

import statistics
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import pairwise, product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.decode import product_rate
from benchmarks.fp8_step import CONTEXT, engine_of, prompts_of
from benchmarks.measuring import latent_bytes, read_bandwidth, share_of_experts
from benchmarks.random_weights import CONFIGS, random_model, settings_of
from benchmarks.reporting import add_row, command_parser, drop_rows, with_known_rows
from mla_compile import Engine, SamplingParams
from mla_compile.models import MLAForCausalLM
from mla_compile.passes import pipeline

APPEND = "append_kernel"
STEPS = 16
"""Traced steps."""


def layers_of(engine: Engine, prompts: list[list[int]], *, of_prompts: bool) -> list[list[tuple[str, float]]]:
    """For every layer of some steps: its kernels' names and microseconds, in order. Last layers have the head too."""
    for _ in range(2):
        engine.generate(prompts, max_new_tokens=1 if of_prompts else 8)
    requests = [] if of_prompts else [engine.add(prompt, max_new_tokens=60) for prompt in prompts]
    while not all(request.completion.token_ids for request in requests):
        engine.step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(STEPS):
            if of_prompts:
                engine.generate(prompts, max_new_tokens=1)
            else:
                engine.step()
        torch.cuda.synchronize()
    for request in requests:
        engine.abort(request)
    kernels = sorted(
        (event.time_range.end, event.name) for event in trace.events() if event.device_type == DeviceType.CUDA
    )
    timed = [(name, end - before) for (before, _), (end, name) in pairwise(kernels)]
    begins = [i for i, (name, _) in enumerate(timed) if APPEND in name]
    return [timed[begin:end] for begin, end in pairwise(begins)]


def main() -> None:
    parser = command_parser(__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--shapes", nargs="+", choices=list(CONFIGS), default=["glm"])
    parser.add_argument("--weights", nargs="+", choices=["bf16", "fp8"], default=["bf16", "fp8"])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--layers", type=int, default=6, help="at least 5")
    parser.add_argument("--exact", action="store_true", help="batch-invariant")
    parser.add_argument("--without", nargs="*", choices=[p.__name__ for p in pipeline.PASSES], default=[])
    parser.add_argument("--prompts", action="store_true", help="steps with prompts")
    args = parser.parse_args()
    if args.exact and {"fuse_rms_norm", "fuse_all_reduce"} & {*args.without}:
        parser.error("--exact always runs fuse_rms_norm and fuse_all_reduce; leave them out of --without")
    report: dict[str, Any] = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(),
        "context": CONTEXT,
        **({"prompts": True} if args.prompts else {}),
        "rows": [],
    }
    report = with_known_rows(report, args.output)
    rate = product_rate() if args.prompts else read_bandwidth(2**32) / 1e6
    for shape, weights in product(args.shapes, args.weights):
        model = random_model(settings_of(shape, args.layers), weights, mtp=False, device="cuda")
        for without in (None, *args.without):
            passes = [graph_pass for graph_pass in pipeline.PASSES if graph_pass.__name__ != without]
            torch._dynamo.reset()
            # Steps with prompts that are not timed run eagerly, to save their compile.
            eager_prompts = patch("mla_compile.engine.steps._compiles_mixed", lambda *_: False)
            with (
                nullcontext() if args.prompts else eager_prompts,
                patch.object(pipeline, "PASSES", passes),
            ):
                most = max(args.batches)
                tokens = most * (CONTEXT + 1) if args.prompts else None
                engine = engine_of(model, most, args.exact, tokens_per_step=tokens)
                if args.prompts:
                    engine.warm_up(sampling=SamplingParams(temperature=0))
                for batch in args.batches:
                    own = {"shape": shape, "weights": weights, "exact": args.exact}
                    own |= {"batch": batch, "without": without}
                    drop_rows(report, own)
                    work = layer_flops(model, batch) if args.prompts else layer_bytes(model, batch)
                    layers = layers_of(engine, prompts_of(model, batch), of_prompts=args.prompts)
                    for row in rows_of(layers, work / rate):
                        if without is None or row["place"] is None:
                            add_row(report, own | row, args.output)
            del engine
        del model
        torch.cuda.empty_cache()


def rows_of(layers: list[list[tuple[str, float]]], floor: float) -> Iterator[dict[str, Any]]:
    """A row for each kernel of the most common layer, and one without a place for the whole layer."""
    names = statistics.mode(tuple(name for name, _ in layer) for layer in layers)
    alike = [layer for layer in layers if tuple(name for name, _ in layer) == names]
    for place, name in enumerate(names):
        us = statistics.median(layer[place][1] for layer in alike)
        yield {"place": place, "kernel": name[:80], "us": round(us, 2)}
    whole = statistics.median(sum(us for _, us in layer) for layer in alike)
    yield {"place": None, "kernels": len(names), "us": round(whole, 1), "floor_us": round(floor, 1)}


def layer_bytes(model: MLAForCausalLM, batch: int) -> float:
    """Bytes of weights and latents that a step reads in the last layer, which has experts, with random routing."""
    hit = share_of_experts(model.config, batch)
    weights = (
        p.nbytes * (hit if ".experts." in name else 1) for name, p in model.layers[-1].named_parameters()
    )
    return sum(weights) + latent_bytes(model.config, batch * CONTEXT)


def layer_flops(model: MLAForCausalLM, batch: int) -> float:
    """Operations of the last layer for this many prompts: products by weights, and causal attention."""
    config, tokens = model.config, batch * CONTEXT
    chosen = config.num_experts_per_tok / config.n_routed_experts
    weights = sum(
        p.numel() * (chosen if ".experts." in name else 1)
        for name, p in model.layers[-1].named_parameters()
        if p.dim() > 1
    )
    head = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
    return 2 * tokens * weights + tokens * (CONTEXT + 1) * config.num_attention_heads * head


if __name__ == "__main__":
    main()

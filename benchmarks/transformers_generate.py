"""Steps of `generate` on large random models: stock transformers against an accelerated model.

    python -m benchmarks.transformers_generate --output benchmarks/results/transformers_generate.json

`--model glm`, the default: GLM-4.7-Flash's published shape, the defaults of transformers' `Glm4MoeLiteConfig` (47
layers, 30B parameters), about 1,024 tokens a row. `--model v3`: 12 layers of DeepSeek-V3's architecture, hidden size
2048, 64 experts, about 4,096 tokens a row. Random bfloat16 weights and tokens. For each batch size: the floor (bytes of
the weights and latents that a step must read, over the bandwidth that a plain read reaches in the same run), ms a step
of stock `generate` with its dynamic cache, with its static cache compiled, the same with only `backend="mla"` changed,
and ours without drafts and with them.

ms per step: the difference of a long and a short generation from the same prompts, over the tokens between them, so
that prefill and compilation drop out; with drafts, over the steps between them. Of each the quickest of three. Tokens:
stock's own forward scores every variant's text; `worst_gap` is how far a chosen token's logit lies below the best one,
at most, which bfloat16 rounding explains as long as it is small.
"""

import argparse
import gc
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import (
    CompileConfig,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
    PreTrainedModel,
)
from transformers.modeling_layers import MtpModel

from mla_compile.integrations.transformers import accelerate, restore

SHORT, LONG, SLOW = 16, 160, 48
"""New tokens: of the short generation, of the long one, of the long one where a step takes more than 30 ms."""
CONTEXTS = {"glm": 1024, "v3": 4096}
"""Tokens cached halfway through the longest generation."""


def random_model(name: str, layers: int | None = None) -> tuple[PreTrainedModel, MtpModel]:
    """A model with random weights and one MTP layer, on the GPU. layers: another number than the published one."""
    extra = {"num_mtp_layers": 1, "eos_token_id": None, "pad_token_id": 0}
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model: PreTrainedModel
        if name == "glm":
            glm = Glm4MoeLiteConfig(num_hidden_layers=layers or 47, mtp_mlp_layer_types=["sparse"], **extra)
            model = Glm4MoeLiteForCausalLM(glm)
        else:
            v3 = DeepseekV3Config(
                num_hidden_layers=layers or 12,
                hidden_size=2048,
                intermediate_size=8192,
                moe_intermediate_size=1408,
                n_routed_experts=64,
                n_group=1,
                topk_group=1,
                first_k_dense_replace=1,
                num_attention_heads=16,
                num_key_value_heads=16,
                **extra,
            )
            model = DeepseekV3ForCausalLM(v3)
        mtp = MtpModel(model, 1)
    torch.set_default_dtype(torch.float32)
    for module in (model, mtp):
        module.eval().requires_grad_(False)
    model.generation_config.eos_token_id = None
    return model, mtp


def read_bandwidth() -> float:
    """Bytes per second of a plain read: the sum of 4 GiB."""
    data = torch.ones(2**31, dtype=torch.bfloat16, device="cuda").view(torch.int64)
    times = []
    for _ in range(10):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        data.amax()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return data.numel() * 8 / min(times)


def floor_bytes(model: Any, batch: int, context: int) -> float:
    """Weights that a step of `batch` tokens reads, experts as often as random routing hits them, and the latents."""
    config = model.config
    total = 0.0
    for name, parameter in model.named_parameters():
        share = 1.0
        if ".experts." in name:
            share = 1 - (1 - config.num_experts_per_tok / config.n_routed_experts) ** batch
        elif "embed_tokens" in name:
            share = batch / config.vocab_size
        total += share * parameter.numel() * parameter.element_size()
    width = config.kv_lora_rank + config.qk_rope_head_dim
    return total + batch * context * width * 2 * config.num_hidden_layers


def run(model: Any, prompts: Tensor, new_tokens: int, **kwargs: Any) -> tuple[Tensor, float, int]:
    """Tokens, seconds, and the steps that it took after the prompt's forward."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    mask = torch.ones_like(prompts)
    out = model.generate(prompts, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False, **kwargs)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    ours = getattr(model, "mla", None)
    steps = new_tokens - 1 if ours is None else max(c.num_steps for c in ours.completions)
    return out, seconds, steps


def measure(generate: Callable[[int], tuple[Tensor, float, int]]) -> tuple[Tensor, dict[str, float]]:
    """The tokens of the long generation, and what is reported of a variant."""
    first = generate(SHORT)[1]
    short, long = quickest(generate, SHORT), quickest(generate, SLOW)
    new_tokens = SLOW
    if (long[1] - short[1]) / (long[2] - short[2]) < 0.03:  # seconds
        new_tokens = LONG
        long = quickest(generate, LONG)
    steps = long[2] - short[2]
    return long[0], {
        "ms_per_step": round((long[1] - short[1]) / steps * 1e3, 2),
        "tokens_per_step": round((new_tokens - SHORT) / steps, 2),
        "first_call_s": round(first, 1),
    }


def quickest(
    generate: Callable[[int], tuple[Tensor, float, int]], new_tokens: int
) -> tuple[Tensor, float, int]:
    return min((generate(new_tokens) for _ in range(3)), key=lambda result: result[1])


def worst_gap(model: Any, tokens: Tensor, prompt_width: int) -> float:
    """By how much the logit of a generated token falls short of stock's best one, at most."""
    worst = 0.0
    for row in tokens:
        logits = model(row[None, :-1], logits_to_keep=tokens.shape[1] - prompt_width).logits[0].float()
        chosen = logits.gather(1, row[prompt_width:, None])[:, 0]
        worst = max(worst, float((logits.amax(dim=-1) - chosen).max()))
    return worst


Variant = tuple[Callable[[], object], dict[str, Any]]


def variants(model: Any, mtp: MtpModel, max_rows: int, context: int) -> dict[str, Variant]:
    """Name -> what prepares the model, and what `generate` is given."""

    def ours(k: int) -> Variant:
        sizes = {"max_rows": max_rows, "max_model_len": context + LONG}
        drafter = mtp if k else None
        return lambda: accelerate(model, num_speculative_tokens=k, mtp=drafter, **sizes), {}

    def static(backend: str) -> Variant:
        config = CompileConfig(backend=backend, mode="reduce-overhead", fullgraph=True)
        kwargs = {"cache_implementation": "static", "compile_config": config, "max_cache_len": context + LONG}
        return lambda: None, kwargs

    return {
        "stock_dynamic": (lambda: None, {}),
        "stock_static_inductor": static("inductor"),
        "stock_static_mla": static("mla"),
        "ours_k0": ours(0),
        "ours_k1": ours(1),
        "ours_k3": ours(3),
    }


def measured(
    model: Any, name: str, batch: int, context: int, kwargs: dict[str, Any], bandwidth: float
) -> dict[str, Any]:
    torch.manual_seed(batch)
    prompts = torch.randint(1, model.config.vocab_size, (batch, context - LONG // 2), device="cuda")
    floor = floor_bytes(model, batch, context) / bandwidth * 1e3
    row: dict[str, Any] = {"variant": name, "batch": batch, "floor_ms": round(floor, 2)}
    try:
        tokens, figures = measure(lambda new_tokens: run(model, prompts, new_tokens, **kwargs))
        return row | figures | {"worst_gap": round(worst_gap(model, tokens, prompts.shape[1]), 3)}
    except torch.cuda.OutOfMemoryError:
        return row | {"failed": "out of memory"}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="written anew after each measurement")
    parser.add_argument("--model", choices=list(CONTEXTS), default="glm")
    parser.add_argument("--layers", type=int, help="another number of layers, to try the benchmark")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument(
        "--variants", nargs="*", help="names of variants, in order, NAME or NAME@BATCH,BATCH; all by default"
    )
    args = parser.parse_args()
    model, mtp = random_model(args.model, args.layers)
    context = CONTEXTS[args.model]
    bandwidth = read_bandwidth()
    report: dict[str, Any] = {
        "machine": {
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "transformers": transformers.__version__,
        },
        "model": args.model,
        "layers": model.config.num_hidden_layers,
        "parameters": sum(p.numel() for p in model.parameters()),
        "context": context,
        "read_TB_per_s": round(bandwidth / 1e12, 2),
        "rows": [],
    }
    print(json.dumps(report), flush=True)
    known = variants(model, mtp, max(args.batches), context)
    for variant in args.variants or known:
        name, _, batches = variant.partition("@")
        prepare, kwargs = known[name]
        prepare()
        for batch in map(int, batches.split(",")) if batches else args.batches:
            row = measured(model, name, batch, context, kwargs, bandwidth)
            print(json.dumps(row), flush=True)
            report["rows"].append(row)
            if args.output:
                args.output.write_text(json.dumps(report, indent=1) + "\n")
        restore(model)
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

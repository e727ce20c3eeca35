"""Steps of `generate` on large random models: stock transformers against an accelerated model.

    python -m benchmarks.transformers_generate --output benchmarks/results/transformers_generate.glm.json
    python -m benchmarks.transformers_generate --model v3 --output benchmarks/results/transformers_generate.v3.json

`--model glm`, the default: GLM-4.7-Flash's published shape, the defaults of transformers' `Glm4MoeLiteConfig` (47
layers, 30B parameters), about 1,024 tokens a row. `--model v3`: 12 layers of DeepSeek-V3's architecture, hidden size
2048, 64 experts, about 4,096 tokens a row. Random bfloat16 weights and tokens. For each batch size: the floor (bytes of
the weights and latents that a step must read, over the bandwidth that a plain read reaches in the same run), ms a step
of stock `generate` with its dynamic cache, with its static cache compiled, the same with only `backend="mla"` changed,
and an accelerated model without drafts and with them.

Each is one short generation that compiles and captures (`first_call_s`), another, and a timed one. An event is recorded
on the stream after every step in which all rows decode. `ms_per_step` is the median time between two of them; where
`mean_ms` is above it, steps waited for the host. `prompts_ms`: from the call to the first of them, all prompts read.

Tokens: stock's own forward scores every variant's text. `mean_gap` and `worst_gap` are how far a chosen token's logit
lies below the best one: rounding to bfloat16 sends tokens to other experts, in stock's own steps too. `chance_gap` is
the mean of random tokens. A variant whose worst token is no better, or whose mean is not far better, is marked as
failed, and the command fails at the end.

The output has one row for each variant and batch: a run replaces the rows that it measures and keeps the others. Each
row names its machine.
"""

import argparse
import gc
import json
import statistics
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

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

from benchmarks.measuring import DEVICE, Marks, floor_bytes, read_bandwidth
from benchmarks.random_weights import SMALL_V3
from benchmarks.reporting import command_parser, write_report
from mla_compile.engine.config import EngineSettings
from mla_compile.integrations.transformers import accelerate, restore

WARM_UP, TIMED = 8, 64
"""New tokens: of the compiling generation and of the untimed beginning of the timed one; timed ones."""
CONTEXTS = {"glm": 1024, "v3": 4096}
"""Tokens cached halfway through the timed generation."""
STOCK = {"stock_dynamic": None, "stock_static_inductor": "inductor", "stock_static_mla": "mla"}
"""Variants of stock `generate`: the backend that compiles the step on its static cache; None for its dynamic cache."""
OURS: dict[str, EngineSettings] = {f"ours_k{k}": {"num_speculative_tokens": k} for k in (0, 1, 3)}
OURS |= {f"{name}_invariant": {**settings, "batch_invariant": True} for name, settings in OURS.items()}
"""Variants of an accelerated model: its settings."""
MAX_MEAN_GAP = 0.2
"""The largest mean gap, as a share of `chance_gap`."""
TINY_CONTEXT = 128
TINY = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "vocab_size": 512,
    "n_routed_experts": 8,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}


def random_model(
    name: str, *, tiny: bool = False, layers: int | None = None
) -> tuple[PreTrainedModel, MtpModel]:
    """A model with random weights and one MTP layer, on the GPU if there is one. layers: None for the shape's own."""
    extra: dict[str, Any] = {"num_mtp_layers": 1, "eos_token_id": None, "pad_token_id": 0}
    shape = {**(TINY if tiny else {}), **({} if layers is None else {"num_hidden_layers": layers})}
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(DEVICE):
        model: PreTrainedModel
        if name == "glm":
            glm = Glm4MoeLiteConfig(**{"mtp_mlp_layer_types": ["sparse"], **extra, **shape})
            model = Glm4MoeLiteForCausalLM(glm)
        else:
            v3 = DeepseekV3Config(**{"max_position_embeddings": 8192, **SMALL_V3, **extra, **shape})
            model = DeepseekV3ForCausalLM(v3)
        mtp = MtpModel(model, 1)
    torch.set_default_dtype(torch.float32)
    for module in (model, mtp):
        module.eval().requires_grad_(False)
    model.generation_config.eos_token_id = None
    return model, mtp


def generate(model: Any, prompts: Tensor, new_tokens: int, kwargs: dict[str, Any]) -> Tensor:
    mask = torch.ones_like(prompts)
    tokens: Tensor = model.generate(
        prompts, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False, **kwargs
    )
    return tokens


def timed(model: Any, prompts: Tensor, kwargs: dict[str, Any]) -> tuple[Tensor, dict[str, float]]:
    """The tokens of the timed generation, and the figures of its steps."""
    started = time.perf_counter()
    generate(model, prompts, WARM_UP, kwargs).tolist()
    first = time.perf_counter() - started
    generate(model, prompts, WARM_UP, kwargs)  # a size of prompts is recorded when it comes again
    marks = Marks()
    marks.mark()
    ours = getattr(model, "mla", None)
    if ours is None:
        tokens = generate(model, prompts, WARM_UP + TIMED, kwargs | {"stopping_criteria": [marks]})
        tokens_per_step = 1.0
    else:
        # The first rows decode while the others prefill, a step for at least 1,024 tokens.
        with marks.after_launches(len(prompts)):
            tokens = generate(model, prompts, WARM_UP + TIMED + prompts.numel() // 1024, kwargs)
        tokens_per_step = statistics.mean(c.acceptance_length for c in ours.completions)
    prompts_ms, *steps = marks.intervals_ms()
    steps = steps[WARM_UP:]
    return tokens, {
        "ms_per_step": round(statistics.median(steps), 2),
        "mean_ms": round(statistics.mean(steps), 2),
        "prompts_ms": round(prompts_ms, 1),
        "tokens_per_step": round(tokens_per_step, 2),
        "first_call_s": round(first, 1),
    }


def gaps(model: Any, tokens: Tensor, prompt_width: int) -> dict[str, Any]:
    """The gaps of the generated tokens' logits below stock's best ones; "failed" if they are far too large."""
    chosen_gaps, chance = [], []
    for row in tokens:
        logits = model(row[None, :-1], logits_to_keep=tokens.shape[1] - prompt_width).logits[0].float()
        best, chosen = logits.amax(dim=-1), logits.gather(1, row[prompt_width:, None])[:, 0]
        chosen_gaps += (best - chosen).tolist()
        chance += (best - logits.mean(dim=-1)).tolist()
    mean, worst, by_lot = statistics.mean(chosen_gaps), max(chosen_gaps), statistics.mean(chance)
    found = {"mean_gap": round(mean, 3), "worst_gap": round(worst, 3), "chance_gap": round(by_lot, 3)}
    if worst < by_lot and mean < MAX_MEAN_GAP * by_lot:
        return found
    return found | {"failed": "these are not the model's tokens"}


def prepare(name: str, model: Any, mtp: MtpModel, max_rows: int, context: int) -> dict[str, Any]:
    """Make a variant of the model; returns the arguments of its `generate`."""
    longest = context + WARM_UP + TIMED
    if name in OURS:
        settings = OURS[name]
        sizes = {"max_rows": max_rows, "max_model_len": longest + max_rows * context // 1024}
        accelerate(model, mtp=mtp if settings["num_speculative_tokens"] else None, **settings, **sizes)
        return {}
    backend = STOCK[name]
    if backend is None:
        return {}
    config = CompileConfig(backend=backend, mode="reduce-overhead", fullgraph=True)
    return {"cache_implementation": "static", "compile_config": config, "max_cache_len": longest}


def measured(model: Any, batch: int, context: int, kwargs: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(batch)
    width = context - WARM_UP - TIMED // 2
    prompts = torch.randint(1, model.config.vocab_size, (batch, width), device=DEVICE)
    try:
        tokens, figures = timed(model, prompts, kwargs)
        return figures | gaps(model, tokens, width)
    except torch.cuda.OutOfMemoryError:
        return {"failed": "out of memory"}


class Results:
    """A file with one row for each variant and batch of one model."""

    def __init__(self, path: Path | None, model: dict[str, Any]) -> None:
        """model: the model of all rows of the file.

        Raises:
            SystemExit: the file is of another model.
        """
        self._path, self._model = path, model
        self._rows: dict[tuple[str, int], dict[str, Any]] = {}
        if path is not None and path.exists():
            known = json.loads(path.read_text())
            self._rows = {(row["variant"], row["batch"]): row for row in known.pop("rows")}
            if known != model:
                raise SystemExit(f"{path} has rows of {known}, not of {model}")

    def add(self, row: dict[str, Any]) -> None:
        """Replace an older row of the same variant and batch."""
        print(json.dumps(row), flush=True)
        self._rows[row["variant"], row["batch"]] = row
        write_report(self._model | {"rows": list(self._rows.values())}, self._path)


def variant(text: str) -> tuple[str, list[int]]:
    """A variant's name and batches from the command line: NAME or NAME@BATCH,BATCH; no batches for all."""
    name, _, batches = text.partition("@")
    known = [*STOCK, *OURS]
    if name not in known:
        raise argparse.ArgumentTypeError(f"invalid choice: {name!r} (choose from {', '.join(known)})")
    return name, [int(batch) for batch in batches.split(",")] if batches else []


def main() -> None:
    parser = command_parser(__doc__)
    parser.add_argument("--output", type=Path, help="written after each measurement")
    parser.add_argument("--model", choices=list(CONTEXTS), default="glm")
    parser.add_argument(
        "--tiny", action="store_true", help="small layers and short texts, to try the benchmark"
    )
    parser.add_argument("--layers", type=int, help="instead of the shape's own number")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument(
        "--variants",
        nargs="*",
        type=variant,
        default=[],
        metavar="NAME",
        help=f"in order, NAME or NAME@BATCH,BATCH, of {', '.join([*STOCK, *OURS])}; all by default",
    )
    args = parser.parse_args()
    model, mtp = random_model(args.model, tiny=args.tiny, layers=args.layers)
    context = TINY_CONTEXT if args.tiny else CONTEXTS[args.model]
    results = Results(
        args.output,
        {
            "model": args.model,
            "layers": model.config.num_hidden_layers,
            "parameters": sum(p.numel() for p in model.parameters()),
            "context": context,
        },
    )
    bandwidth = read_bandwidth(2**28 if args.tiny else 2**32)
    machine = {
        "machine": torch.cuda.get_device_name() if DEVICE == "cuda" else DEVICE,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "read_TB_per_s": round(bandwidth / 1e12, 2),
    }
    failed = []
    for name, batches in args.variants or [(name, []) for name in (*STOCK, *OURS)]:
        kwargs = prepare(name, model, mtp, max(args.batches), context)
        for batch in batches or args.batches:
            floor = floor_bytes(model, batch, context) / bandwidth * 1e3
            row: dict[str, Any] = {"variant": name, "batch": batch, "floor_ms": round(floor, 2)}
            # The timed call compiles nothing: steps with prompts are compiled in the first one.
            with patch("mla_compile.engine.steps.EAGER_MIXED_STEPS", 0):
                row |= measured(model, batch, context, kwargs) | machine
            results.add(row)
            failed += [f"{name}, batch {batch}: {row['failed']}"] if "failed" in row else []
        restore(model)
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()
    if failed:
        raise SystemExit("\n".join(failed))


if __name__ == "__main__":
    main()

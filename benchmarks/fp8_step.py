"""A decode step of GLM-4.7-Flash's shape with weights in bfloat16 and in block FP8, of the same values.

    python -m benchmarks.fp8_step --output benchmarks/results/fp8_step.json

The package's own model, 47 layers and the MTP layer, random weights (`benchmarks.random_weights`), about 1,000 tokens a
row. For each batch size, number of drafts and mode: the floor (bytes of the weights and latents that a step must read,
over the bandwidth that a plain read reaches in the same run), `ms_per_step`, the median between two steps in which all
rows decode, and seconds of compiling and capturing that step. Steps with prompts, which are not timed, run eagerly.

Tokens: the same with `--judged-layers` of the shape, few, because many random layers turn any rounding into noise. The
bfloat16 model, run eagerly, scores their texts. `mean_gap` and `worst_gap` are the distances of a chosen token's logit
below the best one, `chance_gap` is the mean of random tokens: random weights make many near-ties, which rounding
decides. `agreement` is the share of positions where the model's most likely token is the chosen one.

The output has one row for each kind of weights, mode, number of drafts and batch: a run replaces the rows that it
measures.
"""

import statistics
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any, get_args
from unittest.mock import patch

import torch

from benchmarks.measuring import DEVICE, Marks, floor_bytes, read_bandwidth
from benchmarks.random_weights import Weights, random_model, settings_of
from benchmarks.reporting import add_row, command_parser, drop_rows, with_known_rows
from mla_compile import Engine, MLABatch, prefill_segment
from mla_compile.caches import allocate
from mla_compile.models import MLAForCausalLM

CONTEXT, PAGE_SIZE = 1000, 64
WARM_UP, NEW_TOKENS = 8, 72


def models(
    layers: int | None, weights: Iterable[Weights], *, mtp: bool, tiny: bool
) -> dict[Weights, MLAForCausalLM]:
    """A model for each kind of weights, on the GPU if there is one."""
    settings = settings_of("glm", layers, tiny=tiny)
    return {kind: random_model(settings, kind, mtp=mtp, device=DEVICE) for kind in weights}


def engine_of(
    model: MLAForCausalLM,
    max_rows: int,
    exact: bool,
    drafts: int = 0,
    head: Path | None = None,
    tokens_per_step: int | None = None,
) -> Engine:
    """head: the directory of an EAGLE-3 head, which drafts; None: the MTP layer does."""
    return Engine(
        model,
        num_speculative_tokens=drafts,
        drafter_model=head,
        max_rows=max_rows,
        max_model_len=CONTEXT + NEW_TOKENS + 8,
        max_tokens_per_step=tokens_per_step,
        page_size=PAGE_SIZE,
        batch_invariant=exact,
        prefix_caching=False,
    )


def prompts_of(model: MLAForCausalLM, batch: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(batch)
    found: list[list[int]] = torch.randint(
        1, model.vocab_size, (batch, CONTEXT), generator=generator
    ).tolist()
    return found


def steps(engine: Engine, prompts: list[list[int]]) -> tuple[list[list[int]], dict[str, float]]:
    """The new tokens of the prompts, and times."""
    marks = Marks()
    for _ in range(2):
        engine.generate(prompts, max_new_tokens=WARM_UP)
    with marks.after_launches(len(prompts)):
        found = engine.generate(prompts, max_new_tokens=NEW_TOKENS)
    ms = statistics.median(marks.intervals_ms()[2:])
    return [one.token_ids for one in found], {"ms_per_step": round(ms, 3)}


def judged(model: MLAForCausalLM, prompt: list[int], written: list[int]) -> dict[str, Any]:
    """The scores of tokens after a prompt by the model, run eagerly."""
    ids = torch.tensor(prompt + written[:-1], device=DEVICE)
    pages = -(-len(ids) // PAGE_SIZE)
    allocate(model.cache_specs(), 1 + pages, PAGE_SIZE)
    table = torch.arange(1, 1 + pages, dtype=torch.int32, device=DEVICE)[None]
    segment, positions = prefill_segment([len(ids)], [0], table, page_size=PAGE_SIZE)
    logits = model.logits(model(ids, positions, MLABatch(prefill=segment)).hidden[len(prompt) - 1 :]).float()
    best, tokens = logits.amax(-1), torch.tensor(written, device=DEVICE)
    gap = best - logits.gather(1, tokens[:, None])[:, 0]
    return {
        "agreement": round((logits.argmax(-1) == tokens).float().mean().item(), 3),
        "mean_gap": round(gap.mean().item(), 4),
        "worst_gap": round(gap.max().item(), 4),
        "chance_gap": round((best - logits.mean(-1)).mean().item(), 2),
    }


def written(
    model: MLAForCausalLM, mode: str, drafts: int, batches: list[int]
) -> dict[int, tuple[dict[str, float], list[int], list[int]]]:
    """For each batch size: times, and the first row's prompt and its completion."""
    found = {}
    with patch("mla_compile.engine.steps._compiles_mixed", lambda *_: False):
        engine = engine_of(model, max(batches), mode == "exact", drafts)
    for batch in batches:
        prompts = prompts_of(model, batch)
        texts, times = steps(engine, prompts)
        report = engine.capture_report()
        times |= {
            "compile_s": round(report.compile_seconds, 1),
            "capture_s": round(report.capture_seconds, 1),
        }
        found[batch] = times, prompts[0], texts[0]
    return found


def main() -> None:
    parser = command_parser(__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--judged-layers", type=int, default=4)
    parser.add_argument("--tiny", action="store_true", help="a small shape, for a CPU")
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--weights", nargs="*", choices=get_args(Weights), default=get_args(Weights))
    parser.add_argument("--drafts", type=int, nargs="*", default=[0])
    parser.add_argument("--modes", nargs="*", choices=["default", "exact"], default=["default", "exact"])
    args = parser.parse_args()
    report: dict[str, Any] = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if DEVICE == "cuda" else DEVICE,
        "layers": args.layers or 47,
        "judged_layers": args.judged_layers,
        "rows": [],
    }
    report = with_known_rows(report, args.output)
    mtp = any(args.drafts)
    few = models(args.judged_layers, get_args(Weights), mtp=mtp, tiny=args.tiny)
    all_of_them = models(args.layers, args.weights, mtp=mtp, tiny=args.tiny)
    bandwidth = read_bandwidth(2**32 if DEVICE == "cuda" else 2**24)
    for mode, drafts, (name, model) in product(args.modes, args.drafts, all_of_them.items()):
        of_few = written(few[name], mode, drafts, args.batches)
        for batch, (times, _, _) in written(model, mode, drafts, args.batches).items():
            row = {"weights": name, "mode": mode, "drafts": drafts, "batch": batch}
            drop_rows(report, row)
            floor = floor_bytes(model, batch, CONTEXT, drafts=drafts) / bandwidth
            row |= {
                "floor_ms": round(floor * 1e3, 3),
                **times,
                "gigabytes_of_weights": round(sum(p.nbytes for p in model.parameters()) / 1e9, 2),
                **judged(few["bf16"], *of_few[batch][1:]),
            }
            add_row(report, row, args.output)


if __name__ == "__main__":
    main()

"""Tokens a step of the shipped model on held-out text, and whether drafts change any token.

    python -m benchmarks.acceptance --output benchmarks/results/acceptance.json

The prompts are beginnings of verses and functions from chapters and files that the model was not trained on. Greedy
text of a small model repeats itself, which is easy to draft: a row also has the share of distinct 4-token runs.
"""

import json
import statistics
from pathlib import Path
from typing import Any

import torch

from benchmarks.reporting import add_row, command_parser
from mla_compile import Completion, Engine, SamplingParams, load_model, load_tokenizer
from mla_compile.defaults import SHIPPED_HEAD, SHIPPED_MODEL, DrafterName

PROMPTS = Path(__file__).with_name("held_out_prompts.json")
TOKENS = 128
DRAFTS: list[tuple[DrafterName, int]] = [
    *(("mtp", k) for k in (0, 1, 2, 3)),
    *(("ngram", k) for k in (1, 2, 3)),
    *(("eagle3", k) for k in (1, 2, 3)),
]
FIGURES: dict[DrafterName, str] = {
    "mtp": "acceptance_length",
    "ngram": "acceptance_length_ngram",
    "eagle3": "acceptance_length_eagle3",
}
"""The names in the result."""
SAMPLING = {"greedy": SamplingParams(), "temperature 0.7": SamplingParams(temperature=0.7, seed=1)}


def distinct_runs(completions: list[Completion], length: int = 4) -> float:
    """Share of distinct runs among all runs of `length` tokens, each completion counted by itself."""
    distinct = total = 0
    for completion in completions:
        ids = completion.token_ids
        runs = [tuple(ids[i : i + length]) for i in range(len(ids) - length + 1)]
        distinct, total = distinct + len(set(runs)), total + len(runs)
    return distinct / max(1, total)


def measure(prompts: list[list[int]], sampling: SamplingParams, device: str) -> dict[str, Any]:
    model = load_model(SHIPPED_MODEL, dtype=torch.float32, device=device)
    row: dict[str, Any] = {name: {} for name in FIGURES.values()}
    plain: list[list[int]] = []
    for drafter, k in DRAFTS:
        engine = Engine(
            model,
            num_speculative_tokens=k,
            drafter=drafter,
            drafter_model=SHIPPED_HEAD if drafter == "eagle3" else None,
            max_rows=16,
            max_model_len=512,
            compile=False,
        )
        completions = engine.generate(prompts, max_new_tokens=TOKENS, sampling=sampling, stop_ids=())
        tokens = [completion.token_ids for completion in completions]
        if k == 0:
            plain = tokens
            row["distinct_4_token_runs"] = round(distinct_runs(completions), 3)
        else:
            lengths = [completion.acceptance_length or 1.0 for completion in completions]
            row[FIGURES[drafter]][k] = round(statistics.mean(lengths), 3)
        row["same_tokens"] = row.get("same_tokens", True) and tokens == plain
    return row


def main() -> None:
    parser = command_parser(__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    tokenizer = load_tokenizer(SHIPPED_MODEL)
    assert tokenizer is not None
    held_out: dict[str, list[str]] = json.loads(PROMPTS.read_text(encoding="utf-8"))
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if args.device == "cuda" else args.device,
        "torch": torch.__version__,
        "dtype": "float32",
        "prompts_per_text": min(map(len, held_out.values())),
        "tokens_per_prompt": TOKENS,
        "rows": [],
    }
    for domain, texts in held_out.items():
        prompts = [tokenizer(text)["input_ids"] for text in texts]
        for name, sampling in SAMPLING.items():
            row = {"text": domain, "sampling": name, **measure(prompts, sampling, args.device)}
            add_row(report, row, args.output)


if __name__ == "__main__":
    main()

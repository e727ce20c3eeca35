"""How often the shipped model chooses the same token with its weights in FP8, on held-out text.

    python -m benchmarks.fp8_agreement --output benchmarks/results/fp8_agreement.json

The text is the model's greedy completion in float32 of the prompts of `benchmarks.acceptance`. Each model reads it, and
its most likely next token is compared at every position. Up to the first difference that is its own greedy text. A row
has the share of equal positions, and the number of tokens before the first difference.
"""

import json
import statistics
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.acceptance import PROMPTS
from benchmarks.reporting import add_row, command_parser
from mla_compile import Engine, MLABatch, load_model, load_tokenizer, prefill_segment
from mla_compile.caches import allocate
from mla_compile.defaults import SHIPPED_MODEL
from mla_compile.models import MLAForCausalLM

TOKENS = 128
PAGE_SIZE = 16
MODELS: list[tuple[torch.dtype, Literal["fp8"] | None]] = [
    (torch.float32, "fp8"),
    (torch.bfloat16, None),
    (torch.bfloat16, "fp8"),
]


def likeliest(model: MLAForCausalLM, ids: list[int], device: str) -> list[int]:
    """The model's choice after each of the tokens."""
    pages = -(-len(ids) // PAGE_SIZE)
    allocate(model.cache_specs(), 1 + pages, PAGE_SIZE)
    table = torch.arange(1, 1 + pages, dtype=torch.int32, device=device)[None]
    segment, positions = prefill_segment([len(ids)], [0], table, page_size=PAGE_SIZE)
    hidden = model(torch.tensor(ids, device=device), positions, MLABatch(prefill=segment)).hidden
    chosen: list[int] = model.logits(hidden).argmax(-1).tolist()
    return chosen


def agreement(model: MLAForCausalLM, texts: list[tuple[list[int], list[int]]], device: str) -> dict[str, Any]:
    """texts: prompts, and the completions that are compared."""
    same = []
    for prompt, written in texts:
        chosen = likeliest(model, prompt + written[:-1], device)[len(prompt) - 1 :]
        same.append([one == other for one, other in zip(chosen, written, strict=True)])
    places = [place for each in same for place in each]
    return {
        "agreement": round(statistics.mean(places), 4),
        "tokens_before_the_first_difference": round(
            statistics.mean([*each, False].index(False) for each in same), 1
        ),
        "bytes_of_weights": sum(parameter.nbytes for parameter in model.parameters()),
    }


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
        "prompts_per_text": min(map(len, held_out.values())),
        "tokens_per_prompt": TOKENS,
        "rows": [],
    }
    plain = load_model(SHIPPED_MODEL, dtype=torch.float32, device=args.device, mtp=False)
    engine = Engine(plain, num_speculative_tokens=0, max_rows=16, max_model_len=512, compile=False)
    for domain, beginnings in held_out.items():
        prompts = [tokenizer(text)["input_ids"] for text in beginnings]
        completions = engine.generate(prompts, max_new_tokens=TOKENS, stop_ids=())
        written = [each.token_ids for each in completions]
        texts = list(zip(prompts, written, strict=True))
        for dtype, quantize in MODELS:
            model = load_model(SHIPPED_MODEL, dtype=dtype, device=args.device, mtp=False, quantize=quantize)
            weights = {"text": domain, "dtype": str(dtype).removeprefix("torch."), "quantize": quantize}
            add_row(report, {**weights, **agreement(model, texts, args.device)}, args.output)


if __name__ == "__main__":
    main()

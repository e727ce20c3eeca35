"""A decode step of GLM-4.7-Flash's shape with an EAGLE-3 head's drafts, beside the MTP layer's and no drafts.

    python -m benchmarks.eagle3_step --output benchmarks/results/eagle3_step.json

The package's own model in bfloat16, 47 layers and the MTP layer, random weights; heads of random weights too: one with
Llama's layer, of the size of the published head for this model (145 million parameters, a vocabulary of 32,000), and
one with MLA in the target's sizes. About 1,000 tokens a row. For each drafter and batch size: the floor (bytes that a
step must read, over the bandwidth that a plain read reaches in the same run), `ms_per_step`, the median between two
steps in which all rows decode, and `tokens_per_s`, what this time gives at the published head's acceptance length, 2.4.

Tokens: with `--judged-layers` of the shape and `batch_invariant=True` each drafter's texts must equal those without
drafts (`same_tokens`): random heads are nearly always wrong, so this shows the steps right where drafts are rejected.
"""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import save_file

from benchmarks.fp8_step import CONTEXT, NEW_TOKENS, engine_of, models, prompts_of, steps
from benchmarks.measuring import DEVICE, floor_bytes, read_bandwidth
from benchmarks.reporting import add_row, command_parser, drop_rows, with_known_rows
from mla_compile import Engine
from mla_compile.models import MLAForCausalLM
from mla_compile.models.eagle3 import Eagle3Head
from mla_compile.models.eagle3_config import HeadConfig
from mla_compile.speculate.drafter import known_drafter

DRAFTS, ACCEPTANCE = 3, 2.4
HEADS = ("llama", "mla")
DRAFTERS = ("none", "mtp", *HEADS)
PUBLISHED = {1: 167.8, 32: 440.2}
"""Tokens per second by rows of SGLang with the published head, on one H100, at an acceptance length of 2.4."""


def head_config(kind: str, model: MLAForCausalLM) -> dict[str, Any]:
    arch = model.arch
    sizes = {
        "vocab_size": arch.vocab_size,
        "hidden_size": arch.hidden_size,
        "intermediate_size": 4 * arch.hidden_size,
    }
    common = {
        **sizes,
        "draft_vocab_size": min(32_000, arch.vocab_size),
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [0, 1, 2]
        },  # which a model of few layers has too
    }
    if kind == "llama":
        heads = {"num_attention_heads": arch.hidden_size // 128, "head_dim": 128}
        heads["num_key_value_heads"] = max(1, heads["num_attention_heads"] // 4)
        return {"architectures": ["LlamaForCausalLMEagle3"], **common, **heads}
    shapes = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    own = {name: getattr(arch, name) for name in shapes} | {"num_attention_heads": arch.num_heads}
    return {
        "architectures": ["Eagle3DeepseekV2ForCausalLM"],
        **common,
        **own,
        "fc_norm": True,
        "norm_output": True,
    }


@contextmanager
def random_head(kind: str, model: MLAForCausalLM) -> Iterator[Path]:
    """A directory with a head of random weights for a model."""
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        (directory / "config.json").write_text(json.dumps(head_config(kind, model)))
        config = HeadConfig.read(directory)
        drafted, vocab = config.draft_vocab_size, config.vocab_size
        with torch.device("meta"):
            head = Eagle3Head(config, 3, has_embedding=False, maps_ids=drafted < vocab, parallel=None)
        generator = torch.Generator().manual_seed(0)
        weights = {}
        for name, parameter in head.named_parameters():
            shape, stored = parameter.shape, name.replace("layer.", "midlayer.", 1)
            drawn = torch.randn(shape, generator=generator) * shape[-1] ** -0.5
            weights[stored] = (drawn if len(shape) > 1 else 1 + drawn).bfloat16()
        if drafted < vocab:
            weights["d2t"] = torch.arange(drafted) * (vocab // drafted - 1)
        save_file(weights, directory / "model.safetensors")
        yield directory


def engine_with(
    model: MLAForCausalLM, max_rows: int, drafter: str, head: Path | None, *, exact: bool
) -> Engine:
    with patch("mla_compile.engine.steps._compiles_mixed", lambda *_: False):
        return engine_of(model, max_rows, exact, _drafts(drafter), head)


def _drafts(drafter: str) -> int:
    return 0 if drafter == "none" else DRAFTS


def floor(model: MLAForCausalLM, drafter: str, head: Path | None, batch: int) -> float:
    """Bytes that a step must read."""
    drafts = _drafts(drafter)
    target = floor_bytes(model, batch, CONTEXT, drafts=drafts, by_mtp=head is None)
    kind = known_drafter("eagle3")
    assert kind is not None and kind.sizes is not None
    weights, of_token = (0, 0) if head is None else kind.sizes(head, model)
    return target + drafts * (weights + batch * CONTEXT * of_token)


def texts(model: MLAForCausalLM, drafter: str, head: Path | None, batch: int) -> list[list[int]]:
    """In exact mode."""
    engine = engine_with(model, batch, drafter, head, exact=True)
    completions = engine.generate(prompts_of(model, batch), max_new_tokens=NEW_TOKENS)
    return [completion.token_ids for completion in completions]


def main() -> None:
    parser = command_parser(__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--judged-layers", type=int, default=4)
    parser.add_argument("--tiny", action="store_true", help="a small shape, for a CPU")
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--drafters", nargs="*", choices=DRAFTERS, default=DRAFTERS)
    args = parser.parse_args()
    report: dict[str, Any] = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if DEVICE == "cuda" else DEVICE,
        "layers": args.layers or 47,
        "judged_layers": args.judged_layers,
        "rows": [],
    }
    report = with_known_rows(report, args.output)
    few, model = (
        models(layers, ["bf16"], mtp=True, tiny=args.tiny)["bf16"]
        for layers in (args.judged_layers, args.layers)
    )
    plain = texts(few, "none", None, max(args.batches))
    bandwidth = read_bandwidth(2**32 if DEVICE == "cuda" else 2**24)
    for drafter in args.drafters:
        with random_head(drafter, model) if drafter in HEADS else nullcontext() as head:
            same = texts(few, drafter, head, max(args.batches)) == plain
            engine = engine_with(model, max(args.batches), drafter, head, exact=False)
            for batch in args.batches:
                row: dict[str, Any] = {"drafter": drafter, "batch": batch}
                drop_rows(report, row)
                _, times = steps(engine, prompts_of(model, batch))
                emitted = batch * (1 if drafter == "none" else ACCEPTANCE)
                row |= {
                    "floor_ms": round(floor(model, drafter, head, batch) / bandwidth * 1e3, 3),
                    **times,
                    "tokens_per_s": round(emitted / times["ms_per_step"] * 1e3, 1),
                    "published_tokens_per_s": PUBLISHED.get(batch) if drafter == "llama" else None,
                    "same_tokens": same,
                }
                add_row(report, row, args.output)


if __name__ == "__main__":
    main()

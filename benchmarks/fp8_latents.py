"""FP8 latents beside latents in the weights' dtype: quality of the shipped model, kernels, and whole steps.

    python -m benchmarks.fp8_latents quality --output benchmarks/results/fp8_latents.json
    python -m benchmarks.fp8_latents kernels --output benchmarks/results/fp8_latents.kernels.json
    python -m benchmarks.fp8_latents steps --layers 12 --output benchmarks/results/fp8_latents.steps.json
    python -m benchmarks.fp8_latents steps --shape v3 --layers 4 --output benchmarks/results/fp8_latents.steps.json

`quality`, in float32 on a CPU or GPU: on held-out beginnings and the model's own greedy text after them, the relative
error of latents (of the first layer: of the format alone; of the last: of all layers before it too), the largest and
mean error of a logit, the mean KL divergence, and the share of positions with the same most likely token; acceptance
lengths; the share of equal tokens in turns 2 and 10 of a chat whose history is that of the plain model; and the loss of
the second half of 2,048 positions that repeat the first half.

`kernels`, on a GPU: every decode backend, checked against float64, then microseconds of replayed CUDA graphs; the floor
is a plain read of the latents. `steps`: the median ms of a step of GLM-4.7-Flash's or DeepSeek-V3's shape with random
weights, the floor, and the rows of this length that fit beside the weights. Its other rows in the output are kept.
"""

import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.acceptance import PROMPTS
from benchmarks.decode import RANK, Case, expected, inputs, ours
from benchmarks.fp8_step import NEW_TOKENS, PAGE_SIZE, steps
from benchmarks.kernels import graph_us, relative_error
from benchmarks.measuring import DEVICE, floor_bytes, latent_bytes, read_bandwidth
from benchmarks.random_weights import random_model, settings_of
from benchmarks.reporting import add_row, command_parser, drop_rows, with_known_rows
from mla_compile import Engine, MLABatch, load_model, load_tokenizer, prefill_segment
from mla_compile.caches import allocate
from mla_compile.defaults import SHIPPED_HEAD, SHIPPED_MODEL, KvCacheDtype
from mla_compile.engine import EngineConfig
from mla_compile.engine.device_memory import usable_memory
from mla_compile.engine.memory import plan_memory
from mla_compile.latents import FP8, fp8_width, pack, unpack
from mla_compile.models import MLAForCausalLM

DTYPES: tuple[KvCacheDtype, ...] = ("auto", "fp8")
TOKENS, TURN, TURNS, CHATS = 64, 32, (2, 10), 2
"""New tokens after a beginning and of a turn; the compared turns; chats of a text."""


def forward(model: MLAForCausalLM, ids: list[int], dtype: KvCacheDtype) -> tuple[Tensor, list[Tensor]]:
    """Logits of all tokens, and the latents of the first and last layer as they are read."""
    specs = [spec.stored_as(dtype) for spec in model.cache_specs()]
    pages = -(-len(ids) // PAGE_SIZE)
    allocate(specs, 1 + pages, PAGE_SIZE)
    table = torch.arange(1, 1 + pages, dtype=torch.int32, device=model.device)[None]
    segment, positions = prefill_segment([len(ids)], [0], table, page_size=PAGE_SIZE)
    hidden = model(torch.tensor(ids, device=model.device), positions, MLABatch(prefill=segment)).hidden
    target, rank = [spec for spec in specs if spec.owner == "target"], model.arch.kv_lora_rank
    caches = [spec.cache[1:].flatten(0, 1)[: len(ids)] for spec in (target[0], target[-1])]
    read = [unpack(x, rank, torch.float32) if x.dtype == FP8 else x for x in caches]
    return model.logits(hidden).float(), [latents[:, :rank].clone() for latents in read]


def compared(model: MLAForCausalLM, texts: Sequence[list[int]]) -> dict[str, Any]:
    found: dict[str, list[Tensor]] = {}
    for ids in texts:
        (plain, plain_latents), (fp8, fp8_latents) = (forward(model, ids, dtype) for dtype in DTYPES)
        p, q = plain.log_softmax(-1), fp8.log_softmax(-1)
        relative = [
            ((b - a).norm() / a.norm())[None] for a, b in zip(plain_latents, fp8_latents, strict=True)
        ]
        for name, values in {
            "first_layer_error": relative[0],
            "last_layer_error": relative[1],
            "logit_error": (fp8 - plain).abs().amax(-1),
            "kl": (p.exp() * (p - q)).sum(-1),
            "same_token": (plain.argmax(-1) == fp8.argmax(-1)).float(),
        }.items():
            found.setdefault(name, []).append(values)
    means = {name: round(float(torch.cat(values).mean()), 6) for name, values in found.items()}
    return means | {"worst_logit_error": round(float(torch.cat(found["logit_error"]).max()), 3)}


def engine_with(model: MLAForCausalLM, dtype: KvCacheDtype, **settings: Any) -> Engine:
    return Engine(model, kv_cache_dtype=dtype, max_rows=16, max_model_len=2048, compile=False, **settings)


def acceptance(model: MLAForCausalLM, prompts: list[list[int]], dtype: KvCacheDtype) -> dict[str, Any]:
    """Acceptance lengths with three drafts, of greedy text."""
    row = {}
    for name, head in (("mtp", None), ("eagle3", SHIPPED_HEAD)):
        engine = engine_with(model, dtype, num_speculative_tokens=3, drafter=name, drafter_model=head)
        completions = engine.generate(prompts, max_new_tokens=TOKENS, stop_ids=())
        row[name] = round(statistics.mean(each.acceptance_length or 1.0 for each in completions), 3)
    return row


def chat(
    model: MLAForCausalLM, questions: Sequence[list[int]], dtype: KvCacheDtype, history: Sequence[list[int]]
) -> list[list[int]]:
    """The answer of each turn. The text before it has the answers of `history`, or its own without them.

    Latents of earlier turns are in the engine's prefix cache. With a history, only `TURNS` are answered at length.
    """
    engine = engine_with(model, dtype, num_speculative_tokens=0)
    text: list[int] = []
    answers = []
    for turn, question in enumerate(questions):
        text = text + question
        length = 1 if history and turn + 1 not in TURNS else TURN
        answers.append(engine.generate([text], max_new_tokens=length, stop_ids=())[0].token_ids)
        text = text + (history or answers)[turn]
    return answers


def chats(model: MLAForCausalLM, prompts: Sequence[list[int]]) -> dict[str, float]:
    """Share of equal tokens in some turns of several chats."""
    same: dict[int, list[bool]] = {turn: [] for turn in TURNS}
    for i in range(CHATS):
        questions = [prompts[(i + turn) % len(prompts)] for turn in range(TURNS[-1])]
        plain = chat(model, questions, "auto", [])
        fp8 = chat(model, questions, "fp8", plain)
        for turn, found in same.items():
            found += [one == other for one, other in zip(plain[turn - 1], fp8[turn - 1], strict=True)]
    return {f"turn_{turn}": round(statistics.mean(found), 3) for turn, found in same.items()}


def copies(model: MLAForCausalLM, ids: list[int], dtype: KvCacheDtype) -> dict[str, float]:
    """Loss and accuracy of the repetition of a text."""
    logits, _ = forward(model, ids + ids, dtype)
    chosen, following = logits[len(ids) - 1 : -1], torch.tensor(ids, device=logits.device)
    loss = torch.nn.functional.cross_entropy(chosen, following)
    return {
        "copy_loss": round(float(loss), 4),
        "copy_accuracy": round(float((chosen.argmax(-1) == following).float().mean()), 4),
    }


def quality(report: dict[str, Any], output: Path | None, device: str) -> None:
    tokenizer = load_tokenizer(SHIPPED_MODEL)
    assert tokenizer is not None
    model = load_model(SHIPPED_MODEL, dtype=torch.float32, device=device)
    held_out: dict[str, list[str]] = json.loads(PROMPTS.read_text(encoding="utf-8"))
    for domain, beginnings in held_out.items():
        prompts = [tokenizer(text)["input_ids"] for text in beginnings]
        greedy = engine_with(model, "auto", num_speculative_tokens=0)
        written = greedy.generate(prompts, max_new_tokens=TOKENS, stop_ids=())
        texts = [prompt + each.token_ids for prompt, each in zip(prompts, written, strict=True)]
        add_row(report, {"text": domain, **compared(model, texts)}, output)
        add_row(report, {"text": domain, "chats": CHATS, **chats(model, prompts)}, output)
        whole = [token for text in texts for token in text][:1024]
        for dtype in DTYPES:
            row = {"text": domain, "kv_cache_dtype": dtype, "acceptance": acceptance(model, prompts, dtype)}
            add_row(report, row | copies(model, whole, dtype), output)


def in_fp8(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of `mla_decode` with FP8 latents."""
    cache = args[2]
    packed = pack(cache.flatten(0, 1)[:, :RANK], cache.flatten(0, 1)[:, RANK:])
    return (*args[:2], packed.unflatten(0, cache.shape[:2]), *args[3:])


def kernels(report: dict[str, Any], output: Path | None, cases: Sequence[Case]) -> None:
    bandwidth = read_bandwidth(2**32)
    for case in cases:
        tokens = sum(case.lengths)
        num_copies = max(2, min(64, 2**28 // (tokens * 1152)))
        for name in DTYPES:
            calls = [in_fp8(args) if name == "fp8" else args for args in inputs(case, num_copies)]
            q_latent, q_pe, cache, *rest = calls[0]
            values = unpack(cache, RANK, torch.bfloat16) if name == "fp8" else cache
            right, _ = expected((q_latent, q_pe, values, *rest))
            of_token = cache.shape[2] * cache.element_size()
            row: dict[str, Any] = {"case": case.title(), "kv_cache_dtype": name}
            row["floor_us"] = round(tokens * of_token / bandwidth * 1e6, 1)
            runs = [dict(ours(args)) for args in calls]
            for backend in runs[0]:
                error = relative_error(runs[0][backend]()[0], right)
                assert error < 2e-2, f"{backend}: {error}"
                row[backend] = round(graph_us([each[backend] for each in runs]), 1)
            add_row(report, row, output)


def decode_cases(contexts: Sequence[int], rows: Sequence[int], heads: Sequence[int]) -> Iterator[Case]:
    for h in heads:
        for context in contexts:
            yield from (
                Case(h, (context,) * n, q_len) for n in rows for q_len in ((1, 4) if n == 32 else (1,))
            )


def timed_steps(
    report: dict[str, Any],
    output: Path | None,
    *,
    shape: str,
    layers: int | None,
    tiny: bool,
    contexts: Sequence[int],
    rows: Sequence[int],
) -> None:
    """One engine for each dtype. Most rows run first: the other calls find their prompts in the prefix cache."""
    model = random_model(settings_of(shape, layers, tiny=tiny), "bf16", mtp=False, device=DEVICE)
    bandwidth = read_bandwidth(2**24 if tiny else 2**32)
    longest = max(contexts) + NEW_TOKENS + 8
    for dtype in DTYPES:
        settings: dict[str, Any] = {"kv_cache_dtype": dtype, "num_speculative_tokens": 0}
        settings |= {"max_model_len": longest, "page_size": PAGE_SIZE}
        planned, usable = plan_memory(model, EngineConfig(**settings)), usable_memory(model.device)
        fit = {context: planned.most_rows(usable, context + NEW_TOKENS + 8) for context in contexts}
        able = {context: sorted((n for n in rows if n <= fit[context]), reverse=True) for context in contexts}
        pages = max(ns[0] * -(-(context + NEW_TOKENS + 8) // PAGE_SIZE) for context, ns in able.items())
        with patch("mla_compile.engine.steps._compiles_mixed", lambda *_: False):
            engine = Engine(
                model, max_rows=max(ns[0] for ns in able.values()), num_pages=1 + pages, **settings
            )
        for context, n in ((context, n) for context, ns in able.items() for n in ns):
            generator = torch.Generator().manual_seed(context)
            prompts = torch.randint(1, model.vocab_size, (n, context), generator=generator).tolist()
            _, times = steps(engine, prompts)
            latents = latent_bytes(model.config, n * context) * model.config.num_hidden_layers
            read = floor_bytes(model, n, context)
            if dtype == "fp8":
                width = model.arch.kv_lora_rank + model.arch.qk_rope_head_dim
                read -= latents * (
                    1 - fp8_width(model.arch.kv_lora_rank, model.arch.qk_rope_head_dim) / width / 2
                )
            row = {"shape": shape, "layers": model.config.num_hidden_layers, "context": context, "rows": n}
            row |= {"kv_cache_dtype": dtype}
            drop_rows(report, row)
            row |= {"rows_that_fit": fit[context], "floor_ms": round(read / bandwidth * 1e3, 3)}
            add_row(report, row | times, output)
        engine.close()
        del engine  # and its graphs


def main() -> None:
    parser = command_parser(__doc__)
    parser.add_argument("what", choices=["quality", "kernels", "steps"])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--device", default=DEVICE)
    parser.add_argument("--contexts", type=int, nargs="*", default=[1024, 8192])
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 16, 32, 128])
    parser.add_argument("--heads", type=int, nargs="*", default=[20, 16, 128])
    parser.add_argument("--shape", choices=["glm", "v3"], default="glm")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--tiny", action="store_true", help="steps of a small shape, for a CPU")
    args = parser.parse_args()
    report: dict[str, Any] = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if args.device == "cuda" else args.device,
        "rows": [],
    }
    if args.what == "quality":
        quality(report, args.output, args.device)
    elif args.what == "kernels":
        kernels(report, args.output, list(decode_cases(args.contexts, args.rows, args.heads)))
    else:
        sizes = {"contexts": args.contexts, "rows": args.rows}
        report = with_known_rows(report, args.output)
        timed_steps(report, args.output, shape=args.shape, layers=args.layers, tiny=args.tiny, **sizes)


if __name__ == "__main__":
    main()

"""Generates the figures of README.md and docs/ from the committed results, and the help texts of the commands.

    python -m benchmarks.tables            # rewrites the text between the marks, after a benchmark has run
    python -m benchmarks.tables --check    # changes nothing; exit code 1 if a page is out of date

A page marks the place of a part by its name: `<!-- filled: decode -->`, the part, `<!-- /filled -->`. Each function of
`PARTS` generates one part, sentences with measured figures included.
"""

import functools
import json
import re
import statistics
import sys
import textwrap
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path
from typing import Any

from benchmarks.reporting import card_name, command_parser
from stress.sanitize import summaries

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PLACE = re.compile(r"(<!-- filled: ([\w.]+) -->\n)(?:(?!<!-- filled).)*?(<!-- /filled -->)", re.DOTALL)

TEXTS = {"bible": "prose", "python": "Python", "high": "Python", "low": "prose", "none": "none accepted"}
"""The benchmarks' names of texts, in words."""
VARIANTS = {
    "stock_dynamic": "stock, dynamic cache",
    "stock_static_inductor": "stock, static cache, compiled with Inductor",
    "stock_static_mla": 'stock, static cache, compiled with `backend="mla"`',
    "ours_k0": "`accelerate(model)`",
    "ours_k1": "with 1 draft: a step verifies 2 tokens a row",
    "ours_k3": "with 3 drafts: a step verifies 4 tokens a row",
}
SERVED = {"tokens_per_s": "tokens/s", "p50_ms": "median ms", "p99_ms": "99th percentile ms"}


SHAPES = {"glm": "GLM-4.7-Flash's shape", "v2": "DeepSeek-V2's", "v3": "DeepSeek-V3's"}
WEIGHTS = {"bf16": "bfloat16", "fp8": "FP8"}


@functools.cache
def result(name: str) -> dict[str, Any]:
    """The results of a benchmark: `benchmarks/results/NAME.json`."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def row_of(name: str, **wanted: object) -> dict[str, Any]:
    """The only entry of a result with these values; KeyError for none or several."""
    rows = [row for row in result(name)["rows"] if all(row.get(key) == wanted[key] for key in wanted)]
    if len(rows) != 1:
        raise KeyError(f"{name}: {len(rows)} rows with {wanted}")
    return rows[0]


def sentences(text: str) -> str:
    """A paragraph in lines of 120 characters."""
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False) + "\n"


def table(header: Iterable[object], rows: Iterable[Iterable[object]]) -> str:
    """A Markdown table behind an empty line; None is shown as "-"."""
    header = list(header)
    lines = [header, ["---"] * len(header), *rows]
    return "\n" + "".join(
        "| " + " | ".join("-" if x is None else str(x) for x in line) + " |\n" for line in lines
    )


def fixed(value: float | None, digits: int = 1) -> str | None:
    """With this number of decimals."""
    return None if value is None else f"{value:,.{digits}f}"


def least_bold(values: list[float | None]) -> list[str | None]:
    """One decimal each, the least in bold."""
    least = min(value for value in values if value is not None)
    return [f"**{fixed(value)}**" if value == least else fixed(value) for value in values]


def faster_rival() -> tuple[int, float]:
    """Of `benchmarks.decode`: the number of cases, and the faster rival's time over ours (geometric mean)."""
    rows = result("decode")["rows"]
    ratios = [min(row[rival] for rival in ("fa3", "FlashMLA") if rival in row) / row["gluon"] for row in rows]
    return len(rows), statistics.geometric_mean(ratios)


def ahead(ratio: float) -> str:
    """A rival's time over ours, in words."""
    return f"{abs(1 - ratio):.0%} {'ahead of' if ratio < 1 else 'behind'}"


# --- the parts


def figures() -> str:
    """Four figures, each with the command that measures it."""
    stock, ours = (
        row_of("transformers_generate.glm", variant=variant, batch=8)["ms_per_step"]
        for variant in ("stock_static_inductor", "ours_k0")
    )
    (one, plain), (many, plain_many) = (
        [row_of("eagle3_step", drafter=drafter, batch=batch)["tokens_per_s"] for drafter in ("llama", "none")]
        for batch in (1, 32)
    )
    served = row_of("serving", model="v3", k=0, prompt_tokens_a_step=1024)
    calm, busy = (served[when]["p99_ms"] for when in ("decode_only", "with_long_prompts"))
    long = row_of("decode", case="16 heads, 1 x 65536, q_len 1")
    num_cases, ratio = faster_rival()
    rows = [
        (
            "a step of transformers' `generate`, GLM-4.7-Flash's shape (30B), 8 rows",
            f"**{ours:.1f} ms**; {stock:.1f} ms stock, compiled with Inductor ({stock / ours:.1f} times)",
            "transformers_generate",
        ),
        (
            "tokens a second of 1 and of 32 rows, GLM-4.7-Flash's shape with an EAGLE-3 head, at 2.4 tokens a step, "
            "which SGLang reports for the published head",
            f"**{one:,.0f}** and **{many:,.0f}**; {plain:,.0f} and {plain_many:,.0f} without drafts",
            "eagle3_step",
        ),
        (
            f"time between two tokens, 99th percentile: {served['rows']} rows of 12 layers of DeepSeek-V3 decode while "
            f"prompts of {served['prompt']:,} tokens arrive, read {served['prompt_tokens_a_step']:,} a step",
            f"**{busy:.1f} ms**; {calm:.1f} ms before they arrive",
            "serving",
        ),
        (
            "decode attention over one row of 65,536 tokens",
            f"**{long['gluon']:.1f} us**; FlashMLA {long['FlashMLA']:.1f}, FlashInfer {long['fa3']:.1f}. Over "
            f"{num_cases} cases, the faster of the two is on average {ahead(ratio)} ours",
            "decode",
        ),
    ]
    return table(
        ["on one H200, bfloat16", "", "command"],
        ((what, figure, f"`python -m benchmarks.{command}`") for what, figure, command in rows),
    )


def generation() -> str:
    """Speculation on a CPU."""
    report = result("generation.cpu")
    machine = report["machine"]
    return sentences(
        f"{machine['cpus']} CPU cores, torch {machine['torch']}, {report['dtype']}, {report['tokens']} tokens."
    ) + table(
        [
            "drafts",
            "tokens/s",
            "tokens a step",
            "speed-up",
            "of the ideal",
            "cold compile",
            "warm compile",
            "same tokens",
        ],
        (
            (
                row["k"],
                row["tokens_per_s"],
                fixed(row["acceptance_length"], 2),
                row["speed_up"],
                row["of_ideal"],
                f"{row['cold_compile_s']} s",
                f"{row['warm_compile_s']} s",
                _yes(row["same_tokens"]),
            )
            for row in report["rows"]
        ),
    )


def compile_time() -> str:
    """The time of a compile, by stage."""
    report = result("compile_time.cpu")
    names = {
        "dynamo": "Dynamo",
        "our_passes": "our passes",
        "aot_autograd": "AOTAutograd",
        "inductor_graph_passes": "Inductor's passes",
        "inductor_lowering": "lowering",
        "inductor_scheduling": "scheduling",
        "inductor_codegen": "writing kernels",
        "waiting_for_compilers": "waiting for the C++ compiler",
        "loading_from_caches": "loading",
        "other": "the rest",
    }
    return sentences(
        f"{report['machine']['cpus']} CPU cores, torch {report['machine']['torch']}; seconds of wall time, "
        "except the CPU time."
    ) + table(
        ["caches", "all", "CPU time", *names.values()],
        (
            [row["caches"], row["seconds"], row["cpu_s"], *(fixed(row["stages"][name]) for name in names)]
            for row in report["rows"]
        ),
    )


def first_text() -> str:
    """The time to the first text, by entrance."""
    report = result("first_text.cpu")
    names = {
        "mla-compile generate": "`mla-compile generate`",
        "mla_compile.generate": "`mla_compile.generate`, 16 tokens",
        "accelerate": "`generate` of an accelerated model, 16 tokens",
        "mla-compile serve": "`mla-compile serve`, until it is ready",
    }
    seconds = {(row["entrance"], row["caches"]): row.get("ready_s", row["first_s"]) for row in report["rows"]}
    return sentences(f"{report['cores']} CPU cores, torch {report['torch']}; seconds.") + table(
        ["", "empty caches", "filled caches"],
        (
            [words, *(fixed(seconds[name, caches], 1) for caches in ("cold", "warm"))]
            for name, words in names.items()
        ),
    )


def acceptance() -> str:
    """Tokens a step on held-out text."""
    report = result("acceptance")
    names = {"MTP": "", "EAGLE-3": "_eagle3", "n-gram": "_ngram"}
    columns = [(name, k) for name in names for k in "123"]
    return sentences(
        f"{report['prompts_per_text']} prompts a text, {report['tokens_per_prompt']} tokens each, {report['dtype']} "
        f"on the CPU, torch {report['torch']}."
    ) + table(
        ["text", "sampling", *(f"{name}, {k}" for name, k in columns), "same tokens"],
        (
            (
                TEXTS[row["text"]],
                row["sampling"],
                *(fixed(row["acceptance_length" + names[name]][k], 2) for name, k in columns),
                _yes(row["same_tokens"]),
            )
            for row in report["rows"]
        ),
    )


def fp8_latents() -> str:
    """Quality of FP8 latents beside float32 ones, of the shipped model."""
    report = result("fp8_latents")

    def of(domain: str) -> dict[str, Any]:
        rows = [row for row in report["rows"] if row["text"] == domain]
        auto, fp8 = (next(r for r in rows if r.get("kv_cache_dtype") == name) for name in ("auto", "fp8"))
        both = {key: value for row in rows if "kv_cache_dtype" not in row for key, value in row.items()}
        return both | {"auto": auto, "fp8": fp8}

    def pair(row: dict[str, Any], *keys: str) -> str:
        found = [functools.reduce(lambda x, key: x[key], keys, row[name]) for name in ("auto", "fp8")]
        return " / ".join(fixed(value, 3) for value in found)

    domains = list(dict.fromkeys(row["text"] for row in report["rows"]))
    measured = {domain: of(domain) for domain in domains}
    figures = {
        "error of a latent, first layer / last layer": lambda r: (
            f"{100 * r['first_layer_error']:.1f}% / {100 * r['last_layer_error']:.1f}%"
        ),
        "largest error of a logit at a position, mean": lambda r: fixed(r["logit_error"], 3),
        "KL divergence, nats": lambda r: fixed(r["kl"], 4),
        "positions with the same likeliest token": lambda r: f"{100 * r['same_token']:.1f}%",
        "same tokens in turn 2 / turn 10 of a chat": lambda r: (
            f"{100 * r['turn_2']:.0f}% / {100 * r['turn_10']:.0f}%"
        ),
        "tokens a step with 3 MTP drafts: float32 / FP8": lambda r: pair(r, "acceptance", "mtp"),
        "tokens a step with 3 EAGLE-3 drafts: float32 / FP8": lambda r: pair(r, "acceptance", "eagle3"),
        "loss of a copied text: float32 / FP8": lambda r: pair(r, "copy_loss"),
        "accuracy of a copied text: float32 / FP8": lambda r: pair(r, "copy_accuracy"),
    }
    return sentences(
        f"The shipped model in float32 with FP8 latents, beside float32 latents; {report['device']}, torch "
        f"{report['torch']}."
    ) + table(
        ["", *(TEXTS[domain] for domain in domains)],
        ((name, *(figure(measured[domain]) for domain in domains)) for name, figure in figures.items()),
    )


def fp8_agreement() -> str:
    """Effect of weights in FP8 on the tokens of the shipped model."""
    report = result("fp8_agreement")
    return sentences(
        f"{report['prompts_per_text']} prompts a text, {report['tokens_per_prompt']} tokens each, on the CPU, torch "
        f"{report['torch']}. The text is the model's own in float32."
    ) + table(
        [
            "text",
            "dtype",
            "weights",
            "positions with the same token",
            "tokens before the first difference",
            "MB",
        ],
        (
            (
                TEXTS[row["text"]],
                row["dtype"],
                "FP8" if row["quantize"] else "plain",
                f"{100 * row['agreement']:.1f}%",
                fixed(row["tokens_before_the_first_difference"], 1),
                fixed(row["bytes_of_weights"] / 1e6, 1),
            )
            for row in report["rows"]
        ),
    )


def _draft_length(name: str) -> str:
    report = result(name)
    lengths = ["0", "1", "2", "3"]
    return sentences(
        f"{report['device']}, torch {report['torch']}, {report['tokens_per_prompt']} tokens a prompt; tokens a second."
    ) + table(
        ["text", "rows", "tokens a step at 3", *lengths],
        (
            (
                TEXTS[row["text"]],
                row["rows"],
                fixed(row["acceptance_length"]["3"], 2),
                *(
                    fixed(row["tokens_per_s"][length], 0 if row["tokens_per_s"]["0"] > 500 else 1)
                    for length in lengths
                ),
            )
            for row in report["rows"]
        ),
    )


def _serving(model: str) -> str:
    report = result("serving")
    rows = []
    for row in report["rows"]:
        if row["model"] == model and "decode_only" in row:
            what = "stock `generate`, static cache, compiled" if "stock" in row else f"{row['k']} drafts"
            before, while_ = row["decode_only"], row["with_long_prompts"]
            rows.append(
                (
                    what,
                    row.get("prompt_tokens_a_step"),
                    fixed(row.get("acceptance_length"), 2),
                    *(fixed(before[key], 0 if key == "tokens_per_s" else 2) for key in SERVED),
                    *(fixed(while_[key], 0 if key == "tokens_per_s" else 2) for key in SERVED),
                    fixed(100 * while_["tokens_per_s"] / before["tokens_per_s"], 0),
                    fixed(row.get("host_us_of_a_mixed_step"), 0),
                )
            )
    first = next(row for row in report["rows"] if row["model"] == model)
    return sentences(
        f"{report['gpu']}, torch {report['torch']}, {first['rows']} rows, prompts of {first['prompt']:,} tokens."
    ) + table(
        [
            "",
            "prompt tokens a step",
            "tokens a row and step",
            *(f"decode only: {what}" for what in SERVED.values()),
            *(f"with prompts: {what}" for what in SERVED.values()),
            "tokens/s kept, %",
            "host us of a mixed step",
        ],
        rows,
    )


def scheduler() -> str:
    """Host time of planning."""
    us = result("serving")["scheduler_us_256_rows"]
    return sentences(f"Planning a step of 256 rows and processing its report takes {us} us on the host.")


def first_token() -> str:
    """Time to the first token of a prompt alone."""
    rows = [row for row in result("serving")["rows"] if "first_token_ms" in row]
    models = {"v3": "12 layers of DeepSeek-V3's architecture", "shipped": "the shipped model"}
    return sentences(
        " ".join(
            f"One prompt of {row['prompt']:,} tokens, alone and in one step, of {models[row['model']]}: "
            f"{fixed(row['first_token_ms'])} ms to the first token; its kernels take {fixed(row['kernels_ms'])} ms."
            for row in rows
        )
    )


def _transformers(name: str) -> str:
    report = result(f"transformers_generate.{name}")
    batches = [1, 8, 32]
    cells = {(row["variant"], row["batch"]): row for row in report["rows"]}
    ours = [cells["ours_k0", batch] for batch in batches]
    read = ours[0]["read_TB_per_s"]
    measured = [v for v in VARIANTS if (v, 1) in cells]
    by_generation = [v for v in measured if "mean_ms" not in cells[v, 1]]  # stock's, on the fastest host
    lines = [
        (
            f"floor: weights and latents, read once at {read} TB/s",
            *(fixed(row["floor_ms"], 2) for row in ours),
        ),
    ]
    lines += [(VARIANTS[v], *(fixed(cells[v, b]["ms_per_step"], 2) for b in batches)) for v in measured]
    text = sentences(
        f"{ours[0]['machine']}, torch {ours[0]['torch']}, transformers {ours[0]['transformers']}, bfloat16, "
        f"{report['layers']} layers, {report['parameters'] / 1e9:.1f}B parameters with random values, about "
        f"{report['context']:,} tokens a row; milliseconds a step."
    ) + table(["", *(f"batch {batch}" for batch in batches)], lines)
    if by_generation:
        text += "\n" + sentences(
            "Stock steps with the dynamic cache, and those of batch 1 with Inductor, wait for the host. Their figures "
            "are from the fastest host of three; the other two took up to 1.6 times as long. They are times of whole "
            "generations; the other lines are times between events."
        )
    return text


def decode() -> str:
    """Decode attention, every case."""
    report = result("decode")
    kernels = {"gluon": "ours (`gluon`)", "triton": "portable (`triton`)", "fa3": "FlashInfer fa3"}
    kernels["FlashMLA"] = "FlashMLA"
    num_cases, ratio = faster_rival()
    machine = report["machine"]
    return (
        sentences(
            f"{machine['gpu']}, torch {machine['torch']}, microseconds. A plain sum read {report['read_TB_per_s']} "
            f"TB/s, a large cuBLAS product sustained {report['product_TFLOP_per_s']} TFLOP/s."
        )
        + table(
            ["heads, rows x context, query tokens a row", "floor", *kernels.values()],
            (
                (row["case"], row["floor"], *least_bold([row.get(kernel) for kernel in kernels]))
                for row in report["rows"]
            ),
        )
        + "\n"
        + sentences(
            f"On average over {num_cases} cases the faster rival is {ahead(ratio)} ours (geometric mean)."
        )
    )


def prefill() -> str:
    """Prefill attention, every case."""
    report = result("prefill")
    kernels = {
        "absorbed": "ours, absorbed",
        "flash_attn": "flash-attn-4",
        "triton": "our Triton kernel",
        "sdpa_expanded": "torch's, expansion included",
        "sdpa": "torch's alone",
    }
    machine = report["machine"]
    rows = []
    for row in report["rows"]:
        *whole, alone = (row.get(name) for name in kernels)
        rows.append((row["case"], fixed(row["floor"]), *least_bold(whole), fixed(alone)))
    return sentences(
        f"{machine['gpu']}, torch {machine['torch']}, flash-attn-4 {machine['flash-attn-4']}, microseconds. A large "
        f"cuBLAS product sustained {report['product_TFLOP_per_s']} TFLOP/s."
    ) + table(["heads: chunks x new tokens after cached ones", "floor", *kernels.values()], rows)


def batch_invariance() -> str:
    """Number of completions that depend on the rest of their batch."""
    rows = [row for row in result("batch_invariance")["rows"] if row["part"] == "differing"]
    counts = {(row["run"], row["batch_invariant"]): row["different"] for row in rows}
    runs = list(dict.fromkeys(row["run"] for row in rows))
    again = row_of("batch_invariance", part="again")["different"]
    (found,) = {count for of_process in again for count in of_process}

    def listed(run: str, batch_invariant: bool) -> str:
        return ", ".join(map(str, counts[run, batch_invariant]))

    before = sentences(
        f"How many of {rows[0]['prompts']} completions with {rows[0]['tokens']} tokens each (the shipped model, "
        "bfloat16) differ from those of one row without drafts, in each repetition:"
    )
    names = {
        "shipped": "the shipped model",
        "v3": "12 layers of V3's shape",
        "glm": "8 layers of GLM's shape",
    }
    compared = [
        (
            names[row["model"]],
            f"{row['tokens']:,}",
            f"{row['positions_with_latents']:,}",
            f"{row['different']} of {row['requests']}",
        )
        for row in result("batch_invariance")["rows"]
        if row["part"] == "compared"
    ]
    after = sentences(
        f"By default too, {len(again)} processes with an empty compile cache and {len(again[0])} engines in each gave "
        f"the same tokens: {found} of {rows[0]['prompts']} completions differ. `check_batch_invariance` compared, with "
        "0 and 3 drafts, greedy and sampled:"
    ) + table(["", "tokens", "positions with latents", "requests that differ"], compared)
    header = ["beside one row without drafts", "default", "`batch_invariant=True`"]
    counted = table(header, [[run, listed(run, False), listed(run, True)] for run in runs])
    return before + counted + "\n" + after


def batch_invariance_cost() -> str:
    """Milliseconds a step, default and batch-invariant, of all cases that were measured in both modes."""
    batches = (1, 8, 32)
    times: dict[str, dict[tuple[bool, int], float]] = {}
    glm, v3 = result("fp8_step"), result("transformers_generate.v3")
    for row in glm["rows"]:
        of = f"{glm['layers']} layers of GLM-4.7-Flash's shape, {WEIGHTS[row['weights']]}, {row['drafts']} drafts"
        times.setdefault(of, {})[row["mode"] == "exact", row["batch"]] = row["ms_per_step"]
    for row in v3["rows"]:
        k, _, mode = row["variant"].removeprefix("ours_k").partition("_")
        if k.isdigit():
            of = f"{v3['layers']} layers of DeepSeek-V3's shape, bfloat16, {k} drafts"
            times.setdefault(of, {})[mode == "invariant", row["batch"]] = row["ms_per_step"]
    lines = []
    for of, cells in times.items():
        if all((exact, batch) in cells for exact in (False, True) for batch in batches):
            pairs = [(cells[False, batch], cells[True, batch]) for batch in batches]
            lines.append(
                [of, *(f"{ours:.2f} to {exact:.2f} ({exact / ours:.2f} times)" for ours, exact in pairs)]
            )
    return sentences(
        f"{glm['device']}, torch {glm['torch']}, random weights; milliseconds a step, by default and with "
        "`batch_invariant=True`."
    ) + table(["", *(f"batch {batch}" for batch in batches)], lines)


def server() -> str:
    """The server beside the engine."""
    names = {"server": "the shipped model", "server.glm": "4 layers of GLM's shape, random weights"}
    rows = []
    for name, model in names.items():
        for row in result(name)["rows"]:
            served, engine = row["server"], row["engine"]
            rows.append(
                [
                    model,
                    row["streams"],
                    fixed(served["tokens_per_s"], 0),
                    fixed(engine["tokens_per_s"], 0),
                    fixed(row["ratio"], 2),
                    *(
                        f"{served[when]} / {engine[when]}" if name == "server" else None
                        for when in ("at_once_first_token_ms", "first_token_ms")
                    ),
                ]
            )
    report = result("server")
    return sentences(
        f"{report['device']}, torch {report['torch']}, bfloat16, {report['k']} drafts; prompts of "
        f"{report['prompt_tokens']} tokens, about {report['tokens']} new ones, {report['requests']} requests a stream."
    ) + table(
        [
            "",
            "streams",
            "server: tokens/s",
            "engine: tokens/s",
            "ratio",
            "first token, all at once: server / engine, ms",
            "first token, later",
        ],
        rows,
    )


def loading(name: str) -> str:
    """Bytes that loading reads, and growth of anonymous memory."""
    report = result(name)
    machine, rows = report["machine"], report["rows"]
    return sentences(
        f"{report['device']}, {machine['cpus']} CPU cores, torch {machine['torch']}, {report['dtype']}; the largest "
        f"tensor has {rows[0]['largest_tensor_mb']:,.0f} MB."
    ) + table(
        ["processes", "rank", "s", "GB requested", "GB from disk", "MB of growth", "bound", "same values"],
        (
            (
                *(row[key] for key in ("processes", "rank", "seconds")),
                *(fixed(row[key], 2) for key in ("gb_asked_for", "gb_from_disk")),
                *(fixed(row[key], 0) for key in ("anonymous_mb", "bound_mb")),
                _yes(row["same_values"]),
            )
            for row in rows
        ),
    )


def tensor_parallel_steps() -> str:
    """A step on two GPUs and on one GPU."""
    report = result("tensor_parallel")
    engines = [row for row in report["rows"] if row["what"] == "engine"]
    steps: dict[tuple[Any, ...], dict[int, dict[str, Any]]] = {}
    for row in report["rows"]:
        if row["what"] == "step":
            case = row["shape"], row["layers"], row["weights"], row["k"], row["batch"]
            steps.setdefault(case, {})[row["gpus"]] = row
    lines = []
    for (shape, layers, weights, k, batch), by_gpus in steps.items():
        one, two = by_gpus.get(1), by_gpus.get(2)
        if two is not None:
            lines.append(
                [
                    _model_of(shape, layers, weights),
                    k,
                    batch,
                    *_step_and_floor(one),
                    *_step_and_floor(two),
                    None if one is None else fixed(one["ms_per_step"] / two["ms_per_step"], 2),
                    fixed(100 * two["collectives_ms"] / two["kernels_ms"], 0),
                    fixed(1000 * batch * two["tokens_per_step"] / two["ms_per_step"], 0),
                ]
            )
    reads = [row["read_tb_per_s"] for row in engines]
    return sentences(
        f"Two GPUs, each {report['device']}, torch {report['torch']}, about {report['context']:,} tokens a row; "
        f"milliseconds a step. A plain read reached {min(reads)} to {max(reads)} TB/s."
    ) + table(
        [
            "",
            "drafts",
            "batch",
            "one GPU",
            "its floor",
            "two GPUs",
            "their floor",
            "one to two",
            "collectives, % of the kernels' time",
            "tokens/s of two",
        ],
        lines,
    )


def _model_of(shape: str, layers: int, weights: str) -> str:
    return f"{SHAPES[shape]}, {layers} layers, {WEIGHTS[weights]}"


def _step_and_floor(row: dict[str, Any] | None) -> tuple[str | None, str | None]:
    return (None, None) if row is None else (fixed(row["ms_per_step"], 2), fixed(row["floor_ms"], 2))


def tensor_parallel_memory() -> str:
    """Memory of each GPU, planned and measured, and the compile time of each process."""
    rows = [row for row in result("tensor_parallel")["rows"] if row["what"] == "engine"]

    def each(values: list[float], digits: int = 2) -> str:
        return " / ".join(str(fixed(value, digits)) for value in values)

    return table(
        [
            "GB on a GPU: first / second",
            "drafts",
            "GPUs",
            "weights: planned",
            "the allocator's",
            "all: planned",
            "the allocator's peak",
            "compiling, s",
            "capturing, s",
        ],
        (
            (
                _model_of(row["shape"], row["layers"], row["weights"]),
                row["k"],
                row["gpus"],
                fixed(row["planned_weights_gb"], 2),
                each(row["allocated_weights_gb"]),
                fixed(row["planned_gb"], 2),
                each(row["peak_gb"]),
                each(row["compile_s"], 0),
                each(row["capture_s"], 1),
            )
            for row in rows
        ),
    )


def tensor_parallel_tokens() -> str:
    """Whether processes that share a model emit the model's tokens."""
    rows = result("tensor_parallel")["rows"]
    shared = [row for row in rows if row["what"] == "engine" and row["gpus"] > 1]
    alike = sum(row["same_latents"] for row in shared)
    judged = [row for row in rows if row["what"] == "tokens"]
    return sentences(
        f"In {alike} of {len(shared)} engines on two GPUs both processes have the same latents of all batches, bit by "
        f"bit, and so the same tokens. {judged[0]['judged_layers']} layers of GLM-4.7-Flash's "
        "shape, compared with one process that runs the whole model eagerly in bfloat16:"
    ) + table(
        [
            "weights",
            "drafts",
            "GPUs",
            "positions with the same token",
            "mean gap of logits",
            "worst",
            "by chance",
        ],
        (
            (
                WEIGHTS[row["weights"]],
                row["k"],
                row["gpus"],
                f"{100 * row['agreement']:.1f}%",
                fixed(row["mean_gap"], 4),
                fixed(row["worst_gap"], 3),
                fixed(row["chance_gap"], 2),
            )
            for row in judged
        ),
    )


def fp8_step() -> str:
    """A step of GLM's shape by kind of weights, mode and drafts."""
    report = result("fp8_step")
    batches = sorted({row["batch"] for row in report["rows"]})
    groups: dict[tuple[str, str, int], dict[int, dict[str, Any]]] = {}
    for row in report["rows"]:
        groups.setdefault((row["weights"], row["mode"], row["drafts"]), {})[row["batch"]] = row
    modes = {"default": "", "exact": "`batch_invariant=True`"}
    lines = []
    for (weights, mode, drafts), rows in sorted(groups.items()):
        cells = (
            f"{rows[batch]['ms_per_step']:.2f} ({rows[batch]['floor_ms']:.2f})" if batch in rows else None
            for batch in batches
        )
        gap, chance = max((row["mean_gap"], row["chance_gap"]) for row in rows.values())
        compiled = fixed(max(row["compile_s"] for row in rows.values()), 0)
        lines.append((WEIGHTS[weights], modes[mode], drafts, *cells, compiled, f"{gap:.2f} of {chance:.2f}"))
    memory = " and ".join(
        f"{max(row['gigabytes_of_weights'] for row in report['rows'] if row['weights'] == kind):.1f} GB in {name}"
        for kind, name in WEIGHTS.items()
    )
    return sentences(
        f"{report['device']}, torch {report['torch']}, {report['layers']} layers with random values, about 1,000 "
        f"tokens a row; milliseconds a step. With the MTP layer weights take {memory}. The mean gap is "
        "the largest logit of the bfloat16 model less its logit of the chosen token, for the batch size where it is "
        f'largest; the number after "of" is the gap of random tokens. Both are of {report["judged_layers"]} layers. '
        "Compile times are those of the slowest run."
    ) + table(
        [
            "weights",
            "mode",
            "drafts",
            *(f"batch {b} (floor)" for b in batches),
            "compile, s",
            "mean gap",
        ],
        lines,
    )


def eagle3_step() -> str:
    """A step of GLM's shape by drafter."""
    report = result("eagle3_step")
    names = {
        "none": "none",
        "mtp": "the MTP layer",
        "llama": "an EAGLE-3 head like Llama's",
        "mla": "an EAGLE-3.1 head with MLA",
    }
    batches = sorted({row["batch"] for row in report["rows"]})
    found = {(row["drafter"], row["batch"]): row for row in report["rows"]}
    published = {
        row["batch"]: row["published_tokens_per_s"] for row in found.values() if row["published_tokens_per_s"]
    }
    same = all(row["same_tokens"] for row in report["rows"])
    lines = []
    for drafter, name in names.items():
        rows = [found[drafter, batch] for batch in batches]
        steps = (f"{row['ms_per_step']:.2f} ({row['floor_ms']:.2f})" for row in rows)
        lines.append((name, *steps, " / ".join(f"{row['tokens_per_s']:,.0f}" for row in rows)))
    others = " and ".join(f"{rate} tokens a second at batch {batch}" for batch, rate in published.items())
    return sentences(
        f"{report['device']}, torch {report['torch']}, bfloat16, {report['layers']} layers with random values, about "
        "1,000 tokens a row; 3 drafts, milliseconds a step. With a drafter, tokens per second assume an acceptance "
        f"length of 2.4. SGLang reports {others} for the real model with the published head, on one H100, at that "
        "acceptance length. With `batch_invariant=True` all drafters gave "
        f"{'the same' if same else 'OTHER'} tokens as decoding without drafts ({report['judged_layers']} layers)."
    ) + table(
        [
            "drafter",
            *(f"batch {b} (floor)" for b in batches),
            f"tokens per second, {'/'.join(map(str, batches))}",
        ],
        lines,
    )


def fp8_latents_kernels() -> str:
    """Decode attention over latents of either dtype."""
    report = result("fp8_latents.kernels")
    cases: dict[str, dict[str, dict[str, Any]]] = {}
    for row in report["rows"]:
        cases.setdefault(row["case"], {})[row["kv_cache_dtype"]] = row
    lines = (
        (
            case,
            *(f"{fixed(of[dtype][name], 1)}" for name in ("floor_us", "gluon") for dtype in ("auto", "fp8")),
        )
        for case, of in cases.items()
    )
    return sentences(f"{report['device']}, torch {report['torch']}; microseconds:") + table(
        ["case", "floor, bfloat16", "floor, FP8", "`gluon`, bfloat16", "`gluon`, FP8"], lines
    )


def fp8_latents_steps() -> str:
    """Steps with latents of either dtype."""
    report = result("fp8_latents.steps")
    cases: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for row in report["rows"]:
        case = row["shape"], row["layers"], row["context"], row["rows"]
        cases.setdefault(case, {})[row["kv_cache_dtype"]] = row

    def line(case: tuple[Any, ...], of: dict[str, dict[str, Any]]) -> tuple[Any, ...]:
        shape, layers, context, rows = case
        plain, fp8 = pair = [of.get(dtype) for dtype in ("auto", "fp8")]
        shown = [f"{row['ms_per_step']:.2f} ({row['floor_ms']:.2f})" if row else None for row in pair]
        ratio = fixed(fp8["ms_per_step"] / plain["ms_per_step"], 2) if plain and fp8 else None
        fit = " / ".join(f"{row['rows_that_fit']:,}" if row else "-" for row in pair)
        return f"{SHAPES[shape]}, {layers} layers", f"{context:,}", rows, *shown, ratio, fit

    heads = ["shape", "context", "rows", "bfloat16: ms (floor)", "FP8: ms (floor)", "FP8 / bfloat16"]
    return sentences(
        f"{report['device']}, torch {report['torch']}; weights in bfloat16, no drafts. The last column "
        "has the number of rows of this context that fit beside the weights, with latents in bfloat16 / FP8:"
    ) + table([*heads, "rows that fit"], (line(case, cases[case]) for case in sorted(cases)))


def sampling() -> str:
    """The sampler by filters."""
    report = result("sampling")
    names = [name for name in report["rows"][0] if name not in ("rows", "different_tokens", "commit")]
    lines = ((row["rows"], *(row[name] for name in names)) for row in report["rows"])
    different = sum(row["different_tokens"] for row in report["rows"])
    return sentences(
        f"{report['device']}, torch {report['torch']}; microseconds. {different} tokens differ from plain torch's."
    ) + table(["rows", *names], lines)


def sparse_kernels() -> str:
    """Attention over selected keys, by dtype of latents."""
    report = result("sparse_attention.kernels")
    cases: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in report["rows"]:
        cases.setdefault((row["model"], row["tokens"], row["context"]), {})[row["kv_cache_dtype"]] = row
    lines = (
        (
            model,
            f"{tokens:,} of decode rows" if context is None else f"{tokens:,} of a prompt of {context:,}",
            *(
                fixed(of[kind].get(name), 1)
                for kind in ("auto", "fp8")
                for name in ("floor_us", "triton", "flash_mla")
            ),
        )
        for (model, tokens, context), of in cases.items()
    )
    header = [
        "model",
        "tokens",
        *(f"{name}, {kind}" for kind in ("bfloat16", "FP8") for name in ("floor", "`triton`", "FlashMLA")),
    ]
    return sentences(
        f"{report['device']}, torch {report['torch']}; microseconds, 2,048 keys a token:"
    ) + table(header, lines)


def sparse_steps() -> str:
    """Steps of DeepSeek-V3.2's shape beside dense attention."""
    report = result("sparse_attention.steps")
    cases: dict[tuple[int, ...], dict[tuple[str, str], Any]] = {}
    for row in report["rows"]:
        case = row["context"], row["rows"], row["drafts"]
        cases.setdefault(case, {})[row["variant"], row["kv_cache_dtype"]] = row
    lines = []
    for case, of in sorted(cases.items()):
        columns = [
            None if each is None else f"{each['ms']:.2f} ({each['floor_ms']:.2f})"
            for each in (
                of.get((v, d)) for v, d in (("sparse", "auto"), ("sparse", "fp8"), ("dense", "auto"))
            )
        ]
        whole, without = (of.get((variant, "auto")) for variant in ("sparse", "fixed"))
        share = None if without is None else f"{1 - without['ms'] / whole['ms']:.0%}"
        lines.append((f"{case[0]:,}", *case[1:], *columns, share))
    text = (
        f"{report['device']}, torch {report['torch']}: DeepSeek-V3.2's shape with {report['layers']} layers, "
        f"{report['experts']} experts and random FP8 weights; milliseconds a step (floor)."
    )
    return sentences(text) + table(
        ["context", "rows", "drafts", "sparse", "sparse, FP8 latents", "dense", "the indexers' share"], lines
    )


def decode_choice() -> str:
    """FlashMLA beside the Hopper kernel."""
    report = result("decode_choice")
    lines = (
        (row["case"], *(fixed(row[name], 1) for name in ("gluon", "flash_mla", "FlashMLA", "plan")))
        for row in report["rows"]
    )
    return sentences(f"{report['gpu']}, torch {report['torch']}; microseconds, plans once a step:") + table(
        ["case", "`gluon`", "`flash_mla`", "its kernel alone", "its plan"], lines
    )


def families() -> str:
    """All model types with MLA in transformers."""
    report = result("families")
    lines = [
        (
            f"`{row['model_type']}`",
            _yes(row["load_model"]),
            "yes" if row["accelerate"] else f"refused: {row['refused']}",
        )
        for row in report["rows"]
    ]
    heading = sentences(f"All model types with MLA in transformers {report['transformers']}:")
    refused = "\nThe refused models have indexers of other classes than DeepSeek-V3.2's and GLM-5's.\n"
    return heading + table(["`model_type`", "`load_model`", "`accelerate`"], lines) + refused


PEERS = {
    "steps": {
        "ms_per_step": "ms a step",
        "floor_ms": "floor",
        "tokens_per_step": "tokens",
        "experts": "experts",
    },
    "prompts": {"ms": "ms", "first_ms": "first", "tokens_per_step": "tokens", "experts": "experts"},
    "servers": {
        "tokens_per_s": "tokens/s",
        "first_token_p50_ms": "first token, p50",
        "first_token_p99_ms": "p99",
        "p50_ms": "between tokens, p50",
        "p99_ms": "p99",
    },
}
"""Of `benchmarks.peers`: each part's figures in words; the first one is compared."""
PEER_WEIGHTS = WEIGHTS | {"fp8_activations": "FP8, `fp8_activations`"}
COMPARED = {
    "steps": ("a step", ["ms_per_step"]),
    "prompts": ("first tokens of prompts", ["ms"]),
    "servers": ("a server: tokens/s, 99th percentile between tokens", ["tokens_per_s", "p99_ms"]),
}
"""Each part in words, and the figures in which `peers_ratios` compares it."""


PeerRows = dict[tuple[str, str, int, str], dict[int, dict[str, dict[str, Any]]]]
"""By part, weights, drafts and card, by rows, by system."""


def _peers() -> tuple[str, PeerRows]:
    """The systems and machines, and all entries of `benchmarks.peers`."""
    rows = result("peers")["rows"]
    cards = " and ".join(dict.fromkeys(row["device"] for row in rows))
    systems = {f"torch {row['torch']}" for row in rows}, {f"{row['system']} {row['version']}" for row in rows}
    found: PeerRows = {}
    for row in sorted(rows, key=lambda row: (list(PEERS).index(row["part"]), row["weights"], row["drafts"])):
        of_case = found.setdefault((row["part"], row["weights"], row["drafts"], card_name(row["device"])), {})
        of_case.setdefault(row["rows"], {})[row["system"]] = row
    for (part, weights, drafts, card), by_rows in found.items():
        if weights == "fp8_activations":  # as vLLM's FP8 always has them
            for count, of in by_rows.items():
                of |= {
                    k: v
                    for k, v in found.get((part, "fp8", drafts, card), {}).get(count, {}).items()
                    if k == "vllm"
                }
    return ", ".join([cards, *chain.from_iterable(map(sorted, systems))]), found


def _times_faster(figure: str, of: dict[str, dict[str, Any]]) -> float | None:
    """How many times as fast as vLLM this package is; None unless both were measured."""
    if len(of) < 2:
        return None
    ratio: float = of["vllm"][figure] / of["ours"][figure]
    return 1 / ratio if figure == "tokens_per_s" else ratio


def peers_ratios() -> str:
    """All cases beside vLLM in one table."""
    who, found = _peers()
    counts = sorted({count for by_rows in found.values() for count in by_rows})
    lines, ratios = [], list[float]()
    for (part, weights, drafts, card), by_rows in found.items():
        words, figures = COMPARED[part]
        of_rows = {
            count: of_count
            for count, of in by_rows.items()
            if (of_count := [ratio for figure in figures if (ratio := _times_faster(figure, of))])
        }
        if of_rows:
            what = f"{words}, {PEER_WEIGHTS[weights]}" + f", {drafts} drafts" * (drafts > 0)
            cells = {
                count: ", ".join(f"**{ratio:.2f}**" if ratio < 1 else f"{ratio:.2f}" for ratio in of_count)
                for count, of_count in of_rows.items()
            }
            lines.append([f"{what}, {card}", *map(cells.get, counts)])
            ratios += chain.from_iterable(of_rows.values())
    wins = sum(ratio < 1 for ratio in ratios)
    return sentences(
        f"{who}; GLM-4.7-Flash's shape with random weights. Speed relative to vLLM: above 1 this package is faster, "
        f"and its time between tokens shorter. vLLM is faster in {wins} of {len(ratios)} "
        f"cases{', in bold' * (wins > 0)}."
    ) + table(["rows", *counts], lines)


def peers() -> str:
    """Steps, prompts and servers beside vLLM's."""
    who, found = _peers()
    text = sentences(
        f"{who}. Two columns check that both systems do the same work: tokens of a row and step, or of all prompts in "
        "a step; and experts of a layer that a step's tokens choose."
    )
    for part, names in PEERS.items():
        lines = []
        for (of_part, weights, drafts, card), by_rows in found.items():
            for count, of in sorted(by_rows.items()) if of_part == part else ():
                both = (of.get(system, {}).get(name) for system in ("vllm", "ours") for name in names)
                faster = fixed(_times_faster(next(iter(names)), of), 2)
                lines.append((PEER_WEIGHTS[weights], drafts, count, card, faster, *both))
        heads = [f"{system}: {name}" for system in ("vLLM", "ours") for name in names.values()]
        if lines:
            text += f"\n{part.capitalize()}:\n" + table(
                ["weights", "drafts", "rows", "card", "speed-up", *heads], lines
            )
    return text


def layer(name: str) -> str:
    """A layer of a step: whole, by its kernels, and without each pass."""
    report = result(name)
    batch_of = "prompts" if report.get("prompts") else "batch"
    batches = sorted({row["batch"] for row in report["rows"]})
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in report["rows"]:
        mode = ", `batch_invariant=True`" if row["exact"] else ""
        groups.setdefault(WEIGHTS[row["weights"]] + mode, []).append(row)
    whole, gains = [], []
    for group, rows in groups.items():
        wholes = [row for row in rows if row["place"] is None]
        of_all = {row["batch"]: row for row in wholes if row["without"] is None}
        cells = (
            f"{of_all[batch]['us']} ({of_all[batch]['floor_us']}), {of_all[batch]['kernels']}"
            for batch in batches
        )
        whole.append([group, *cells])
        for without in dict.fromkeys(row["without"] for row in wholes if row["without"] is not None):
            more = {
                row["batch"]: row["us"] - of_all[row["batch"]]["us"]
                for row in wholes
                if row["without"] == without
            }
            gains.append([f"`{without}`", group, *(f"{more[batch]:+.1f}" for batch in batches)])
    text = sentences(
        f"{report['device']}, torch {report['torch']}, about {report['context']:,} tokens a row; microseconds a layer:"
    )
    text += table(["weights", *(f"{batch_of} {batch} (floor), kernels" for batch in batches)], whole)
    for group, rows in groups.items():
        kernels: dict[int, list[dict[str, Any]]] = {batch: [] for batch in batches}
        for row in rows:
            if row["place"] is not None:
                kernels[row["batch"]].append(row)
        lines = [
            [cell for batch in batches for cell in _kernel(kernels[batch], place)]
            for place in range(max(map(len, kernels.values())))
        ]
        text += f"\n{group}, kernel by kernel:\n"
        text += table([cell for batch in batches for cell in (f"{batch_of} {batch}", "us")], lines)
    if gains:
        text += "\nMicroseconds more without a pass:\n"
        text += table(["", "weights", *(f"{batch_of} {batch}" for batch in batches)], gains)
    return text


def _kernel(rows: list[dict[str, Any]], place: int) -> tuple[str | None, str | None]:
    if place >= len(rows):
        return None, None
    name = rows[place]["kernel"]
    return ("cuBLAS" if name.startswith(("nvjet", "void cublas", "void gemv")) else f"`{name}`"), fixed(
        rows[place]["us"], 1
    )


def collectives() -> str:
    """Sums over two GPUs."""
    report = result("collectives")
    alone, normed = ("ours", "nccl"), ("ours, then norm", "ours, fused", "nccl, then norm")
    rows = []
    for row in report["rows"]:
        times = (least_bold([row[name] for name in names]) for names in (alone, normed))
        rows.append((row["tokens"], row["columns"], *(time for each in times for time in each)))
    machine = report["machine"]
    return sentences(
        f"{report['gpus']} {machine['gpu']}, torch {machine['torch']}, NCCL {machine['nccl']}, microseconds."
    ) + table(["tokens", "columns", *alone, *normed], rows)


def command_help(*command: str) -> str:
    """The help of `mla-compile COMMAND`; it imports no torch."""
    from typer.testing import CliRunner

    from mla_compile.cli.app import app

    text = CliRunner().invoke(app, [*command, "--help"], prog_name="mla-compile", terminal_width=110).stdout
    return f"```text\n{text.strip()}\n```\n"


def defaults() -> str:
    """The defaults of settings, from `mla_compile.defaults`; it imports no torch."""
    from mla_compile.defaults import DEVICE_DEFAULTS, IN_WORDS, LEAST_MAX_MODEL_LEN

    gpu, cpu = DEVICE_DEFAULTS["cuda"], DEVICE_DEFAULTS["cpu"]
    length = sentences(
        "`max_model_len` is the model's number of positions if the cache of `max_rows` requests of this length fits in "
        f"a share of memory: {gpu.cache_share:.0%} of what the weights and {gpu.kept_bytes / 2**30:g} GiB for steps "
        f"and CUDA graphs leave of a GPU, {cpu.cache_share:.0%} of what the weights leave of the computer's memory. "
        f"Otherwise it is the largest power of two that fits, but at least {LEAST_MAX_MODEL_LEN}. On a GPU that other "
        "programs use, only free memory counts. A compiled step depends on the sizes of its caches: as powers of two "
        "they are few, so later processes find the compiled step."
    )
    return (
        table(["setting", "default"], ((f"`{name}`", words) for name, words in IN_WORDS.items()))
        + f"\n{length}"
    )


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def stress() -> str:
    """The cases of each stress command so far, by device."""
    rows = []
    for path in sorted((ROOT / "stress" / "results").glob("*.json")):
        data = json.loads(path.read_text(encoding="utf-8"))
        if "ranges" not in data:
            continue
        for device in dict.fromkeys(one["device"] for one in data["ranges"]):
            ranges = [one for one in data["ranges"] if one["device"] == device]
            cases = sum(one["end"] - one["first"] for one in ranges)
            failures = [failure for one in ranges for failure in one["failures"]]
            fixed = sum("fixed" in failure for failure in failures)
            failed = f"{len(failures)}, {fixed} of them fixed" if failures else 0
            torch = ", ".join(dict.fromkeys(one["torch"] for one in ranges))
            rows.append([f"`{data['command']}`", device, torch, f"{cases:,}", failed])
    if not rows:
        return "No results are committed.\n"
    return table(["command", "device", "torch", "cases", "failed"], rows)


def sanitizers() -> str:
    """What each tool of compute-sanitizer reported, and the explanations of the reports."""
    path = ROOT / "stress" / "results" / "sanitizers.json"
    if not path.exists():
        return "No results are committed.\n"
    results = json.loads(path.read_text(encoding="utf-8"))["results"]
    rows, reports, missing = [], [], dict[str, list[str]]()
    for tool, found in summaries(results).items():
        kernels, all_kernels = len(found["kernels"]), len(found["kernels"]) + len(found["missing"])
        if found["missing"]:
            missing.setdefault(", ".join(f"`{name}`" for name in found["missing"]), []).append(tool)
        rows.append([tool, found["tests"], f"{kernels} of {all_kernels}", len(found["reports"])])
        reports += [
            [tool, f"`{one['kernel']}`", one["report"], one["explained"] or "not yet explained"]
            for one in found["reports"]
        ]
    where = {f"{one['device']}, torch {one['torch']}, {one['sanitizer']}" for one in results}
    text = sentences("; ".join(sorted(where)) + ".") + table(["tool", "tests", "kernels", "reports"], rows)
    text += "".join(
        "\n" + sentences(f"Kernels that did not run under {', '.join(tools)}: {names}.")
        for names, tools in missing.items()
    )
    return text + (table(["tool", "kernel", "report", "explanation"], reports) if reports else "")


def matrix() -> str:
    """The outcome of each combination of versions."""
    rows = result("matrix")["rows"]
    header = ["Python", "torch", "transformers", "tests"]
    return table(
        header,
        ([row["python"], row.get("build", row["torch"]), row["transformers"], row["result"]] for row in rows),
    )


PARTS: dict[str, Callable[[], str]] = {
    "defaults": defaults,
    "stress": stress,
    "sanitizers": sanitizers,
    "families": families,
    "figures": figures,
    "fp8_step": fp8_step,
    "eagle3_step": eagle3_step,
    **({"peers": peers, "peers.ratios": peers_ratios} if (RESULTS / "peers.json").exists() else {}),
    "matrix": matrix,
    "layer.glm": functools.partial(layer, "layer.glm"),
    "layer.v3": functools.partial(layer, "layer.v3"),
    "layer.prompts": functools.partial(layer, "layer.prompts"),
    "generation.cpu": generation,
    "compile_time.cpu": compile_time,
    "first_text.cpu": first_text,
    "acceptance": acceptance,
    "fp8_agreement": fp8_agreement,
    "fp8_latents": fp8_latents,
    "fp8_latents.kernels": fp8_latents_kernels,
    "fp8_latents.steps": fp8_latents_steps,
    "sparse_attention.kernels": sparse_kernels,
    "sparse_attention.steps": sparse_steps,
    "draft_length.cpu": lambda: _draft_length("draft_length.cpu"),
    "draft_length": lambda: _draft_length("draft_length"),
    "serving.v3": lambda: _serving("v3"),
    "serving.shipped": lambda: _serving("shipped"),
    "serving.first_token": first_token,
    "serving.scheduler": scheduler,
    "transformers_generate.glm": lambda: _transformers("glm"),
    "transformers_generate.v3": lambda: _transformers("v3"),
    "decode": decode,
    "decode_choice": decode_choice,
    "sampling": sampling,
    "prefill": prefill,
    "batch_invariance": batch_invariance,
    "batch_invariance.cost": batch_invariance_cost,
    "server": server,
    "loading.cpu": functools.partial(loading, "loading.cpu"),
    "collectives": collectives,
    "tensor_parallel.steps": tensor_parallel_steps,
    "tensor_parallel.memory": tensor_parallel_memory,
    "tensor_parallel.tokens": tensor_parallel_tokens,
    **{
        f"help.{name}": functools.partial(command_help, name)
        for name in ("demo", "env", "generate", "inspect", "plan", "serve")
    },
}


def fill(text: str, parts: dict[str, Callable[[], str]] = PARTS) -> str:
    """A page with every marked part regenerated; KeyError for an unknown part."""
    return PLACE.sub(lambda place: f"{place[1]}\n{parts[place[2]]().strip()}\n\n{place[3]}", text)


def pages() -> list[Path]:
    """The pages that may have marks."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def main() -> None:
    parser = command_parser(__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing")
    check = parser.parse_args().check
    old = {page: page.read_text(encoding="utf-8") for page in pages()}
    changed = {page: new for page, text in old.items() if (new := fill(text)) != text}
    for page, text in changed.items():
        print(page.relative_to(ROOT))
        if not check:
            page.write_text(text, encoding="utf-8")
    sys.exit(1 if check and changed else 0)


if __name__ == "__main__":
    main()

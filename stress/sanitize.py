"""compute-sanitizer's four tools over every kernel of the package, in the tests of its definition at small sizes.

`GROUPS` has tests for each kernel. Each test has a process of its own, as a tool that fails in one test ends the
process: first alone, which compiles its kernels; then once for each tool, many at the same time. Each distinct report
is kept, with its explanation if `EXPLAINED` has one. A run replaces the results of the tests and tools that it repeats,
and drops those of tests that no group has.
"""

import argparse
import ast
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from stress.runner import environment, visible_gpus

ROOT = Path(__file__).parent.parent
LIMIT = 500_000
"""Reports that a tool prints of a test."""
COMMON = f"--target-processes all --print-limit {LIMIT} --show-backtrace device"
TOOLS = {
    "initcheck": "",  # the slowest first
    "racecheck": "",
    "memcheck": "--padding 512 --report-api-errors no",
    "synccheck": "",
}
ALONE = "alone"
SEES_ALL_WRITES = "--initcheck-track-filtered-global-memory"
"""Where compute-sanitizer has this option, initcheck sees what kernels write that it does not check."""
KERNELS = "tests/test_gpu_kernels.py::"
DECODE = f"{KERNELS}TestOnTheGpu::"


class Group(NamedTuple):
    """kernels: those that these tests launch, as FILE.FUNCTION. No test captures, which takes torch's own allocator."""

    kernels: tuple[str, ...]
    tests: tuple[str, ...]


def decodes(*backends: str) -> tuple[str, ...]:
    return tuple(
        f"{DECODE}{test.replace('NAME', name)}"
        for name in backends
        for test in (
            "test_ragged_query_lengths_and_inactive_rows[NAME]",
            "test_lengths_about_the_borders_of_splits[NAME]",
            "test_fp8_latents[NAME-4-3-torch.bfloat16]",
            "test_page_sizes_with_ragged_queries[NAME-torch.bfloat16-7]",
        )
    )


GROUPS = {
    "decode": Group(("decode.split_kernel", "softmax.combine_kernel"), decodes("triton")),
    "decode, batch-invariant": Group(
        ("decode.split_kernel", "fixed_splits.join_kernel"), decodes("triton_invariant")
    ),
    "decode, Gluon": Group(
        ("narrow.narrow_kernel", "narrow_fp8.narrow_fp8_kernel", "wide.wide_kernel", "split.join_kernel"),
        (
            *decodes("gluon"),
            f"{DECODE}test_models_in_other_dtypes[gluon-V3-torch.float16]",
            f"{KERNELS}test_on_hopper_fp8_latents_have_the_bits_of_a_bfloat16_cache_that_holds_their_values[128-2-64]",
        ),
    ),
    "decode, Gluon, batch-invariant": Group(("split.join_kernel",), decodes("gluon_invariant")),
    "decode, FlashMLA": Group(("flash_mla.pack_kernel", "flash_mla.unpack_kernel"), decodes("flash_mla")),
    "sparse": Group(
        (
            "sparse.sparse_kernel",
            "flash_mla_sparse.pack_kernel",
            "flash_mla_sparse.join_kernel",
            "flash_mla_sparse.fence_kernel",
        ),
        tuple(  # with 80 tokens FlashMLA divides no token's slots, and `fence_kernel` ends the call
            f"tests/test_gpu_sparse.py::test_sparse_attention_equals_the_definition_by_every_kernel[{case}-64]"
            for case in ("6-torch.bfloat16-False", "6-torch.bfloat16-True", "80-torch.bfloat16-True")
        ),
    ),
    "selections": Group(
        ("index_scores.scores_kernel", "choose_keys.list_kernel", "choose_keys.choose_kernel"),
        ("tests/test_gpu_sparse.py::test_selections_are_those_of_plain_torch[torch.bfloat16-32]",),
    ),
    "masked decode, caches": Group(
        (
            "masked_decode.masked_split_kernel",
            "append.append_kernel",
            "norm_rope_append.norm_rope_append_kernel",
            "rotate_queries.rotate_queries_kernel",
            "decode_metadata.decode_metadata_kernel",
            "prefill_metadata.prefill_metadata_kernel",
        ),
        (
            *(f"{KERNELS}test_masked_decode_of_one_token_in_caches_of_any_size[bool-{n}]" for n in (63, 129)),
            f"{KERNELS}test_masked_decode_with_other_widths[torch.bfloat16-(48, 16)]",
            f"{KERNELS}test_latents_go_to_their_slots_and_masked_ones_nowhere[32-torch.bfloat16]",
            f"{KERNELS}test_fp8_latents_have_the_bytes_of_the_torch_code_fused_and_alone[(384, 20)-torch.bfloat16]",
            *(
                f"{KERNELS}test_norm_rotation_and_append_in_one_launch[33-({w})-torch.bfloat16]"
                for w in ("48, 20", "512, 64")
            ),
            f"{KERNELS}test_queries_are_rotated_in_place[33-20-torch.bfloat16]",
            *(
                f"{KERNELS}test_decode_metadata_equals_the_torch_code_to_the_bit[ragged-4-{n}]"
                for n in (7, 64)
            ),
            *(f"{KERNELS}test_prefill_metadata_equals_the_torch_code_to_the_bit[{n}]" for n in range(4)),
        ),
    ),
    "prefill": Group(
        ("prefill.prefill_kernel", "absorbed_prefill.absorbed_kernel", "keys.gather_kernel"),
        tuple(
            f"{KERNELS}TestPrefill::{test}"
            for name in ("absorbed", "flash_attn", "triton")
            for test in (
                f"test_ragged_chunks_with_context[{name}-[(5, 3), (2, 0), (1, 40)]-torch.bfloat16]",
                f"test_fp8_latents[{name}-[(5, 3), (2, 0), (1, 40)]-torch.bfloat16]",
                f"test_keys_of_padding_and_rows_without_keys_change_nothing[{name}]",
                f"test_results_of_other_tokens_come_first[{name}-8]",
            )
        ),
    ),
    "experts": Group(
        (
            "pairs.sort_kernel",
            "moe.gate_up_kernel",
            "moe.down_kernel",
            "pairs.weighted_sum_kernel",
            "moe_gemv.gate_up_kernel",
            "moe_gemv.down_kernel",
            "prepare.prepare_kernel",
            "moe_fp8.gate_up_fp8_kernel",
            "moe_fp8.down_fp8_kernel",
            "fp8.quantize_kernel",
            "grouped.grouped_kernel",
        ),
        (
            f"{KERNELS}test_experts_when_few_are_chosen_and_sizes_fill_no_tile[(50, 33)-3-torch.bfloat16]",
            "tests/test_gpu_fp8.py::test_few_tokens_and_sizes_that_fill_no_tile[(50, 33, 1)-torch.float16]",
            "tests/test_gpu_fp8.py::test_experts_of_tokens_in_fp8[384-fp8_activations-2-1]",
            "tests/test_gpu_fp8.py::test_fp8_products_of_any_sizes[(384, 256, 2)]",
            "tests/test_gpu_fp8.py::test_products_of_tokens_in_fp8[16-128]",
            *(
                f"{KERNELS}test_grouped_experts_have_the_bits_of_other_kernels[(24, 512, 384, 2)-{parts}-130]"
                for parts in range(3)
            ),
        ),
    ),
    "router, sampling, sums": Group(
        (
            "routing.logits_kernel",
            "routing.norm_logits_kernel",
            "routing.choice_kernel",
            "sample.histogram_kernel",
            "sample.window_kernel",
            "sample.collect_kernel",
            "sample.choose_kernel",
            "keys.parts_kernel",
            "row_argmax.join_kernel",
            "row_sums.sum_kernel",
            "rms_norm.rms_norm_kernel",
        ),
        (
            f"{KERNELS}test_a_router_in_two_launches[v3-torch.bfloat16]",
            f"{KERNELS}test_a_norm_in_the_launch_of_the_routers_scores[odd-100]",
            f"{KERNELS}test_the_best_of_the_ids_that_filters_keep[1000]",
            f"{KERNELS}test_the_largest_of_each_row[torch.bfloat16-6-129280]",
            *(
                f"tests/test_gpu_batch_invariance.py::test_sums_and_norms_of_rows[torch.bfloat16-{n}]"
                for n in (100, 3001)
            ),
        ),
    ),
    "products": Group(
        (
            "matmul.matmul_kernel",
            "blocks.blocks_kernel",
            "blocks.many_blocks_kernel",
            "split_k.add_parts_kernel",
            "gemv.gemv_kernel",
            "fp8.dequantize_kernel",
            "by_head.by_head_kernel",
            "by_head.by_head_tiles_kernel",
        ),
        (
            *(f"{KERNELS}test_drawn_products_of_any_strides[{n}]" for n in range(3)),
            f"{KERNELS}test_no_tile_of_blocks_changes_a_bit[(256, 80)-torch.bfloat16]",
            f"{KERNELS}test_a_product_of_few_tokens[torch.bfloat16-7-41]",
            f"{KERNELS}test_a_norm_in_the_launch_of_its_product[torch.bfloat16-768]",
            *(f"{KERNELS}test_a_product_by_head[w_uk-torch.bfloat16-{n}]" for n in (1, 20)),
            "tests/test_gpu_fp8.py::test_products_equal_the_definition[torch.bfloat16-7-41]",
        ),
    ),
    "collectives": Group(
        ("collectives.collective_kernel", "collectives.all_reduce_add_rms_norm_kernel"),
        ("tests/test_gpu_parallel.py::test_collectives[kernels]",),
    ),
}

_PARTITIONS = (
    "Triton's code for `warp_specialize`: some warps write the partitions and their arguments to shared memory before "
    "a `barrier.sync 1` of all warps, the others read them between it and the next one, and no write comes earlier "
    "than that."
)
_MAXIMA = (
    "Each warpgroup's maxima are read after the wait for `row_max_ready`, at which it arrives after writing them; it "
    "writes the next ones after its wait for the reader's `has_weights`, which follows the reads."
)
_TOTALS = (
    "Each warpgroup's sums are read after the wait for `row_max_ready[2 + ...]`, at which it arrives after writing "
    "them; it writes the next piece's after its wait for the reader's `has_queries`, which follows the reads."
)
_DECAY = (
    "A stage's `decay` is read after the wait for `has_weights`, at which the writer arrives after the write; the next "
    "write to the stage waits for `used` of the tile after it, at which the reader arrives after the reads of both."
)
_FINAL = (
    "`final` is read after the wait for `has_final[0]`, at which the writer arrives after the write, and written for "
    "the next piece after the wait for `has_final[1]`, at which the reader arrives after the read."
)
_CUBLAS = (
    "A product of cuBLAS writes it, which initcheck does not see: torch's kernels that read such products are reported "
    "alike. {}"
)
_FLASH_MLA = (
    "FlashMLA writes it with bulk copies (`tma_store_arrive` follows each), which initcheck does not see; {}"
)
_UNIFORM = (
    "The PTX initialises each barrier with thread 0 alone. ptxas makes its predicate one of the whole warp "
    "(`@!UP1 SYNCS.EXCH.64`), which only warp 0 passes; 2026.4 takes the instruction as run by the other warps, whose "
    "threads it names. 2025.3.1 has no such report."
)
_MASKED = (
    "Scores past a token's last are read to load without a mask; they are integers, and `{}` leaves them out."
)

EXPLAINED: dict[tuple[str, str, str], str] = {
    (
        "synccheck",
        "wide_kernel",
        "Already initialized. Invalidate before reinitializing. (wide.py:311)",
    ): _UNIFORM,
    ("racecheck", "narrow_kernel", "in narrow.py:172 (narrow.py:172)"): _PARTITIONS,
    ("racecheck", "narrow_kernel", "in narrow.py:172 (narrow.py:201)"): _PARTITIONS,
    ("racecheck", "narrow_fp8_kernel", "in narrow_fp8.py:173 (narrow_fp8.py:173)"): _PARTITIONS,
    ("racecheck", "narrow_fp8_kernel", "in narrow_fp8.py:173 (narrow_fp8.py:225)"): _PARTITIONS,
    ("racecheck", "wide_kernel", "in wide.py:279 (wide.py:279)"): _PARTITIONS,
    ("racecheck", "wide_kernel", "in wide.py:279 (wide.py:331)"): _PARTITIONS,
    ("racecheck", "narrow_fp8_kernel", "in narrow_fp8.py:152 (narrow_fp8.py:120)"): _DECAY,
    ("racecheck", "narrow_fp8_kernel", "in narrow_fp8.py:161 (narrow_fp8.py:128)"): _FINAL,
    ("racecheck", "narrow_fp8_kernel", "in narrow_fp8.py:162 (narrow_fp8.py:129)"): _FINAL,
    ("racecheck", "wide_kernel", "in wide.py:229 (wide.py:224)"): _MAXIMA,
    ("racecheck", "wide_kernel", "in wide.py:224 (wide.py:229)"): _MAXIMA,
    ("racecheck", "wide_kernel", "in wide.py:262 (wide.py:266)"): _TOTALS,
    ("racecheck", "wide_kernel", "in wide.py:266 (wide.py:262)"): _TOTALS,
    ("racecheck", "", "failed to handle a hardware exception"): (
        "The tool fails beside a product of cuBLAS, a kernel that it does not check: in four of five tests all kernels "
        "of this package had ended, and a product had just been launched. memcheck passes these tests."
    ),
    ("initcheck", "absorbed_kernel", "softmax.py:58)"): _CUBLAS.format(
        "The rotary part of a query (softmax.py:59), which no product of cuBLAS writes, is not reported."
    ),
    ("initcheck", "prefill_kernel", "prefill.py:59)"): _CUBLAS.format(
        "Columns of keys that `gather_kernel` writes are not reported."
    ),
    ("initcheck", "prefill_kernel", "prefill.py:64)"): _CUBLAS.format(
        "Columns of keys that `gather_kernel` writes are not reported."
    ),
    ("initcheck", "choice_kernel", "routing.py:172)"): _CUBLAS.format(
        "`logits_kernel` writes the scores of few tokens itself."
    ),
    ("initcheck", "join_kernel", "flash_mla_sparse.py:117)"): _FLASH_MLA.format(
        "inf for a part without slots."
    ),
    ("initcheck", "join_kernel", "flash_mla_sparse.py:123)"): _FLASH_MLA.format(
        "0 for a part without slots."
    ),
    ("initcheck", "unpack_kernel", "flash_mla.py:125)"): _FLASH_MLA.format(
        "places that see no key are masked."
    ),
    ("initcheck", "choose_kernel", "choose_keys.py:43)"): _MASKED.format("tl.where(i < count, ...)"),
    ("initcheck", "list_kernel", "choose_keys.py:131)"): _MASKED.format("i < n"),
    ("initcheck", "weighted_sum_kernel", "pairs.py:271)"): (
        "A token of padding has no `places`, and what stands there only makes an address of a load that `there` masks."
    ),
}
"""Why a report is none of a fault, by tool, kernel and a part of its first line.

A race is explained by the barriers that order both accesses, in the source and in the PTX. compute-sanitizer 2025.3.1
has all of these reports. 2026.4 has none of `_PARTITIONS`, and does not fail beside products of cuBLAS.
"""


@cache
def kernels_of_package() -> dict[str, Path]:
    """The files of all kernels: of functions in Triton or Gluon that are launched, whose names end so."""
    found: dict[str, Path] = {}
    for path in (ROOT / "mla_compile").rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            jit = isinstance(node, ast.FunctionDef) and any(
                ".jit" in ast.unparse(decorator) for decorator in node.decorator_list
            )
            if jit and node.name.endswith("_kernel"):
                assert found.setdefault(f"{path.stem}.{node.name}", path) == path, node.name
    return found


def compiled(cache: Path) -> set[str]:
    """The package's kernels that Triton compiled into its cache."""
    names = set()
    for path in cache.glob("*/*_kernel.ttgir"):
        source = re.search(
            r'^#loc1? = loc\("[^"]*/(\w+)\.py":', path.read_text(encoding="utf-8"), re.MULTILINE
        )
        if source:
            names.add(f"{source[1]}.{path.stem}")
    return names & kernels_of_package().keys()


def reports_in(log: str, names: set[str]) -> Counter[tuple[str, str]]:
    """Kernel and first line of the reports about kernels of these names, each without numbers that differ by thread.

    A race is one report for each access that it is with.
    """
    found: Counter[tuple[str, str]] = Counter()
    first = ""
    for line in log.splitlines():
        text = line.removeprefix("=========")
        if "Internal Sanitizer Error" in text or "errors were not printed" in text:
            found["", re.sub(r"^\s*ERROR SUMMARY: \d+ ", "Too many reports: ", text).strip()] += 1
        elif not text.startswith("  "):
            first = text.strip()
        elif first and (at := re.search(r"\b(\w+_kernel)\b\S*(?: in (\S+:\d+))?", text)) and at[1] in names:
            what = f"{first} ({at[2]})" if at[2] else first
            found[at[1], re.sub(r"0x[0-9a-f]+|\(\d+,\d+,\d+\)", "...", what)] += 1
            if not text.strip().startswith("and "):
                first = ""
    return found


class Result(NamedTuple):
    """Of a test, under a tool or alone. state: "passed", "skipped", "failed" or "unfinished"."""

    test: str
    tool: str
    state: str
    seconds: int
    kernels: set[str]
    reports: Counter[tuple[str, str]]

    def row(self) -> dict[str, Any]:
        """As the results file has it."""
        reports = [[*report, count] for report, count in sorted(self.reports.items())]
        return self._asdict() | {"kernels": sorted(self.kernels), "reports": reports}


class Sanitizer(NamedTuple):
    """The program, and whether its initcheck checks only kernels of some names."""

    program: str
    filters_initcheck: bool

    @classmethod
    def at(cls, program: str) -> "Sanitizer":
        options = subprocess.run([program, "--help"], capture_output=True, text=True, check=True).stdout
        return cls(program, SEES_ALL_WRITES in options)


def run(
    group: str, place: int, tool: str, gpus: str, folder: Path, deadline: float, sanitizer: Sanitizer
) -> Result:
    """One test of a group, by its place."""
    kernels, test = GROUPS[group].kernels, GROUPS[group].tests[place]
    name = re.sub(r"\W+", "_", f"{group}.{place}")
    log, report = (folder / f"{name}.{tool}.{end}" for end in ("log", "report"))
    names = {kernel.partition(".")[2] for kernel in kernels}
    line = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", test]
    env = os.environ | {"TRITON_CACHE_DIR": str(folder / name), "CUDA_VISIBLE_DEVICES": gpus}
    if tool != ALONE:
        env["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # so that memcheck knows each tensor
        options = f"--tool {tool} {COMMON} {TOOLS[tool]} --log-file {report}".split()
        if tool != "initcheck" or sanitizer.filters_initcheck:
            options += [part for one in sorted(names) for part in ("--kernel-name", f"kne={one}")]
        line = [sanitizer.program, *options, *line]
    start = time.monotonic()
    if start > deadline:
        return Result(test, tool, "unfinished", 0, set(), Counter())
    with log.open("w") as file:
        job = subprocess.Popen(
            line, cwd=ROOT, env=env, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            state = "failed" if job.wait(max(1, deadline - start)) else "passed"
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()
            state = "unfinished"
    text = report.read_text(errors="replace") if report.exists() else ""
    if state == "passed" and " PASSED" not in log.read_text(errors="replace"):
        state = "skipped"
    seconds = round(time.monotonic() - start)
    found = Result(test, tool, state, seconds, compiled(folder / name) & {*kernels}, reports_in(text, names))
    print(f"{tool} {test}: {state}, {sum(found.reports.values())} reports, {seconds} s", flush=True)
    return found


def summary(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What a tool found. A kernel counts if a test that launches it passes.

    results: of the tool, as the results file has them.
    """
    passed = [one for one in results if one["state"] == "passed"]
    kernels = {kernel for one in passed for kernel in one["kernels"]}
    counts: Counter[tuple[str, str, str]] = Counter()
    for one in results:
        counts.update({(one["tool"], kernel, text): count for kernel, text, count in one["reports"]})
    reports = []
    for (tool, kernel, text), count in sorted(counts.items()):
        why = [e for (t, k, part), e in EXPLAINED.items() if (t, k) == (tool, kernel) and part in text]
        reports.append({"kernel": kernel, "report": text, "count": count, "explained": " ".join(why)})
    return {
        "tests": len(passed),
        "kernels": sorted(kernels),
        "missing": sorted(kernels_of_package().keys() - kernels),
        "reports": reports,
        "not passed": {
            one["test"]: f"{one['state']}, {one['seconds']} s"
            for one in results
            if one["state"] not in ("passed", "skipped")
        },
    }


def summaries(results: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By tool."""
    return {tool: summary([one for one in results if one["tool"] == tool]) for tool in TOOLS}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m stress.sanitize", description=__doc__)
    parser.add_argument("--seconds", type=float, default=1200, help="for all of it; a third to compile")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at the same time")
    parser.add_argument("--folder", type=Path, default=ROOT / "build/sanitize", help="logs, compiled kernels")
    parser.add_argument("--output", type=Path, default=ROOT / "stress/results/sanitizers.json")
    parser.add_argument("--sanitizer", default="compute-sanitizer", help="the program, another version of it")
    parser.add_argument("--groups", nargs="+", default=list(GROUPS), choices=list(GROUPS))
    parser.add_argument("--tools", nargs="+", default=list(TOOLS), choices=list(TOOLS))
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    start, gpus = time.monotonic(), visible_gpus()
    sanitizer = Sanitizer.at(args.sanitizer)
    tests = [(group, place) for group in args.groups for place in range(len(GROUPS[group].tests))]
    kernels_of_package()  # before the threads that read it: two that parse code at once fail with Python 3.11 at times

    def run_all(tools: list[str], deadline: float) -> list[Result]:
        jobs = [(*test, tool) for tool in tools for test in tests]
        with ThreadPoolExecutor(max(1, args.jobs)) as pool:
            started = [
                pool.submit(run, *job, one, args.folder, deadline, sanitizer)
                for job, one in zip(jobs, itertools.cycle(gpus or [""]))
            ]
            return [one.result() for one in started]

    run_all([ALONE], start + args.seconds / 3)
    results = run_all(args.tools, start + args.seconds)
    version = subprocess.run([sanitizer.program, "--version"], capture_output=True, text=True, check=False)
    number = "".join(re.findall(r"Version (\S+)", version.stdout)[:1])
    where = environment("cuda" if gpus else "cpu") | {"sanitizer": f"compute-sanitizer {number}"}
    data: dict[str, Any] = json.loads(args.output.read_text(encoding="utf-8")) if args.output.exists() else {}
    again = {(one.tool, one.test) for one in results if one.state != "unfinished"}
    tests_of_groups = {test for group in GROUPS.values() for test in group.tests}
    known = [
        one
        for one in data.get("results", [])
        if one["test"] in tests_of_groups and (one["tool"], one["test"]) not in again
    ]
    data["results"] = known + [one.row() | where for one in results if (one.tool, one.test) in again]
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(data, indent=1) + "\n")
    unexplained = False
    for tool, found in summaries(data["results"]).items():
        num, missing = len(found["kernels"]), ", ".join(found["missing"])
        print(
            f"{tool}: {num} kernels, {len(found['reports'])} distinct reports; not run: {missing or 'none'}"
        )
        for test, state in found["not passed"].items():
            print(f"  {test}: {state}")
        for one in found["reports"]:
            unexplained |= not one["explained"]
            print(
                f"  {one['count']:>6} {one['kernel']}: {one['report']}; {one['explained'] or 'unexplained'}"
            )
    sys.exit(unexplained)


if __name__ == "__main__":
    main()

"""One of several processes that share a model: `python -m tests.parallel.worker RANK SIZE FOLDER`, see `shared`."""

import json
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mla_compile import Engine, Parallel, SamplingParams, backend, follow, load_model
from mla_compile.engine.launch import Launch, Launcher
from mla_compile.models import MLAForCausalLM

SHORT_OF_PAGES = {
    "max_rows": 4,
    "max_model_len": 64,
    "page_size": 4,
    "num_pages": 29,
    "max_tokens_per_step": 24,
}
"""So requests are preempted, and prompts come in pieces beside rows that decode."""


def loaded(parallel: Parallel | None, folder: Path, job: dict[str, Any]) -> MLAForCausalLM:
    load = job.get("load", {})
    if "dtype" in load:
        load = load | {"dtype": getattr(torch, load["dtype"])}
    return load_model(folder / "checkpoint", parallel=parallel, **load)


def texts(model: MLAForCausalLM, job: dict[str, Any]) -> list[dict[str, Any]]:
    """The results of the job's engines, for each number of drafts."""
    settings = SHORT_OF_PAGES | {"compile": False} | job.get("engine", {})
    found = []
    for k in job.get("k", [0, 3]):
        engine = Engine(model, num_speculative_tokens=k, **settings)
        if job.get("warm_up"):
            engine.warm_up(sampling=SamplingParams() if job.get("greedy") else None)
        # Every third prompt begins as another does: pages are shared.
        prompts = [[1 + i % 3, *range(5, 10 + 5 * i)] for i in range(6)]
        # Each kind of sampling compiles a step of its own.
        sampling = [SamplingParams()] * 6
        if not job.get("greedy"):
            sampling = [
                SamplingParams(
                    temperature=0.8 * (i % 2),
                    seed=i,
                    logprobs=2 if i == 3 else None,
                    frequency_penalty=0.5 if i == 4 else 0,
                    stop_token_ids=[7] if i == 5 else [],
                    min_tokens=9 if i == 5 else 0,
                    logit_bias={7: 3.0, 9: -100} if i >= 4 else None,
                )
                for i in range(6)
            ]
        completions = engine.generate(prompts, sampling, max_new_tokens=24)
        gone = engine.add(prompts[0], max_new_tokens=24)
        engine.step()
        engine.abort(gone)
        again = engine.generate(prompts[:2], max_new_tokens=8)
        stats = engine.stats
        found.append(
            {
                "tokens": [one.token_ids for one in (*completions, *again)],
                "mixed": stats.num_mixed_steps,
                "preempted": stats.num_preemptions,
                "reused": stats.num_reused_tokens,
                "bytes": sum(p.nbytes for p in model.parameters()),
                "captured": [
                    bucket.is_captured
                    for bucket in engine.capture_report().buckets
                    if not bucket.prompt_tokens
                ],
            }
        )
        if job.get("chooses"):
            found[-1]["chosen"] = chosen(engine, prompts)
    if model.parallel is not None:
        engine.close()
    return found


def chosen(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    """Tokens that the host chooses, after an error of the choice and an interrupt."""

    def second_best(logits: Tensor, *_: Any) -> Tensor:
        return logits.topk(2).indices[..., 1]

    for error in (ArithmeticError, KeyboardInterrupt):

        def fail(logits: Tensor, *_: Any, error: type[BaseException] = error) -> Tensor:
            raise error("no choice")

        with pytest.raises(error, match="no choice"):
            deque(engine.stream(prompts, max_new_tokens=5, choose=fail), maxlen=0)
    *_, completions = engine.stream(prompts, max_new_tokens=5, choose=second_best)
    return [one.token_ids for one in completions]


def keep_reports(file: Path) -> None:
    """Writes what each launch of this process reports to `file`, to compare the ranks."""
    launch = Launcher.launch

    def kept(*args: Any) -> Launch:
        found = launch(*args)
        with file.open("a") as lines:
            lines.write(f"{[(report.tokens, report.active) for report in found.report.read()]}\n")
        return found

    Launcher.launch = kept  # type: ignore[method-assign]


def main() -> None:
    rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    job = json.loads((folder / "job.json").read_text())
    keep_reports(folder / f"reports.{rank}.txt")
    if "lowering" in job:  # instead of Inductor, like the fixture of that name
        from torch._dynamo.backends.registry import lookup_backend  # takes seconds

        lowered = lookup_backend(job["lowering"])
        backend.lower_with_inductor = lambda gm, example_inputs, settings: lowered(gm, example_inputs)
    if rank in job.get("slow_to_compile", []):
        lower = backend.lower_with_inductor

        def slow(*args: Any) -> Any:
            time.sleep(3)
            return lower(*args)

        backend.lower_with_inductor = slow
    join(rank, size, folder, job.get("load", {}).get("device", "cpu"))
    parallel = Parallel.of_processes(expert_parallel=job.get("expert_parallel", False))
    model = loaded(parallel, folder, job)
    if rank > 0:
        follow(model)
    else:
        (folder / "results.json").write_text(json.dumps(texts(model, job)))
    torch.distributed.destroy_process_group()


def join(rank: int, size: int, folder: Path, device: str) -> None:
    """Joins the process group: NCCL with a GPU for each rank, else gloo, also for ranks that share a GPU."""
    gpus = torch.cuda.device_count()
    if device == "cuda":
        torch.cuda.set_device(rank % gpus)
    torch.distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if device == "cuda" and size <= gpus else "gloo",
        init_method=f"file://{folder / 'meeting'}",
        rank=rank,
        world_size=size,
    )


if __name__ == "__main__":
    main()

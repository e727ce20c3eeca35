"""One of several processes that share a model: `python -m tests.parallel.worker RANK SIZE FOLDER`, see `shared`."""

import json
import sys
from pathlib import Path
from typing import Any

import torch

from mla_compile import Engine, Parallel, SamplingParams, follow, load_model
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
    return load_model(folder / "checkpoint", parallel=parallel, **job.get("load", {}))


def texts(model: MLAForCausalLM, job: dict[str, Any]) -> list[dict[str, Any]]:
    """What engines of the job say, for each number of drafts."""
    settings = SHORT_OF_PAGES | {"compile": False} | job.get("engine", {})
    found = []
    for k in job.get("k", [0, 3]):
        engine = Engine(model, num_speculative_tokens=k, **settings)
        # Every third prompt begins as another does: pages are shared.
        prompts = [[1 + i % 3, *range(5, 10 + 5 * i)] for i in range(6)]
        sampling = [
            SamplingParams(
                temperature=0.8 * (i % 2),
                seed=i,
                logprobs=2 if i == 3 else None,
                frequency_penalty=0.5 if i == 4 else 0,
                stop_token_ids=[7] if i == 5 else [],
            )
            for i in range(6)
        ]
        said = engine.generate(prompts, sampling, max_new_tokens=24)
        gone = engine.add(prompts[0], max_new_tokens=24)
        engine.step()
        engine.abort(gone)
        again = engine.generate(prompts[:2], max_new_tokens=8)
        stats = engine.stats
        found.append(
            {
                "tokens": [one.token_ids for one in (*said, *again)],
                "mixed": stats.num_mixed_steps,
                "preempted": stats.num_preemptions,
                "reused": stats.num_reused_tokens,
                "bytes": sum(p.nbytes for p in model.parameters()),
            }
        )
    return found


def keep_reports(file: Path) -> None:
    """Write down what each launch of this process reports, by which its ranks can be compared."""
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
    meeting = f"file://{folder / 'meeting'}"
    torch.distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size)
    parallel = Parallel.of_processes(expert_parallel=job.get("expert_parallel", False))
    model = loaded(parallel, folder, job)
    if rank > 0:
        follow(model)
    else:
        (folder / "said.json").write_text(json.dumps(texts(model, job)))


if __name__ == "__main__":
    main()

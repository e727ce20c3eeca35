"""One of several processes that share a model: `python -m tests.parallel.worker RANK SIZE FOLDER`, see `shared`."""

import json
import sys
from pathlib import Path
from typing import Any

import torch

from mla_compile import Engine, Parallel, SamplingParams, load_model
from mla_compile.engine.draft_length import FixedLength

SHORT_OF_PAGES = {
    "max_rows": 4,
    "max_model_len": 64,
    "page_size": 4,
    "num_pages": 29,
    "max_tokens_per_step": 24,
}
"""So requests are preempted, and prompts come in pieces beside rows that decode."""


def texts(parallel: Parallel | None, folder: Path, job: dict[str, Any]) -> list[dict[str, Any]]:
    """What engines of the job say, for each number of drafts."""
    load = job.get("load", {})
    if "dtype" in load:
        load = load | {"dtype": getattr(torch, load["dtype"])}
    model = load_model(folder / "checkpoint", parallel=parallel, **load)
    settings = SHORT_OF_PAGES | {"compile": False} | job.get("engine", {})
    found = []
    for k in job.get("k", [0, 3]):
        engine = Engine(model, num_speculative_tokens=k, **settings)
        assert isinstance(engine.draft_length, FixedLength)
        # Every third prompt begins as another does: pages are shared.
        prompts = [[1 + i % 3, *range(5, 10 + 5 * i)] for i in range(6)]
        sampling = [
            SamplingParams(temperature=0.8 * (i % 2), seed=i, logprobs=2 if i == 3 else None)
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
                "graphs": [bucket.num_graphs for bucket in engine.capture_report().buckets],
            }
        )
    return found


def main() -> None:
    rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    job = json.loads((folder / "job.json").read_text())
    join(rank, size, folder, job.get("load", {}).get("device", "cpu"))
    parallel = Parallel.of_processes(expert_parallel=job.get("expert_parallel", False))
    (folder / f"said.{rank}.json").write_text(json.dumps(texts(parallel, folder, job)))
    torch.distributed.destroy_process_group()
    threads = [name.read_text() for name in Path("/proc/self/task").glob("*/comm")]
    assert not any("gloo" in name for name in threads), "the interpreter would end under them"


def join(rank: int, size: int, folder: Path, device: str) -> None:
    """Meet the others: on CPUs with gloo, on a GPU for each rank with NCCL."""
    if device == "cuda":
        torch.cuda.set_device(rank)
    torch.distributed.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"file://{folder / 'meeting'}",
        rank=rank,
        world_size=size,
    )


if __name__ == "__main__":
    main()

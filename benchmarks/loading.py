"""Loading by one process and by several that share a model: seconds, bytes read, memory of the host.

    python -m benchmarks.loading --processes 2 --gigabytes 4 --output benchmarks/results/loading.json

The benchmark writes a checkpoint of GLM-4.7-Flash's shape with random weights to a temporary folder, with as many
layers as `--gigabytes` needs, and drops it from the system's page cache before each run. Each process then calls
`load_model`, and each of its weights is compared with the files. Its anonymous memory, which the system cannot reclaim
as it can mapped files, is sampled every two milliseconds. It should grow by no more than 1.2 times the largest tensor
and a GiB.

On a CPU the parameters are anonymous memory themselves. They are written to before the first tensor is read, so that
all of their memory exists, and their bytes are left out. Bytes read of a file are those that `load_model` requests; the
disk reads pages and ahead, and processes of a machine share its cache. This reads Linux's `/proc`.
"""

import itertools
import json
import math
import os
import platform
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from benchmarks import random_checkpoint
from benchmarks.reporting import add_row, command_parser
from mla_compile import Parallel, load_model
from mla_compile.models import MLAForCausalLM, checkpoint
from mla_compile.models.names import hugging_face_name
from mla_compile.models.safetensor_files import SafetensorFiles
from mla_compile.models.sharding import division

DTYPE = torch.bfloat16
EVERY = 0.002
"""Seconds between two samples of the memory."""


def number_of(file: str, name: str) -> int:
    """The number in a line of `/proc/self/status`, in kB, or of `/proc/self/io`, in bytes."""
    lines = Path("/proc/self", file).read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


class AnonymousMemory:
    """The most by which a process's anonymous memory grows while a block runs, in bytes.

    left_out: bytes that do not count. lock: while it is held, no sample is taken.
    """

    def __init__(self) -> None:
        self.peak, self.left_out, self.lock = 0, 0, threading.Lock()
        self._before, self._ended = 1024 * number_of("status", "RssAnon"), threading.Event()

    def __enter__(self) -> "AnonymousMemory":
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(EVERY):
            with self.lock:
                now = 1024 * number_of("status", "RssAnon")
                self.peak = max(self.peak, now - self._before - self.left_out)


@contextmanager
def bytes_asked_for() -> Iterator[list[int]]:
    """The bytes of each piece of a file that is read inside."""
    asked: list[int] = []

    def noted(read: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*args: Any) -> Tensor:
            tensor = read(*args)
            asked.append(tensor.nbytes)
            return tensor

        return call

    with (
        patch.object(SafetensorFiles, "read", noted(SafetensorFiles.read)),
        patch.object(SafetensorFiles, "read_range", noted(SafetensorFiles.read_range)),
    ):
        yield asked


def measure(directory: Path, device: str, parallel: Parallel | None) -> dict[str, Any]:
    """Load the model, or the process's part of it."""
    memory, lay = AnonymousMemory(), checkpoint.pack_adjacent

    def allocated(model: MLAForCausalLM) -> None:
        """Between allocating and reading: touches parameters on a CPU, so that all of their memory exists."""
        with memory.lock:
            lay(model)
            for parameter in model.parameters():
                parameter.zero_()
                memory.left_out += parameter.nbytes if parameter.is_cpu else 0

    from_disk, begin = number_of("io", "read_bytes"), time.perf_counter()
    with patch.object(checkpoint, "pack_adjacent", allocated), bytes_asked_for() as asked, memory:
        model = load_model(directory, dtype=DTYPE, device=device, parallel=parallel)
        if device != "cpu":
            torch.cuda.synchronize(device)
    seconds = time.perf_counter() - begin
    from_disk = number_of("io", "read_bytes") - from_disk
    files = SafetensorFiles(directory)
    largest = max(entry.nbytes for entry in files.entries.values())
    return {
        "seconds": round(seconds, 2),
        "gb_per_s": round(sum(asked) / seconds / 1e9, 2),
        "gb_asked_for": round(sum(asked) / 1e9, 3),
        "gb_from_disk": round(from_disk / 1e9, 3),
        "anonymous_mb": round(memory.peak / 1e6, 1),
        "bound_mb": round((1.2 * largest + 2**30) / 1e6, 1),
        "largest_tensor_mb": round(largest / 1e6, 1),
        "same_values": has_values_of(model, files),
    }


def has_values_of(model: MLAForCausalLM, files: SafetensorFiles) -> bool:
    """Whether a model has the values of the files, or its part of them, which this function reads whole."""
    for ours, tensor in model.state_dict().items():
        expected = whole(ours, model, files)
        if model.parallel is not None:
            how = division(ours, expert_parallel=model.parallel.expert_parallel)
            if how is not None:
                expected = how.part(expected, model.parallel.rank, model.parallel.size)
        if not torch.equal(tensor.cpu(), expected.to(tensor.dtype)):
            return False
    return True


def whole(ours: str, model: MLAForCausalLM, files: SafetensorFiles) -> Tensor:
    """One whole tensor of a model; the files hold experts one by one."""
    name = hugging_face_name(ours, model.arch.num_layers)
    stem, _, kind = name.rpartition(".")
    if kind not in ("w_gate_up", "w_down"):
        return files.read(name)
    parts = ("gate", "up") if kind == "w_gate_up" else ("down",)
    experts = (
        torch.cat([files.read(f"{stem}.{expert}.{part}_proj.weight") for part in parts])
        for expert in range(model.arch.routing.num_experts)
    )
    return torch.stack([*experts])


def process(rank: int, size: int, folder: Path, device: str) -> None:
    """One process of `size`: writes its results to the folder."""
    if device == "cuda":
        torch.cuda.set_device(rank)
        torch.zeros(1, device="cuda")  # the driver's own memory is there before
        device = f"cuda:{rank}"
    parallel = None
    if size > 1:
        meeting = f"file://{folder / f'meeting of {size}'}"
        dist.init_process_group(init_method=meeting, rank=rank, world_size=size)
        parallel = Parallel.of_processes()
        dist.all_reduce(torch.zeros(1, device=device))  # they begin together
    row = measure(folder / "checkpoint", device, parallel)
    (folder / f"{rank} of {size}.json").write_text(json.dumps(row))
    if size > 1:
        dist.destroy_process_group()


def layers_for(gigabytes: float) -> int:
    """The number of layers with that many bytes, with embedding, head and MTP layer."""
    for layers in itertools.count(1):
        shapes = random_checkpoint.shards(random_checkpoint.config_of(layers, {}))
        numbers = (math.prod(shape) for shard in shapes for name, shape in shard.items() if not is_copy(name))
        if sum(numbers) * DTYPE.itemsize >= gigabytes * 1e9:
            return layers
    raise AssertionError


def is_copy(name: str) -> bool:
    """Whether a tensor repeats the embedding or the head in the MTP layer; it is not read."""
    return ".layers." in name and name.endswith((".embed_tokens.weight", ".shared_head.head.weight"))


def forget(directory: Path) -> None:
    """Drop the files from the page cache, so that loading reads the disk."""
    for file in directory.glob("*.safetensors"):
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    parser = command_parser(__doc__)
    parser.add_argument("--processes", type=int, default=2, help="that share the model, after one alone")
    parser.add_argument("--gigabytes", type=float, default=4.0, help="of weights, at least")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    report: dict[str, Any] = {
        "machine": {"cpus": os.cpu_count(), "processor": platform.machine(), "torch": torch.__version__},
        "device": torch.cuda.get_device_name() if args.device == "cuda" else args.device,
        "dtype": str(DTYPE).removeprefix("torch."),
        "rows": [],
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        random_checkpoint.write(folder / "checkpoint", layers_for(args.gigabytes), {})
        for size in sorted({1, args.processes}):
            forget(folder / "checkpoint")
            mp.spawn(process, (size, folder, args.device), nprocs=size)
            for rank in range(size):
                row = json.loads((folder / f"{rank} of {size}.json").read_text())
                add_row(report, {"processes": size, "rank": rank, **row}, args.output)


if __name__ == "__main__":
    main()

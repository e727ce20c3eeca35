"""A pytest plugin that gives each process of pytest-xdist one of the GPUs: `pytest -p tests.gpu_spread -n 8 -m gpu`."""

import os
from pathlib import Path

if worker := os.environ.get("PYTEST_XDIST_WORKER"):  # before torch looks for GPUs
    count = len([*Path("/proc/driver/nvidia/gpus").glob("*")])
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")
    os.environ["CUDA_VISIBLE_DEVICES"] = visible[int(worker.removeprefix("gw")) % len(visible)]

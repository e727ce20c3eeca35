"""A pytest plugin that gives each process of pytest-xdist one of the GPUs: `pytest -p tests.gpu_spread -n 8 -m gpu`."""

import os
from pathlib import Path

if worker := os.environ.get("PYTEST_XDIST_WORKER"):  # before torch looks for GPUs
    count = len([*Path("/proc/driver/nvidia/gpus").glob("*")])
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count))))
    if visible:  # else the system does not list them, and all processes take the first
        numbers = visible.split(",")
        os.environ["CUDA_VISIBLE_DEVICES"] = numbers[int(worker.removeprefix("gw")) % len(numbers)]

"""Runs a few tests with several versions of Python, torch and transformers, each combination installed apart.

    python -m tests.matrix                             # `make matrix`: all of COMBINATIONS, an hour or more
    python -m tests.matrix --python 3.11 --torch 2.13.0 --transformers 5.15.1

Results go to benchmarks/results/matrix.json, one row a combination, and from there to docs/versions.md. A Python that
is not on PATH is a row too. pip takes torch from its index: where that has no CPU build, a CUDA build of 5.5 GB.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import tables
from benchmarks.reporting import write_report

ROOT = Path(__file__).parents[1]
RESULTS = tables.RESULTS / "matrix.json"
FOLDER = ROOT / ".venv-matrix"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
TORCH = ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
TRANSFORMERS = ("5.15.1", "5.23.0", "5.24.0")
"""The oldest, the one that is developed with, the newest."""
# Not all products: each axis beside what the project is developed with, and the oldest and newest of all.
COMBINATIONS = [
    *[("3.11", torch, "5.23.0") for torch in TORCH],
    *[("3.11", "2.13.0", version) for version in TRANSFORMERS if version != "5.23.0"],
    *[(python, "2.13.0", "5.23.0") for python in PYTHONS[1:]],
    ("3.11", "2.11.0", "5.15.1"),
    ("3.14", "2.15.0", "5.24.0"),
]
# What depends on torch's and transformers' insides: the private API, a compiled step, graphs that passes rewrite, the
# batch-invariant mode, a model of transformers and a checkpoint's tokenizer.
TESTS = (
    "tests/test_torch_internals.py",
    "tests/test_imports.py",
    "tests/test_backend.py",
    "tests/passes/test_absorb_rules.py",
    "tests/models/test_tokenizer.py",
    "tests/integrations/test_parity.py",
)
SECONDS = 600
OWN_PINS = {
    "torch",
    "triton",
    "sympy",
    "networkx",
    "setuptools",
    "transformers",
    "tokenizers",
    "huggingface-hub",
}
"""Pins of constraints.txt that differ with torch or transformers. The others stay: pip searches for minutes without."""


def constraints(torch: str, transformers: str) -> str:
    """constraints.txt with other versions of these two."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    kept = [line for line in lines if line.partition("==")[0].replace("_", "-") not in OWN_PINS]
    return "\n".join([*kept, f"torch=={torch}", f"transformers=={transformers}", ""])


def outcome(printed: str) -> str:
    """pytest's closing line in short: "80 passed, 3 skipped"; its last line if it printed none."""
    found = re.findall(r"\d+ (?:failed|passed|skipped|errors?)", printed.splitlines()[-1] if printed else "")
    return ", ".join(found) or (printed.splitlines() or ["nothing printed"])[-1][:120]


def run(python: str, torch: str, transformers: str) -> dict[str, Any]:
    """The row of one combination; its environment is removed at the end."""
    row: dict[str, Any] = {"python": python, "torch": torch, "transformers": transformers}
    interpreter = shutil.which(f"python{python}")
    # pyenv has a program of this name for each Python that it installed; it fails for those that are not chosen.
    if interpreter is None or subprocess.run([interpreter, "-V"], capture_output=True).returncode:
        return row | {"result": f"no python{python} on this machine"}
    place = FOLDER / f"{python}-{torch}-{transformers}"
    shutil.rmtree(place, ignore_errors=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    try:
        subprocess.run([interpreter, "-m", "venv", place], check=True)
        (place / "constraints.txt").write_text(constraints(torch, transformers))
        pip = [place / "bin/python", "-m", "pip", "install", "-qq", "--no-compile", "--no-input"]
        pip += ["-c", place / "constraints.txt"]
        for packages in ([f"torch=={torch}"], ["-e", f"{ROOT}[dev]"], ["--no-deps", "speculators"]):
            done = subprocess.run([*pip, *packages], stderr=subprocess.PIPE, text=True, env=environment)
            if done.returncode:
                errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
                return row | {"result": f"not installed: {(errors or [done.stderr])[-1][:160].strip()}"}
        program = "import torch, platform; print(torch.__version__, platform.python_version())"
        exact = subprocess.run(
            [place / "bin/python", "-c", program], capture_output=True, text=True, check=True
        )
        row["build"], row["python_build"] = exact.stdout.split()
        command = [place / "bin/python", "-m", "pytest", "-q", "-m", "not gpu and not slow", *TESTS]
        begin = time.monotonic()
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, timeout=SECONDS
            )
        except subprocess.TimeoutExpired:
            return row | {"result": f"not done after {SECONDS} s"}
        if done.returncode:
            print(done.stdout[-6000:], flush=True)
        return row | {"result": outcome(done.stdout.strip()), "seconds": round(time.monotonic() - begin)}
    finally:
        shutil.rmtree(place, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--python", help="only combinations with it; with all three options, this combination"
    )
    parser.add_argument("--torch")
    parser.add_argument("--transformers")
    args = parser.parse_args()
    asked = (args.python, args.torch, args.transformers)
    chosen = [one for one in COMBINATIONS if all(a in (None, b) for a, b in zip(asked, one, strict=True))]
    if not chosen:
        if None in asked:
            parser.error("no such combination; name all of --python, --torch and --transformers")
        chosen = [asked]
    failed = False
    for combination in chosen:
        row = run(*combination)
        print(json.dumps(row), flush=True)
        key = ("python", "torch", "transformers")
        rows = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
        rows = [old for old in rows if any(old[name] != row[name] for name in key)] + [row]
        rows.sort(key=lambda each: [[int(n) for n in each[name].split(".")] for name in key])
        write_report({"tests": TESTS, "rows": rows}, RESULTS)
        failed |= "seconds" in row and ("failed" in row["result"] or "passed" not in row["result"])
    sys.exit(failed)


if __name__ == "__main__":
    main()

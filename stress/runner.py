"""What all commands of this package share: numbered cases, results that accumulate, and the report of a failure.

A case is a function of a `Draw`, from which it takes every choice; it returns the name of its kind. Case N draws from
the seed N. A failure is made smaller by dropping and lowering what was drawn while the same error comes.
"""

import argparse
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import torch

import mla_compile
from benchmarks.reporting import commit

SECONDS_PER_CASE = 120
"""A case that takes longer hangs."""
SECONDS_PER_REDUCTION = 30
SECONDS_BETWEEN_SAVES = 10
MOST_RECORDED = 2000
"""Choices of a failure that are shown and kept; the seed draws all of them again."""


class Draw(Random):
    """Random choices of a seed, recorded; or those of a record again, and after its end always the first choice.

    block: draws what a case may share with others; the case's own choices until `share`.
    """

    def __init__(self, seed: int | str = 0, record: list[int] | None = None) -> None:
        super().__init__(seed)
        self.taken: list[int] = []
        self.block = self
        self._seed = seed
        self._notes: list[tuple[object, ...]] = []
        self._record = None if record is None else iter(record)

    def __new__(cls, *_: object, **__: object) -> "Draw":
        return super().__new__(cls)

    def getrandbits(self, k: int, /) -> int:
        value = super().getrandbits(k) if self._record is None else min(next(self._record, 0), 2**k - 1)
        self.taken.append(value)
        return value

    def random(self) -> float:
        return self.getrandbits(53) / 2**53

    def share(self, cases: int, name: str) -> None:
        """From now on `block` draws the same in each of `cases` consecutive cases that give this name."""
        self.block = Draw(f"{int(self._seed) // cases} {name}")
        self.block.taken, self.block._record = self.taken, self._record

    def note(self, *what: object) -> None:
        """A line of the report of this case, if it fails. A function is called then."""
        self._notes.append(what)

    def notes(self) -> list[str]:
        return [" ".join(str(part() if callable(part) else part) for part in note) for note in self._notes]


Case = Callable[[Draw], str]


@dataclass
class Failure:
    """A case that failed."""

    error: str
    draw: Draw
    trace: str

    @property
    def kind(self) -> str:
        """Its type, and the beginning of its message without numbers."""
        return re.sub(r"\d[\d.e+-]*", "", self.error)[:30]


@contextmanager
def _limited(seconds: int) -> Iterator[None]:
    def stop(_: int, __: FrameType | None) -> None:
        raise TimeoutError(f"the case takes more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _works(device: str) -> bool:
    """False after an access outside memory on a GPU."""
    try:
        if device == "cuda":
            torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def attempt(case: Case, draw: Draw) -> str | Failure:
    """The kind of the case, or its failure."""
    try:
        torch.manual_seed(0)
        with _limited(SECONDS_PER_CASE):
            return case(draw)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of a Rust library too
        text = f"{type(error).__name__}: {error}"
        return Failure(text[:2000], draw, traceback.format_exc(limit=-8))


def reduced(case: Case, failure: Failure, seconds: float = SECONDS_PER_REDUCTION) -> Failure:
    """The failure with the shortest record found that gives the same type of error."""
    deadline, best, improved = time.monotonic() + seconds, failure, True

    def better(record: list[int]) -> bool:
        nonlocal best
        found = attempt(case, Draw(record=record)) if time.monotonic() < deadline else ""
        if not isinstance(found, Failure) or found.kind != failure.kind:
            return False
        taken, shortest = found.draw.taken, best.draw.taken
        if (len(taken), taken) >= (len(shortest), shortest):
            return False
        best = found
        return True

    while improved and time.monotonic() < deadline:
        improved = False
        for size in (32, 8, 2, 1):
            start = 0
            while start < len(best.draw.taken):
                taken = best.draw.taken
                if better(taken[:start] + taken[start + size :]):
                    improved = True
                else:
                    start += size
        for i in range(len(best.draw.taken)):
            for lower in (lambda _: 0, lambda x: x // 2, lambda x: x - 1):
                taken = best.draw.taken
                if i < len(taken) and taken[i] and better([*taken[:i], lower(taken[i]), *taken[i + 1 :]]):
                    improved = True
    return best


def check_message(error: Exception, pattern: str) -> None:
    """The message is one line that begins with the pattern."""
    text = str(error)
    assert re.match(pattern, text) and "\n" not in text, text[:300]


def report(name: str, seed: int, failure: Failure, device: str = "cpu") -> str:
    again = name if device == "cpu" else f"{name} --device {device}"
    lines = [
        f"{name}: case {seed} fails: {failure.error}",
        *(f"  {note}" for note in failure.draw.notes()),
        failure.trace,
        f"again: python -m {again} --case {seed}",
    ]
    if len(failure.draw.taken) <= MOST_RECORDED:
        record = ",".join(map(str, failure.draw.taken))
        lines.append(f"smaller: python -m {again} --record {record or 0}")
    return "\n".join(lines)


def environment(device: str) -> dict[str, str]:
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()} CPU",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "mla_compile": f"{mla_compile.__version__} {commit()}".strip(),
    }


class Results:
    """The ranges of seeds that ran, with their counts, in a JSON file if there is one."""

    def __init__(self, name: str, path: Path | None, where: dict[str, str]) -> None:
        self.path = path
        self.data: dict[str, Any] = {"command": name, "ranges": []}
        if path is not None and path.exists():
            self.data = json.loads(path.read_text())
            if self.data["command"] != name:
                sys.exit(f"--output: expected results of {name}, got those of {self.data['command']}")
        self.ranges = [one for one in self.data["ranges"] if one["device"] == where["device"]]
        self.where = where

    def begin(self, first: int) -> dict[str, Any]:
        """The last range, if it goes on from here in the same environment; else a new one."""
        if self.ranges and self.ranges[-1]["end"] == first and self.where.items() <= self.ranges[-1].items():
            last: dict[str, Any] = self.ranges[-1]
            return last
        started = {**self.where, "first": first, "end": first, "seconds": 0.0, "counts": {}, "failures": []}
        self.data["ranges"].append(started)
        self.ranges.append(started)
        return started

    def add(self, ranges: list[dict[str, Any]]) -> None:
        """Ranges of other processes; those that follow each other become one."""
        for one in ranges:
            into = self.begin(one["first"])
            into["end"], into["seconds"] = one["end"], round(into["seconds"] + one["seconds"], 1)
            into["counts"] = dict(sorted((Counter(into["counts"]) + Counter(one["counts"])).items()))
            into["failures"] += one["failures"]

    def repeat_failures(self, case: Case) -> None:
        """Run the cases that failed on such a device, a GPU or a CPU, again, and note with which version they pass."""
        on_cpu = self.where["device"].endswith(" CPU")
        alike = [one for one in self.data["ranges"] if one["device"].endswith(" CPU") == on_cpu]
        for failure in [failure for one in alike for failure in one["failures"] if "fixed" not in failure]:
            if not isinstance(attempt(case, Draw(failure["seed"])), Failure):
                failure["fixed"] = self.where["mla_compile"]

    def save(self) -> None:
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = self.path.with_suffix(".tmp")
            unfinished.write_text(json.dumps(self.data, indent=1) + "\n")
            unfinished.replace(self.path)


def run(
    name: str,
    case: Case,
    *,
    cases: int,
    seed: int,
    seconds: float,
    output: Path | None,
    device: str,
    most: int,
    independent: bool = True,
) -> int:
    """Run the cases from `seed`, or from the end of the results, to `cases` in all; returns the number of failures.

    most: it stops after this many failures. independent: see `command`.
    """
    results = Results(name, output, environment(device))
    done = sum(one["end"] - one["first"] for one in results.ranges)
    if independent:
        results.repeat_failures(case)
    number = max((one["end"] for one in results.ranges), default=seed)
    here = results.begin(number)
    counts, failures = Counter(here["counts"]), 0
    start = saved = time.monotonic()
    before = here["seconds"]

    def save() -> None:
        here.update(
            end=number,
            seconds=round(before + time.monotonic() - start, 1),
            counts=dict(sorted(counts.items())),
        )
        results.save()

    ran = 0
    try:
        while done + ran < cases and failures < most and time.monotonic() - start < seconds:
            found = attempt(case, Draw(number))
            if isinstance(found, Failure):
                failures += 1
                if _works(device):
                    found = reduced(case, found)
                if not _works(device):  # every call of this process fails from now on
                    most = failures
                print(report(name, number, found, device), flush=True)
                failure: dict[str, Any] = {"seed": number, "error": found.error[:300]}
                if len(found.draw.taken) <= MOST_RECORDED:
                    failure["record"] = found.draw.taken
                here["failures"].append(failure)
            else:
                counts[found] += 1
            number, ran = number + 1, ran + 1
            if time.monotonic() - saved > SECONDS_BETWEEN_SAVES:
                saved = time.monotonic()
                save()
    except KeyboardInterrupt:
        print("stopped; the same command continues", file=sys.stderr)
    save()
    summarise(name, ran, time.monotonic() - start, failures, done, cases, counts)
    return failures


def summarise(
    name: str, ran: int, seconds: float, failures: int, done: int, cases: int, counts: Mapping[str, int]
) -> None:
    rate = ran / max(1e-9, seconds)
    state = "all" if done + ran >= cases else "the same command continues"
    print(f"{name}: {ran} cases, {rate:.1f} a second, {failures} failed; {done + ran} of {cases}: {state}")
    for kind, count in sorted(counts.items()):
        print(f"  {count:>9} {kind}")


def visible_gpus() -> list[str]:
    """The numbers of this process' GPUs, as `CUDA_VISIBLE_DEVICES` takes them."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return given.split(",") if given else [str(i) for i in range(torch.cuda.device_count())]


def run_jobs(name: str, case: Case, args: argparse.Namespace, independent: bool) -> int:
    """The same as `run`, by `args.jobs` processes, each with its range of seeds and one of the GPUs."""
    results = Results(name, args.output, environment(args.device))
    if independent:
        results.repeat_failures(case)
    done = sum(one["end"] - one["first"] for one in results.ranges)
    first = max((one["end"] for one in results.ranges), default=args.seed)
    each = -(-max(0, args.cases - done) // args.jobs)
    gpus = visible_gpus() or [""]
    start, parts = time.monotonic(), []
    with TemporaryDirectory() as folder:
        for i in range(args.jobs):
            part, log = Path(folder, f"{i}.json"), Path(folder, f"{i}.log")
            given = {"cases": each, "seed": first + i * each, "seconds": args.seconds, "output": part}
            given |= {"device": args.device, "failures": args.failures}
            line = [sys.executable, "-m", name, *(f"--{key}={value}" for key, value in given.items())]
            env = os.environ | {"CUDA_VISIBLE_DEVICES": gpus[i % len(gpus)]}
            with log.open("w") as file:
                job = subprocess.Popen(line, stdout=file, stderr=subprocess.STDOUT, env=env)
            parts.append((job, part, log))
        found: list[dict[str, Any]] = []
        for job, part, log in parts:
            if job.wait():
                print(log.read_text(), end="", flush=True)
            if part.exists():
                found += json.loads(part.read_text())["ranges"]
    results.add(found)
    results.save()
    counts, failures = Counter(), sum(len(one["failures"]) for one in found)
    for one in found:
        counts.update(one["counts"])
    ran = sum(one["end"] - one["first"] for one in found)
    summarise(name, ran, time.monotonic() - start, failures, done, args.cases, counts)
    return failures or any(job.returncode for job, *_ in parts)


def _record(text: str) -> list[int]:
    return [int(value) for value in text.split(",")]


def _count(text: str) -> int:
    if (count := int(text)) < 1:
        raise ValueError
    return count


_record.__name__, _count.__name__ = "list of choices", "number of cases"  # argparse's errors name them


def command(
    name: str,
    make: Callable[[argparse.Namespace], Case],
    *,
    devices: tuple[str, ...] = ("cpu",),
    independent: bool = True,
) -> None:
    """Run the command `python -m stress.NAME`.

    make: its case, from the command's arguments. independent: whether a case does not depend on those before it, so
        that one that failed may run again alone.
    """
    name = f"stress.{name}"
    parser = argparse.ArgumentParser(prog=f"python -m {name}", description=sys.modules["__main__"].__doc__)
    parser.add_argument("--cases", type=_count, default=1000, help="in all, with those of the results file")
    parser.add_argument("--seed", type=int, default=0, help="the first case, without a results file")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this time")
    parser.add_argument(
        "--output", type=Path, help="the results file: rerunning continues after its last seed"
    )
    parser.add_argument("--case", type=int, help="run this case alone, with its notes")
    parser.add_argument(
        "--record", type=_record, help="run the case of this record alone, as a failure's report gives it"
    )
    parser.add_argument("--failures", type=int, default=10, help="stop after this many")
    parser.add_argument("--jobs", type=int, default=1, help="processes, spread over all GPUs")
    parser.add_argument("--device", choices=devices, default=devices[0])
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("argument --device: torch finds no CUDA device")
    torch.set_num_threads(1)
    case = make(args)
    if args.case is not None or args.record is not None:
        found = attempt(case, Draw(args.case or 0, args.record))
        sys.exit(
            report(name, args.case or 0, found, args.device) if isinstance(found, Failure) else print(found)
        )
    if args.jobs > 1:
        sys.exit(bool(run_jobs(name, case, args, independent)))
    failed = run(
        name,
        case,
        cases=args.cases,
        seed=args.seed,
        seconds=args.seconds,
        output=args.output,
        device=args.device,
        most=args.failures,
        independent=independent,
    )
    sys.exit(bool(failed))

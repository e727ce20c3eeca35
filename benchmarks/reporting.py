"""What all benchmark commands share: their parser, and reports.

A report has rows of JSON, printed and written to a file, each with the commit that was measured.
"""

import argparse
import json
import re
import subprocess
from functools import cache
from pathlib import Path
from typing import Any


def command_parser(description: str | None) -> argparse.ArgumentParser:
    """A command's parser, which prints the description as it is written."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


@cache
def commit() -> str:
    """The commit of this checkout; "" outside of git."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(
        command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    ).stdout.strip()


def card_name(device: str) -> str:
    """A GPU's name in short: "H100"."""
    return re.sub(r"NVIDIA (\w+).*", r"\1", device)


def add_row(report: dict[str, Any], row: dict[str, Any], output: Path | None) -> None:
    """Print a row, append it to the report's "rows", and write the report: a later failure loses no row."""
    print(json.dumps(row), flush=True)
    report["rows"].append(row)
    write_report(report, output)


def with_known_rows(report: dict[str, Any], output: Path | None) -> dict[str, Any]:
    """The report with the rows of the output file; `SystemExit` if the rest of the file differs from the report."""
    if output is None or not output.exists():
        return report
    known: dict[str, Any] = json.loads(output.read_text())
    if known | {"rows": []} != report:
        raise SystemExit(f"{output} is from another machine, torch or shape")
    return known


def drop_rows(report: dict[str, Any], own: dict[str, Any]) -> None:
    """Remove the report's rows with these values, to measure them again."""
    report["rows"] = [row for row in report["rows"] if not own.items() <= row.items()]


def write_report(report: dict[str, Any], output: Path | None) -> None:
    """Overwrites the file, with this commit in rows that have none; None writes nothing."""
    if output is not None:
        for row in report["rows"]:
            row.setdefault("commit", commit())
        output.write_text(json.dumps(report, indent=1) + "\n")

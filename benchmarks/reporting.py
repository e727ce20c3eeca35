"""How benchmarks tell what they have measured."""

import json
from pathlib import Path
from typing import Any


def add_row(report: dict[str, Any], row: dict[str, Any], output: Path | None) -> None:
    """Print a row, put it at the end of the report's "rows", and write the report: what fails later loses no row."""
    print(json.dumps(row), flush=True)
    report["rows"].append(row)
    write_report(report, output)


def write_report(report: dict[str, Any], output: Path | None) -> None:
    """Over what the file has held; None writes nothing."""
    if output is not None:
        output.write_text(json.dumps(report, indent=1) + "\n")

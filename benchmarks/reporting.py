"""How benchmarks tell what they have measured."""

import json
from pathlib import Path
from typing import Any


def add_row(report: dict[str, Any], row: dict[str, Any], output: Path | None) -> None:
    """Print a row, put it at the end of the report's "rows", and write the report: what fails later loses no row."""
    print(json.dumps(row), flush=True)
    report["rows"].append(row)
    write_report(report, output)


def with_known_rows(report: dict[str, Any], output: Path | None) -> dict[str, Any]:
    """The report with the rows that the output has; `SystemExit` where all else there is not as in the report."""
    if output is None or not output.exists():
        return report
    known: dict[str, Any] = json.loads(output.read_text())
    if known | {"rows": []} != report:
        raise SystemExit(f"{output} is of another machine, torch or shape")
    return known


def drop_rows(report: dict[str, Any], own: dict[str, Any]) -> None:
    """Leave out the report's rows that have these values: they are measured anew."""
    report["rows"] = [row for row in report["rows"] if not own.items() <= row.items()]


def write_report(report: dict[str, Any], output: Path | None) -> None:
    """Over what the file has held; None writes nothing."""
    if output is not None:
        output.write_text(json.dumps(report, indent=1) + "\n")

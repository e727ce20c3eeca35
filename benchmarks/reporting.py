"""Reports of benchmarks: rows of JSON, printed and written to a file."""

import json
from pathlib import Path
from typing import Any


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
    """Overwrites the file; None writes nothing."""
    if output is not None:
        output.write_text(json.dumps(report, indent=1) + "\n")

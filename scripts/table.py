"""Prints the README's table of records, a row for each file in scripts/results/."""

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"


def rows() -> list[str]:
    """The table in Markdown, line by line; records stand in the order of their names."""
    lines = ["| record | what | result | machine | date |", "| --- | --- | --- | --- | --- |"]
    for path in sorted(RESULTS.glob("*.json")):
        record = json.loads(path.read_text())
        lines.append(
            f"| `{path.stem}` | {record['title']} | {record['result']} | {_machine(record)} | {record['date']} |"
        )
    return lines


def _machine(record: dict[str, Any]) -> str:
    machine = record["machine"]
    device = machine["device"] if machine["device"] != "cpu" else f"{machine['processor']}, {machine['cores']} cores"
    return f"{device}, torch {machine['torch']}"


if __name__ == "__main__":
    print("\n".join(rows()))

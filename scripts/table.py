"""Prints the README's table of records, a row for each file in scripts/results/, and a table for each sweep."""

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


def sweeps() -> list[str]:
    """A table in Markdown for each record with trials, line by line."""
    lines = []
    for path in sorted(RESULTS.glob("*.json")):
        record = json.loads(path.read_text())
        if "trials" in record:
            lines += ["", f"`{path.stem}`:", ""]
            lines += ["| changed | word perplexity | tokens/s | parameters |", "| --- | --- | --- | --- |"]
            lines += [_trial(found) for found in record["trials"]]
    return lines


def _trial(found: dict[str, Any]) -> str:
    spread = f" (spread {found['spread']:.2f})" if len(found["runs"]) > 1 else ""
    return (
        f"| {', '.join(f'`{change}`' for change in found['overrides']) or 'nothing'} "
        f"| {found['word_perplexity']:.2f}{spread} "
        f"| {found['tokens_per_second']:,.0f} | {found['parameters'] / 1e6:.2f}M |"
    )


def _machine(record: dict[str, Any]) -> str:
    machine = record["machine"]
    device = machine["device"] if machine["device"] != "cpu" else f"{machine['processor']}, {machine['cores']} cores"
    return f"{device}, torch {machine['torch']}"


if __name__ == "__main__":
    print("\n".join([*rows(), *sweeps()]))

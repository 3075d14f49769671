#!/usr/bin/env python3
"""Write the tables of the pages: those of scripts/results/ from the records, and the fields in configs/README.md.

    python scripts/pages.py

A page is written by hand, but for what follows a comment that says what it is generated from, up to the next section.
Records have a table for each benchmark, or one for all: their scalars and rows. What all rows have in common is
above the table.
"""

import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path

import record
from record import Record, Row

from lmtrain.config.fields import fields

GENERATED = re.compile(r"(<!-- Generated from (\S+) [^\n]*\n).*?(?=\n## |\Z)", re.DOTALL)
SHOWN = {
    "recipes": "method tokens word_perplexity context stride minutes steps parameters",
    "peers": "threads program precision compiled dropout word_perplexity context stride tokens parameters",
}
"""The columns of the files that have one table; the others have one for each benchmark, with all columns."""
ORIGIN = ("benchmark", "machine", "date", "commit")


def pages() -> dict[Path, str]:
    """What every page should contain."""
    paths = [record.ROOT / "configs" / "README.md", *record.RESULTS.glob("*.md")]
    return {path: GENERATED.sub(lambda found: f"{found[1]}\n{tables(found[2])}\n", path.read_text()) for path in paths}


def tables(source: str) -> str:
    """The tables that are generated from a file of records, or from the fields of the configuration."""
    if source == "lmtrain/config":
        return field_tables()
    path = record.RESULTS / source
    records = sorted(record.read_records(path), key=lambda entry: str(entry["benchmark"]))
    parts = []
    for _, group in groupby(records, key=lambda entry: path.stem in SHOWN or entry["benchmark"]):
        parts += _section(list(group), SHOWN.get(path.stem, "").split())
    return "\n\n".join(parts)


def field_tables() -> str:
    """Every field of the configuration, in a table for each section."""
    parts = []
    for section, described in groupby(fields(), lambda field: field.name.partition(".")[0]):
        rows = [
            (f"`{field.name.partition('.')[2]}`", field.type, f"`{field.default}`", field.description)
            for field in described
        ]
        parts += [f"### {section}", markdown_table(("field", "type", "default", "description"), rows)]
    return "\n\n".join(parts)


def _section(records: list[Record], shown: Sequence[str]) -> list[str]:
    """A heading if they are of one benchmark, what all rows of the records have in common, and a table of the rest."""
    rows = [{"benchmark": entry["benchmark"], **row, **_origin(entry)} for entry in records for row in _rows(entry)]
    keys = [key for key in dict.fromkeys(key for row in rows for key in row) if not shown or key in (*shown, *ORIGIN)]
    common = [key for key in keys if len({str(row.get(key)) for row in rows}) == 1 and (len(rows) > 1 or key in ORIGIN)]
    columns = [key for key in keys if key not in common]
    values = {key: rows[0][key] for key in common if rows[0].get(key) is not None}
    heading = [f"### {values.pop('benchmark')}"] if "benchmark" in values else []
    about = [f"{key.replace('_', ' ')} {_cell(value)}" for key, value in values.items()]
    settings = records[0].get("settings", {})
    if "common" in settings:
        about.insert(0, f"`{settings['recipe']}` with `{' '.join(settings['common'])}`")
    table = markdown_table(columns, ([row.get(key) for key in columns] for row in rows))
    return [*heading, *(["; ".join(about)] if about else []), table]


def _rows(entry: Record) -> Iterable[Row]:
    """The scalars of the metrics, joined by those of each row where there are rows."""
    metrics = entry["metrics"]
    scalars = {key: value for key, value in metrics.items() if not isinstance(value, dict | list)}
    return [scalars | row for row in metrics.get("rows", [{}])]


def _origin(entry: Record) -> Row:
    machine = entry["machine"]
    cores = f"{machine['cores']} core{'s' * (machine['cores'] > 1)}"
    processor = machine["processor"].replace("(R)", "").removesuffix(" Processor")
    name = f"{processor}, {cores}" if machine["device"] == "cpu" else machine["device"]
    commit = entry["commit"][:7] + "+changes" * entry["commit"].endswith("+changes")
    return {"machine": f"{name}, torch {machine['torch']}", "date": entry["date"], "commit": commit}


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table in Markdown."""
    lines = [[column.replace("_", " ") for column in columns], ["---"] * len(columns)]
    lines += [[_cell(value) for value in row] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: object) -> str:
    match value:
        case None:
            return ""
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:.4g}" if abs(value) < 10 else f"{value:,.2f}" if abs(value) < 1000 else f"{value:,.0f}"
        case int():
            return f"{value:,}"
        case _:
            return str(value).replace("|", "\\|")


def main() -> None:
    for path, text in pages().items():
        path.write_text(text)


if __name__ == "__main__":
    main()

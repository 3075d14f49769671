"""What the commands print on stdout: results as text or JSON."""

from lmtrain.system.messages import for_terminal, to_json


def show(result: dict[str, object], text: str, as_json: bool) -> None:
    """Print the result of a command: `text`, or `result` as one line of JSON."""
    print(to_json(result) if as_json else for_terminal(text))


def table(counts: dict[str, dict[str, int]]) -> str:
    """Return counts by split as aligned columns."""
    rows = [["split", *next(iter(counts.values()))]]
    rows += [[split, *(f"{count:,}" for count in row.values())] for split, row in counts.items()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)

"""What the commands print: results as text or JSON on stdout, messages on stderr."""

import sys
from typing import TYPE_CHECKING, Any

from lmtrain.system.escapes import escaped, for_terminal, to_json

if TYPE_CHECKING:
    from lmtrain.config.schema import Config
    from lmtrain.data.tokens import TokenStore


def note(message: str) -> None:
    """Print a message to stderr as one line, unbuffered."""
    print(escaped(message), file=sys.stderr, flush=True)


def show(result: dict[str, Any], text: str, as_json: bool) -> None:
    """Print the result of a command: `text`, or `result` as one line of JSON."""
    print(to_json(result) if as_json else for_terminal(text))


def table(counts: dict[str, dict[str, int]]) -> str:
    """Counts by split as aligned columns."""
    columns = list(next(iter(counts.values())))
    rows = [
        ["split", *columns],
        *([split, *(f"{row[column]:,}" for column in columns)] for split, row in counts.items()),
    ]
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def floor(store: "TokenStore", split: str) -> float | None:
    """The word perplexity of the generator of the built-in corpus, below which no model can be; else None."""
    found: dict[str, float] = store.manifest.get("floor", {}).get(split, {})
    return found.get("word_perplexity")


def show_costs(config: "Config", store: "TokenStore", as_json: bool) -> None:
    """What `train --dry-run` prints."""
    from lmtrain.config.loader import dump
    from lmtrain.training.costs import costs

    result = costs(config, store)
    figures = {key.replace("_", " "): value for key, value in result.items() if not isinstance(value, dict)}
    lines = [
        f"{key}: {value:,}" if isinstance(value, int) else f"{key}: {value:,.4g}" for key, value in figures.items()
    ]
    memory = [f"  {part}: {size / 1e6:,.1f} MB" for part, size in result["memory_bytes"].items()]
    text = "\n".join([dump(config).rstrip(), "---", *lines, "memory, estimated:", *memory])
    show({"config": config.model_dump(mode="json"), **result}, text, as_json)


def show_profile(result: dict[str, Any], as_json: bool) -> None:
    """What `train --profile` prints."""
    from lmtrain.training.profiling import profile_text

    show(result, f"{profile_text(result)}\n\n{result['trace']}: open it at ui.perfetto.dev", as_json)

"""What the commands print on stdout: results as text or JSON."""

from typing import TYPE_CHECKING, Any

from lmtrain.errors import LmtrainError
from lmtrain.system import launcher
from lmtrain.system.escapes import for_terminal, to_json

if TYPE_CHECKING:
    from lmtrain.config.schema import Config
    from lmtrain.data.tokens import TokenStore


def show(result: dict[str, Any], text: str, as_json: bool) -> None:
    """Print the result of a command: `text`, or `result` as one line of JSON."""
    print(to_json(result) if as_json else for_terminal(text))


def table(counts: dict[str, dict[str, int]]) -> str:
    """Return counts by split as aligned columns."""
    columns = list(next(iter(counts.values())))
    rows = [
        ["split", *columns],
        *([split, *(f"{row[column]:,}" for column in columns)] for split, row in counts.items()),
    ]
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def show_costs(config: "Config", store: "TokenStore", as_json: bool) -> None:
    """Print what `train --dry-run` prints; then raise LmtrainError if training needs more memory than there is."""
    from lmtrain.config.loader import dump
    from lmtrain.training.costs import costs
    from lmtrain.training.loop import MEMORY_REMEDY

    result = costs(config, store)
    text = "\n".join([dump(config).rstrip(), "---", *_cost_lines(result, config.train.max_minutes)])
    show({"config": config.model_dump(mode="json"), **result}, text, as_json)
    memory, available = result["memory_bytes"], result["estimate"]["device_memory_bytes"]
    needed, of_batch = memory["total"], memory["activations"] + memory["logits"]
    if needed > available and not launcher.is_distributed():  # else shards may fit where the whole does not
        raise LmtrainError(
            f"training needs an estimated {quantity(needed, 'B')} of memory, and this machine has "
            f"{quantity(available, 'B')}: "
            + (
                MEMORY_REMEDY
                if needed - of_batch < available
                else "lower model.dim, model.layers or the vocabulary's size"
            )
        )


def _cost_lines(result: dict[str, Any], minutes: float | None) -> list[str]:
    """Return the figures of `costs` with units; `minutes` is the budget in time."""
    estimate, memory = result["estimate"], result["memory_bytes"]
    steps = f"{estimate['steps']:,} steps, {quantity(estimate['tokens'])} tokens, {estimate['epochs']:,.3g} epochs"
    if result.get("steps") == estimate["steps"]:
        run = f"{steps}, {duration(60 * estimate['minutes'])} (estimated)"
    else:
        run = f"{steps} (estimated) in {minutes:g} minutes"
    place, peak = estimate["device"].replace("cuda", "gpu").upper(), quantity(estimate["peak_flops"], "FLOP/s")
    needed, available = quantity(memory["total"], "B"), quantity(estimate["device_memory_bytes"], "B")
    sizes = {name: size for name, size in memory.items() if size and name != "total"}
    return [
        f"parameters       {quantity(result['parameters'])}, with a vocabulary of {result['vocabulary']:,}",
        f"training tokens  {quantity(result['tokens_per_epoch'])}, {result['steps_per_epoch']:,.1f} steps per epoch",
        f"step             {result['tokens_per_step']:,} tokens, {quantity(result['flops_per_step'], 'FLOP')}, "
        f"{duration(estimate['seconds_per_step'])} (estimated)",
        f"run              {run}, without evaluations",
        f"                 at {estimate['utilization']:.0%} of the {peak} of a matrix product on this {place} in "
        f"{estimate['precision']}",
        f"memory           {needed} of tensors (estimated) of {available}",
        *(f"  {name:16} {quantity(size, 'B')}" for name, size in sizes.items()),
    ]


def quantity(value: float, unit: str = "") -> str:
    """Format a number with a decimal prefix: `5.1 M`, `2.1 GB`."""
    prefixes = ["", "k", "M", "G", "T", "P", "E"]
    while value >= 999.5 and len(prefixes) > 1:
        value /= 1000
        prefixes.pop(0)
    return f"{value:,.{1 if value < 100 and prefixes[0] else 0}f} {prefixes[0]}{unit}".rstrip()


def duration(seconds: float) -> str:
    """Format a time in the unit that fits: `650 ms`, `2.5 s`, `55.0 minutes`, `2.4 days`."""
    for name, unit in (("days", 86400), ("hours", 3600), ("minutes", 60), ("s", 1)):
        if seconds >= unit:
            return f"{seconds / unit:,.{1 if seconds < 100 * unit else 0}f} {name}"
    return f"{1000 * seconds:.3g} ms"

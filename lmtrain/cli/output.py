"""What the commands print on stdout: results as text or JSON."""

from typing import TYPE_CHECKING, Any

from lmtrain.errors import LmtrainError
from lmtrain.system import launcher
from lmtrain.system.messages import for_terminal, to_json

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
    from tqdm import tqdm

    from lmtrain.config.loader import dump
    from lmtrain.training.costs import costs
    from lmtrain.training.loop import MEMORY_REMEDY

    result, size = costs(config, store), tqdm.format_sizeof
    estimate, memory = result["estimate"], result["memory_bytes"]
    epochs = float(f"{estimate['epochs']:.3g}")
    steps = f"{estimate['steps']:,} steps, {size(estimate['tokens'])} tokens, {epochs:,.15g} epochs"
    if result.get("steps") == estimate["steps"]:
        run = f"{steps}, {duration(60 * estimate['minutes'])} (estimated)"
    else:
        run = f"{steps} (estimated) in {config.train.max_minutes:g} minutes"
    place, peak = estimate["device"].replace("cuda", "gpu").upper(), size(estimate["peak_flops"], "FLOP/s")
    needed, available = memory["total"], estimate["device_memory_bytes"]
    lines = [
        dump(config).rstrip(),
        "---",
        f"parameters       {size(result['parameters'])}, with a vocabulary of {result['vocabulary']:,}",
        f"training tokens  {size(result['tokens_per_epoch'])}, {result['steps_per_epoch']:,.1f} steps per epoch",
        f"step             {result['tokens_per_step']:,} tokens, {size(result['flops_per_step'], 'FLOP')}, "
        f"{duration(estimate['seconds_per_step'])} (estimated)",
        f"run              {run}, without evaluations",
        f"                 at {estimate['utilization']:.0%} of the {peak} of a matrix product on this {place} in "
        f"{estimate['precision']}",
        f"memory           {size(needed, 'B')} of tensors (estimated) of {size(available, 'B')}",
        *(f"  {name:16} {size(part, 'B')}" for name, part in memory.items() if part and name != "total"),
    ]
    show({"config": config.model_dump(mode="json"), **result}, "\n".join(lines), as_json)
    if needed > available and not launcher.is_distributed():  # else shards may fit where the whole does not
        fits_without_batch = needed - memory["activations"] - memory["logits"] < available
        remedy = MEMORY_REMEDY if fits_without_batch else "lower model.dim, model.layers or the vocabulary's size"
        raise LmtrainError(
            f"training needs an estimated {size(needed, 'B')} of memory, and the device has {size(available, 'B')}: "
            f"{remedy}"
        )


def duration(seconds: float) -> str:
    """Format a time in the unit that fits: `650 ms`, `2.5 s`, `55.0 minutes`, `2.4 days`."""
    for name, unit in (("days", 86400), ("hours", 3600), ("minutes", 60), ("s", 1)):
        if seconds >= unit:
            return f"{seconds / unit:,.{1 if seconds < 100 * unit else 0}f} {name}"
    return f"{1000 * seconds:.3g} ms"

"""What a run reports before its first step, and a dry run prints."""

from typing import Any

import torch

from lmtrain.config.schema import Config
from lmtrain.data.tokens import TokenStore
from lmtrain.model.build import build_uninitialized
from lmtrain.system.messages import log
from lmtrain.training.schedule import make_budget, sample_order
from lmtrain.training.train_state import TrainState


def plan_sizes(config: Config, store: TokenStore) -> dict[str, Any]:
    """Return the figures of the model, the data and the budget, without `steps` if that is only in minutes."""
    windows, budget = sample_order(config, store).per_epoch(), make_budget(config, store)
    vocabulary = store.tokenizer.vocab_size
    with torch.device("meta"):  # also for a model that is larger than the memory
        parameters = sum(value.numel() for value in build_uninitialized(config.model, vocabulary).parameters())
    return {
        "parameters": parameters,
        "vocabulary": vocabulary,
        "tokens_per_epoch": store.split("train").tokens,
        "tokens_per_step": config.targets_per_step,
        "windows_per_epoch": windows,
        "steps_per_epoch": windows / config.train.batch_size,
        **({"steps": budget.steps} if budget.steps is not None else {}),
    }


def plan_lines(config: Config, sizes: dict[str, Any], tokenizer_kind: str) -> list[str]:
    """Return a line each about the model, the data and the budget."""
    model, parameters, targets = config.model, sizes["parameters"], sizes["tokens_per_step"]
    size = f"{parameters / 1e6:,.1f} M" if parameters >= 1e6 else f"{parameters:,}"
    limits = []
    if "steps" in sizes:
        epochs = float(f"{sizes['steps'] / sizes['steps_per_epoch']:.3g}")
        tokens = _count(sizes["steps"] * targets, "token")
        limits.append(f"{_count(sizes['steps'], 'step')} ({tokens}, {_count(epochs, 'epoch')})")
    if config.train.max_minutes is not None:
        limits.append(_count(config.train.max_minutes, "minute"))
    return [
        f"model: {size} parameters, {_count(model.layers, 'block')} of width {model.dim}, context {model.context}",
        f"data: {sizes['tokens_per_epoch']:,} training tokens; a vocabulary of {sizes['vocabulary']:,} entries "
        f"({tokenizer_kind}); one epoch is {sizes['steps_per_epoch']:,.1f} steps of {_count(targets, 'token')}",
        f"budget: {' or '.join(limits)}{', whichever comes first' if len(limits) > 1 else ''}",
    ]


def report_device(state: TrainState) -> None:
    """Report the device, the precision, the processes and the compilation of a run."""
    device, processes = state.device, state.processes.world_size
    facts = [torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu", state.precision]
    if device.type == "cpu":
        facts.append(_count(torch.get_num_threads(), "thread"))
    if processes > 1:
        facts.append(f"{processes} processes ({state.strategy})")
    log.info(f"device: {', '.join(facts)}, {'compiled' if state.compiled else 'not compiled'}")


def _count(number: float, name: str) -> str:
    """Return the number with the noun in singular or plural."""
    return f"{number:,.15g} {name}{'s' * (number != 1)}"

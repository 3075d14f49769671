"""What a run reports before its first step, and a dry run prints."""

import torch

from lmtrain.config.schema import Config
from lmtrain.data.tokens import TokenStore
from lmtrain.model.build import build_uninitialized
from lmtrain.system.messages import log
from lmtrain.training.schedule import make_budget, sample_order
from lmtrain.training.train_state import TrainState


def plan_lines(config: Config, store: TokenStore) -> list[str]:
    """Return a line each about the model, the data and the budget."""
    model, tokenizer, budget = config.model, store.tokenizer, make_budget(config, store)
    steps_per_epoch = sample_order(config, store).per_epoch() / config.train.batch_size
    with torch.device("meta"):  # also for a model that is larger than the memory
        parameters = sum(value.numel() for value in build_uninitialized(model, tokenizer.vocab_size).parameters())
    size = f"{parameters / 1e6:,.1f} M" if parameters >= 1e6 else f"{parameters:,}"
    targets = config.targets_per_step
    limits = []
    if budget.steps is not None:
        epochs = float(f"{budget.steps / steps_per_epoch:.3g}")
        tokens = _count(budget.steps * targets, "token")
        limits.append(f"{_count(budget.steps, 'step')} ({tokens}, {_count(epochs, 'epoch')})")
    if budget.seconds is not None:
        limits.append(_count(budget.seconds / 60, "minute"))
    return [
        f"model: {size} parameters, {_count(model.layers, 'block')} of width {model.dim}, context {model.context}",
        f"data: {store.split('train').tokens:,} training tokens; a vocabulary of {tokenizer.vocab_size:,} entries "
        f"({tokenizer.kind}); one epoch is {steps_per_epoch:,.1f} steps of {_count(targets, 'token')}",
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

"""torch.compile, where it is asked for, possible and worth it."""

from collections.abc import Callable

import torch
from torch import Tensor

from lmtrain.errors import LmtrainError
from lmtrain.nn.language_model import LanguageModel
from lmtrain.runtime import autocast, can_compile
from lmtrain.schema import Config
from lmtrain.training.budget import Budget
from lmtrain.training.costs import blank_batch, training_flops

Forward = Callable[[Tensor, Tensor], Tensor]
Note = Callable[[str], None]

ASSUMED_FLOPS = {"cpu": 3e11, "cuda": 1.5e14}
"""Operations a second that decide what counts as a long run; only the order of magnitude matters."""
PAYS_AFTER_SECONDS = 180.0


def compiled_forward(
    model: LanguageModel, config: Config, budget: Budget, device: torch.device, precision: str, note: Note
) -> Forward:
    """The model's forward pass, compiled where that is asked for, possible and worth it; else the model itself.

    `auto` decides from the configuration and the machine alone, never from a clock, so that a resumed run computes as
    the first part did. Raises LmtrainError when `train.compile=true` fails.
    """
    wanted = config.train.compile
    if wanted is False or (wanted == "auto" and not (can_compile(device) and _is_long(model, config, budget, device))):
        return model
    note("compiling the model (well under a minute; cached for the next run)")
    compiled = torch.compile(model, dynamic=False)
    try:
        _try_step(compiled, config, device, precision)
    except (RuntimeError, OSError, ImportError) as error:
        reason = str(error).strip().splitlines()[0][:200]
        if wanted is True:
            raise LmtrainError(
                f"train.compile=true, but torch.compile failed ({reason}): set train.compile=false"
            ) from error
        note(f"torch.compile failed and is left out, which costs speed alone ({reason})")
        return model
    finally:
        model.zero_grad(set_to_none=True)
    return compiled


def _is_long(model: LanguageModel, config: Config, budget: Budget, device: torch.device) -> bool:
    work = float("inf")
    if budget.steps is not None:
        flops = training_flops(model, config.model) * config.train.batch_size
        work = budget.steps * flops / ASSUMED_FLOPS[device.type]
    return min(work, budget.seconds or float("inf")) > PAYS_AFTER_SECONDS


def _try_step(forward: Forward, config: Config, device: torch.device, precision: str) -> None:
    inputs, targets = blank_batch(config, device)
    with autocast(device, precision):
        forward(inputs, targets).sum().backward()  # type: ignore[no-untyped-call]

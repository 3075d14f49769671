"""torch.compile, where it is asked for, possible and worth it."""

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from lmtrain.config.schema import Config
from lmtrain.errors import LmtrainError
from lmtrain.model.language_model import LanguageModel
from lmtrain.system.device import autocast, lacks_to_compile
from lmtrain.training.budget import Budget
from lmtrain.training.costs import blank_batch, step_flops
from lmtrain.training.teacher import Taught

Forward = Callable[[Tensor, Tensor], Tensor]
Note = Callable[[str], None]

ASSUMED_FLOPS = {"cpu": 3e11, "cuda": 1.5e14}
"""Operations a second that decide what counts as a long run; only the order of magnitude matters."""
PAYS_AFTER_SECONDS = 180.0


def compiled_forward(
    model: LanguageModel | Taught, config: Config, budget: Budget, device: torch.device, precision: str, note: Note
) -> Forward:
    """The model's forward pass, compiled where that is asked for, possible and worth it; else the model itself.

    `auto` decides from the configuration and the machine alone, never from a clock, so that a resumed run computes as
    the first part did. Raises LmtrainError when `train.compile=true` fails or can't be done.
    """
    wanted = config.train.compile
    if wanted is False or (wanted == "auto" and not _is_long(model, config, budget, device)):
        return model
    lacking = lacks_to_compile(device)
    if lacking is not None:
        if wanted is True:
            raise LmtrainError(f"train.compile=true, but this machine has no {lacking}: set train.compile=false")
        note(f"not compiling the model, which costs speed alone: this machine has no {lacking}")
        return model
    note("compiling the model (a minute or two; cached for the next run)")
    compiled = torch.compile(model, dynamic=False)
    try:
        with warnings.catch_warnings():
            # It advises a setting for float32, of which a step in bf16 has little, and one in fp32 is to have all.
            warnings.filterwarnings("ignore", "TensorFloat32 tensor cores", UserWarning)
            _try_step(compiled, config, device, precision)
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:  # compilers raise any; what is the model's own fault, the plain one raises again
        if wanted is True:
            raise LmtrainError(
                f"train.compile=true, but torch.compile failed ({_reason(error)}): set train.compile=false"
            ) from error
        note(f"torch.compile failed and is left out, which costs speed alone ({_reason(error)})")
        return model
    finally:
        model.zero_grad(set_to_none=True)
    return compiled


def _reason(error: Exception) -> str:
    """The line that says what went wrong: the compiler's own error comes after the name of the backend."""
    lines = [line.strip() for line in str(error).splitlines()]
    said = [line for line in lines if line and not line.endswith("raised:")]
    return (said or [type(error).__name__])[0][:200]


def _is_long(model: LanguageModel | Taught, config: Config, budget: Budget, device: torch.device) -> bool:
    work = float("inf")
    if budget.steps is not None:
        learner = model.model if isinstance(model, Taught) else model
        work = budget.steps * step_flops(learner, config) / ASSUMED_FLOPS[device.type]
    return min(work, budget.seconds or float("inf")) > PAYS_AFTER_SECONDS


def _try_step(forward: Forward, config: Config, device: torch.device, precision: str) -> None:
    inputs, targets = blank_batch(config, device)
    with autocast(device, precision):
        forward(inputs, targets).sum().backward()  # type: ignore[no-untyped-call]

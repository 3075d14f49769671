"""torch.compile, if it is requested, possible and worth it."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lmtrain.config.schema import Config, ModelConfig
from lmtrain.errors import LmtrainError
from lmtrain.evaluation.perplexity import Forward
from lmtrain.system.device import autocast, missing_to_compile
from lmtrain.system.messages import log
from lmtrain.training.schedule import Budget

ASSUMED_FLOPS = {"cpu": 3e11, "cuda": 5e13}
"""Operations per second, by which the length of a run is estimated; only the order of magnitude matters."""
PAYS_AFTER_SECONDS = 180.0
"""How long a run must take for compiling to save time."""
KERNELS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def compiled_forward(
    objective: nn.Module, config: Config, budget: Budget, device: torch.device, precision: str
) -> Forward:
    """Return the objective, compiled if that is requested, possible and worth it; else unchanged.

    `auto` decides by the configuration and the machine, never by a clock, so that a resumed run computes in the same
    way. Raises LmtrainError if `train.compile=true` fails or is impossible.

    On a GPU each pass is captured as a CUDA graph, where it can be: the host takes longer to launch the kernels of a
    small model one by one than the GPU takes to compute them.
    """
    requested = config.train.compile
    if requested is False or (requested == "auto" and not _is_long(objective, config, budget, device)):
        return objective

    def uncompiled(why: str) -> Forward:
        if requested is True:
            raise LmtrainError(f"train.compile=true, but {why}: set train.compile=false")
        log.info(f"not compiling the model, which only costs speed: {why}")
        return objective

    if missing := missing_to_compile(device):
        return uncompiled(f"compiling needs {missing}")
    log.info("compiling the model (a minute or two; cached for the next run)")
    options: dict[str, Any] = {"triton.cudagraphs": True} if _can_be_captured(config, device) else {}
    try:
        compiled = torch.compile(objective, dynamic=False, options=options)
        inputs, targets = blank_batch(config.model, config.train.micro_batch_size, device)
        with warnings.catch_warnings(), autocast(device, precision), _attention_kernels(config.model):
            # PyTorch recommends TF32, which bf16 does not need and fp32 must not use.
            warnings.filterwarnings("ignore", "TensorFloat32 tensor cores", UserWarning)
            for _ in range(3 if options else 1):  # a graph is first run as kernels, then captured, then replayed
                objective.zero_grad(set_to_none=True)
                nats = compiled(inputs, targets)  # which lives through the backward pass, as in training
                nats.sum().backward()
                del nats
    except Exception as error:  # noqa: BLE001 -- compilers raise any type; other errors recur without compiling
        return uncompiled(f"torch.compile failed ({_reason(error)})")
    finally:
        objective.zero_grad(set_to_none=True)
    return compiled


def blank_batch(model: ModelConfig, rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return a micro-batch of zeros, of the shapes of `SampleOrder.batch`."""
    inputs = torch.zeros(rows, model.context, dtype=torch.int64, device=device)
    return inputs, inputs.new_zeros(rows, model.targets)


def _reason(error: Exception) -> str:
    """Return the line with the compiler's error, which comes after a line with the name of the backend."""
    lines = [line.strip() for line in str(error).splitlines()]
    reasons = [line for line in lines if line and not line.endswith("raised:")]
    return (reasons or [type(error).__name__])[0][:200]


@contextmanager
def _attention_kernels(model: ModelConfig) -> Iterator[None]:
    """Allow cuDNN's attention, which a recent PyTorch prefers on Hopper, where it is correct: see `choose_device`.

    The compiler chooses once. What is not compiled would be slowed down: cuDNN prepares for each new shape. The key of
    the compiler's cache lacks what was allowed (pytorch/pytorch#185449), so it is added.
    """
    masks = set(model.layer_attention) != {"full"} or model.position == "alibi"
    allowed = not (masks or model.attention_dropout)
    with (
        sdpa_kernel(KERNELS) if allowed else nullcontext(),
        torch.compiler.config.patch(cache_key_tag=f"cudnn attention: {allowed}"),  # type: ignore[attr-defined]
    ):
        yield


def _can_be_captured(config: Config, device: torch.device) -> bool:
    """Whether a CUDA graph may capture the passes over a micro-batch.

    A graph keeps the gradients in its own memory, so that those of a step with several micro-batches would be
    overwritten; an adaptive output reads on the host how many targets are in its clusters; and recomputed dropout must
    restore the generator's state.
    """
    train = config.train
    one_pass = train.micro_batch_size == train.batch_size and not train.activation_checkpointing
    return device.type == "cuda" and one_pass and config.model.output == "softmax"


def _is_long(objective: nn.Module, config: Config, budget: Budget, device: torch.device) -> bool:
    """Whether the run would take longer than PAYS_AFTER_SECONDS, at 6 operations per parameter and token (Kaplan et
    al., 2020). Counting the operations would take a second."""
    seconds = budget.seconds or float("inf")
    if budget.steps is not None:
        parameters = sum(parameter.numel() for parameter in objective.parameters() if parameter.requires_grad)
        tokens = budget.steps * config.train.batch_size * config.model.context
        seconds = min(seconds, 6.0 * parameters * tokens / ASSUMED_FLOPS[device.type])
    return seconds > PAYS_AFTER_SECONDS

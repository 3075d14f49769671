"""The size of a trained model's gradients, which dynamic evaluation divides its steps by, and where it is kept.

runs/<name>/gradient-rms/  manifest.json  gradient_rms.safetensors
"""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmtrain.data.order import SampleOrder, batch
from lmtrain.data.tokens import Split
from lmtrain.errors import LmtrainError
from lmtrain.evaluation.perplexity import Advance
from lmtrain.model.language_model import LanguageModel
from lmtrain.storage.files import new_folder, read_manifest, sha256_bytes, verify
from lmtrain.storage.tensor_files import open_files, serialize
from lmtrain.system import disk
from lmtrain.system.device import autocast
from lmtrain.system.machine import machine

RMS_TOKENS = 200_000
TOKENS_PER_GRADIENT = 1_024
"""Of `gradient_rms`: the tokens that it is measured on, and those of each batch."""

FOLDER, FILE, FORMAT = "gradient-rms", "gradient_rms.safetensors", "lmtrain-gradient-rms/1"


def kept_gradient_rms(
    run_dir: Path,
    model: LanguageModel,
    split: Split,
    tokens: str,
    *,
    device: torch.device,
    precision: str,
    advance: Advance | None = None,
) -> list[Tensor]:
    """`gradient_rms`, measured once: it is kept in the run's folder if that can be written.

    What was kept is read if it is undamaged and was measured with the same weights, model, training split (`tokens` is
    the hash of its store), precision, device, threads and PyTorch, so that it has the bits of a new measurement.
    Otherwise it is replaced.
    """
    weights = dict(model.named_parameters())
    measured_with = {
        "weights": sha256_bytes(*serialize(weights)),
        "model": model.config.model_dump(mode="json"),
        "tokens": tokens,
        "precision": precision,
        "read": [RMS_TOKENS, TOKENS_PER_GRADIENT],
        **{name: fact for name, fact in machine(device).items() if name in ("processor", "device", "threads", "torch")},
    }
    found = _kept(run_dir / FOLDER, measured_with, weights)
    if found is not None:
        return found
    rms = gradient_rms(model, split, device=device, precision=precision, advance=advance)
    with suppress(LmtrainError), new_folder(run_dir / FOLDER, FORMAT, {"measured_with": measured_with}) as folder:
        disk.write(folder / FILE, serialize(dict(zip(weights, rms, strict=True))))
    return rms


def _kept(folder: Path, measured_with: dict[str, Any], weights: Mapping[str, Tensor]) -> list[Tensor] | None:
    """What was kept for these weights; None if that is missing, damaged, or measured with something else."""
    with suppress(LmtrainError):
        manifest = read_manifest(folder, FORMAT)
        if manifest.get("measured_with") == measured_with:
            verify(folder, manifest["files"])
            stored = open_files([folder / FILE])
            shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
            if {name: value.shape for name, value in stored.items()} == shapes:
                return [stored[name][...].to(weight.device) for name, weight in weights.items()]
    return None


def rms_tokens(model: LanguageModel, split: Split) -> int:
    """How many tokens of `split` are read by `gradient_rms`. Raises LmtrainError as that does."""
    _, rows, batches = _batches(model, split)
    return rows * batches * model.config.context


def _batches(model: LanguageModel, split: Split) -> tuple[SampleOrder, int, int]:
    """The order of the windows, how many make up a batch, and the number of batches."""
    context = model.config.context
    order = SampleOrder(split.tokens, context, "causal", seed=0)
    rows = min(max(1, TOKENS_PER_GRADIENT // context), order.per_epoch())
    return order, rows, max(1, min(RMS_TOKENS // context, order.per_epoch()) // rows)


def gradient_rms(
    model: LanguageModel, split: Split, *, device: torch.device, precision: str, advance: Advance | None = None
) -> list[Tensor]:
    """The root mean square of the gradient of one token's loss on `split`, for each parameter of a causal model.

    Estimated from the gradients g of batches of n tokens, each the mean over its tokens, as sqrt(n E[g^2]): this
    assumes that the tokens' own gradients are independent with mean zero, which holds near the end of training.
    Raises LmtrainError for a split shorter than a window.
    """
    context = model.config.context
    order, rows, batches = _batches(model, split)
    squares = [torch.zeros_like(parameter) for parameter in model.parameters()]
    for index in range(batches):
        inputs, targets = batch(split.ids, order.starts(index * rows, rows), context, "causal")
        with torch.enable_grad(), autocast(device, precision):
            nats = model(inputs.to(device), targets.to(device))
        for square, gradient in zip(squares, gradients_of(nats, model), strict=True):
            square.addcmul_(gradient, gradient)
        if advance is not None:
            advance(targets.numel())
    return [(square * (rows * context / batches)).sqrt() for square in squares]


def gradients_of(nats: Tensor, model: LanguageModel) -> tuple[Tensor, ...]:
    """Of the mean of `nats`, for each parameter; zero for a parameter that it does not depend on."""
    # Without autocast: the dtypes of the backward pass are those of the forward pass.
    with torch.enable_grad(), torch.autocast(nats.device.type, enabled=False):
        return torch.autograd.grad(nats.mean(), list(model.parameters()), materialize_grads=True)

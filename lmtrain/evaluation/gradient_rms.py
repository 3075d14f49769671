"""The size of a trained model's gradients, which dynamic evaluation divides its steps by."""

import torch
from torch import Tensor

from lmtrain.data.order import SampleOrder, batch
from lmtrain.data.tokens import Split
from lmtrain.evaluation.perplexity import Advance
from lmtrain.model.language_model import LanguageModel
from lmtrain.system.device import autocast

RMS_TOKENS = 200_000
TOKENS_PER_GRADIENT = 1_024
"""The tokens that `gradient_rms` is measured on, and those of each batch."""


def gradient_rms(
    model: LanguageModel, split: Split, *, device: torch.device, precision: str, advance: Advance
) -> list[Tensor]:
    """The root mean square of the gradient of one token's loss on `split`, for each parameter of a causal model.

    Estimated from the gradients g of batches of n tokens, each the mean over its tokens, as sqrt(n E[g^2]): this
    assumes that the tokens' own gradients are independent with mean zero, which holds near the end of training.
    Raises LmtrainError for a split shorter than a window.
    """
    context = model.config.context
    order = SampleOrder(split.tokens, context, "causal", seed=0)
    rows = min(max(1, TOKENS_PER_GRADIENT // context), order.per_epoch())
    batches = max(1, min(RMS_TOKENS // context, order.per_epoch()) // rows)
    squares = [torch.zeros_like(parameter) for parameter in model.parameters()]
    for index in range(batches):
        inputs, targets = batch(split.ids, order.starts(index * rows, rows), context, "causal")
        with torch.enable_grad(), autocast(device, precision):
            nats = model(inputs.to(device), targets.to(device))
        for square, gradient in zip(squares, gradients_of(nats, model), strict=True):
            square.addcmul_(gradient, gradient)
        advance(targets.numel())
    return [(square * (rows * context / batches)).sqrt() for square in squares]


def gradients_of(nats: Tensor, model: LanguageModel) -> tuple[Tensor, ...]:
    """Of the mean of `nats`, for each parameter; zero for a parameter that it does not depend on."""
    # Without autocast: the dtypes of the backward pass are those of the forward pass.
    with torch.enable_grad(), torch.autocast(nats.device.type, enabled=False):
        return torch.autograd.grad(nats.mean(), list(model.parameters()), materialize_grads=True)

"""The optimizers: AdamW, or Muon for the hidden matrices with AdamW for the other parameters; and EMA weights.

Both can skip a step by a condition on the device. Shapes: N matrices of one shape, A rows, B columns.
"""

from typing import Any

import torch
from torch import Tensor, nn

from lmtrain.config.train import TrainConfig
from lmtrain.model.language_model import LanguageModel
from lmtrain.nn.norms import NORMS
from lmtrain.nn.token_shift import TokenShift
from lmtrain.system.device import choose_precision

MOMENTUM = 0.95
COEFFICIENTS = ((8.0132, -22.9258, 16.5994), (3.6006, -2.6419, 0.5105), (2.635, -1.919, 0.4306))
"""The coefficients (a, b, c) of polynomials a x + b x^3 + c x^5 that are applied one after the other. They bring
singular values from 0.01 to 1 nearest to 1: between 0.71 and 1.27. Each is a polynomial in x / 1.01, a margin for
rounding, since it grows fast above its range."""
EPS = 1e-7

GAINS = (*NORMS.values(), TokenShift)
GAIN_FACTOR = 5.0


class AdamW(torch.optim.AdamW):
    """Fused AdamW (Loshchilov & Hutter, 2019), whose state exists before the first step, so that it can be restored."""

    def __init__(self, groups: list[dict[str, Any]], **options: Any) -> None:
        super().__init__(groups, fused=True, **options)
        for group in self.param_groups:
            for parameter in group["params"]:
                moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                self.state[parameter] = {"step": torch.zeros((), device=parameter.device), **moments}

    def step_unless(self, skip: Tensor) -> None:
        """Take a step, unless `skip`, () bool on the device: then parameters and state stay unchanged.

        The host does not wait for the value. `torch.amp.GradScaler` passes the same condition as `found_inf`.
        """
        self.found_inf = skip.float()
        self.step()


def orthogonalized(matrices: Tensor, dtype: torch.dtype) -> Tensor:
    """Return about U V^T for each matrix U S V^T: (N, A, B) -> (N, A, B) in `dtype`.

    The Polar Express (Amsel et al., 2025): Newton-Schulz iterations, each with the polynomial that is best after the
    previous ones.
    """
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.to(dtype)
    x = x.mT if tall else x  # the smaller Gram matrix
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=EPS)
    for a, b, c in COEFFICIENTS:
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class Muon(AdamW):
    """Muon (Jordan et al., 2024) with Nesterov momentum for matrices, and AdamW for all other parameters.

    The update of a matrix is its orthogonalized momentum. If that has full rank, its elements have a root mean square
    of 0.2 times the learning rate, like AdamW's (Liu et al., 2025), so that both have the same learning rate and
    decoupled weight decay. Matrices of one shape are batched, in `dtype`. They must be whole: sharded by rows, each
    process would orthogonalize its own part.

    The first of the parameter `groups` has the matrices. `options` are those of AdamW.
    """

    def __init__(self, groups: list[dict[str, Any]], dtype: torch.dtype, **options: Any) -> None:
        super().__init__(groups, **options)
        self._dtype = dtype
        shapes: dict[torch.Size, list[Tensor]] = {}
        for parameter in self.param_groups[0]["params"]:
            shapes.setdefault(parameter.shape, []).append(parameter)
        self._batches = [(alike, alike[0].new_zeros(len(alike), *shape)) for shape, alike in shapes.items()]
        for parameters, momenta in self._batches:
            for parameter, momentum in zip(parameters, momenta, strict=True):
                self.state[parameter] = {"momentum_buffer": momentum}

    @torch.no_grad()
    def step_unless(self, skip: Tensor) -> None:
        """Do the same as `AdamW.step_unless`, and delete the gradients of the matrices: AdamW skips what has none."""
        for parameters, momenta in self._batches:
            self._update(parameters, momenta, skip)
            for parameter in parameters:
                parameter.grad = None
        super().step_unless(skip)

    def _update(self, parameters: list[Tensor], momenta: Tensor, skip: Tensor) -> None:
        """Update N matrices (A, B) and their momenta (N, A, B)."""
        lr, weight_decay = (self.param_groups[0][name] for name in ("lr", "weight_decay"))
        rows, columns = parameters[0].shape
        # In a skipped step all sums get 0 added, which keeps their bits, and never 0 x NaN.
        gradients = torch.stack([parameter.grad for parameter in parameters]).masked_fill_(skip, 0.0)  # type: ignore[misc]
        momenta.lerp_(gradients, torch.where(skip, 0.0, 1.0 - MOMENTUM))
        update = orthogonalized(gradients.lerp_(momenta, MOMENTUM), self._dtype).masked_fill_(skip, 0.0)
        # Contiguous: on a GPU, foreach adds tensors of other strides one by one.
        update = update.to(torch.float32, memory_format=torch.contiguous_format)
        torch._foreach_mul_(parameters, torch.where(skip, 1.0, 1.0 - lr * weight_decay))
        torch._foreach_add_(parameters, list(update.unbind()), alpha=-0.2 * max(rows, columns) ** 0.5 * lr)


def make_optimizer(model: LanguageModel, train: TrainConfig) -> AdamW:
    """Return fused AdamW (Loshchilov & Hutter, 2019), or with `muon`, `Muon` with AdamW for all but hidden matrices.

    Weight decay applies to matrices, but not to vectors: norm gains, biases, seeds and slopes are few and set a scale.

    AdamW's updates do not depend on the scale of a parameter, so each group has an `lr_factor`, by which the learning
    rate is multiplied. It is 1 / sqrt(E) for the word embedding and an untied output layer of width E, whose elements
    start at 1 / E instead of 1 / sqrt(E), and 5 for norms and the token shift, whose gains start far larger than the
    elements of a matrix.
    """
    embeddings = (model.embedding.weight, *model.output.parameters())
    gains = [gain for module in model.modules() if isinstance(module, GAINS) for gain in module.parameters()]
    factors = dict.fromkeys(embeddings, model.embedding.embedding_dim**-0.5) | dict.fromkeys(gains, GAIN_FACTOR)
    matrices = model.hidden_matrices() if train.optimizer == "muon" else []
    hidden = set(matrices)
    groups: dict[tuple[bool, float, float], dict[str, Any]] = {}
    for parameter in dict.fromkeys([*matrices, *model.parameters()]):  # the matrices first, and each once
        decay, factor = 0.0 if parameter.ndim < 2 else train.weight_decay, factors.get(parameter, 1.0)
        new: dict[str, Any] = {"params": [], "weight_decay": decay, "lr_factor": factor}
        groups.setdefault((parameter in hidden, decay, factor), new)["params"].append(parameter)
    options: dict[str, Any] = {"lr": train.lr, "betas": (train.beta1, train.beta2), "eps": train.eps}
    if not matrices:
        return AdamW(list(groups.values()), **options)
    # If bf16 is emulated, float32 is several times faster, and more accurate.
    native = choose_precision("auto", matrices[0].device) == "bf16"
    return Muon(list(groups.values()), torch.bfloat16 if native else torch.float32, **options)


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the optimizer's state as named tensors: `<parameter>/<entry>`."""
    return {
        f"{name}/{entry}": value
        for name, parameter in model.named_parameters()
        for entry, value in optimizer.state[parameter].items()
    }


@torch.no_grad()
def update_ema(ema: dict[str, Tensor], model: nn.Module, decay: float, step: int) -> None:
    """Move the exponential moving average of the weights toward the model's by 1 - decay, and faster early on."""
    current: list[Tensor] = list(model.parameters())  # in the order of `ema`, as `new_state` makes it
    torch._foreach_lerp_([*ema.values()], current, 1.0 - min(decay, (1 + step) / (10 + step)))

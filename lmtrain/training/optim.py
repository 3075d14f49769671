"""The optimizer (AdamW, or Muon and AdamW), the learning-rate schedule, and the averaged weights."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from lmtrain.config.train import TrainConfig
from lmtrain.model.language_model import LanguageModel
from lmtrain.nn.norms import ScaleNorm
from lmtrain.nn.token_shift import TokenShift
from lmtrain.storage.checkpoint import check_shapes
from lmtrain.storage.tensor_files import LazyTensor
from lmtrain.system.device import choose_precision
from lmtrain.training.budget import Budget
from lmtrain.training.muon import AdamW, Muon
from lmtrain.training.sharding import shard_like

ADAM_STATE = ("step", "exp_avg", "exp_avg_sq")
MUON_STATE = ("momentum_buffer",)
GAINS = (nn.LayerNorm, nn.RMSNorm, ScaleNorm, TokenShift)
GAIN_FACTOR = 5.0


def _schedule(train: TrainConfig, progress: float, warmup: float) -> float:
    """Return the learning rate as a fraction of its peak, at `progress` in [`warmup`, 1] of the run.

    `cosine` decays to `final_lr` along half a cosine (Loshchilov & Hutter, 2017), `linear` decays to it linearly, `wsd`
    is constant and decays linearly over the last `decay` (Hu et al., 2024), and `constant` stays constant.
    """
    rest = min(1.0, (progress - warmup) / (1.0 - warmup))
    if train.schedule == "cosine":
        return train.final_lr + (1.0 - train.final_lr) * 0.5 * (1.0 + math.cos(math.pi * rest))
    if train.schedule == "linear":
        return 1.0 - (1.0 - train.final_lr) * rest
    if train.schedule == "wsd":
        return 1.0 - (1.0 - train.final_lr) * max(0.0, (progress - (1.0 - train.decay)) / train.decay)
    return 1.0


def learning_rate(train: TrainConfig, budget: Budget, step: int, seconds: float) -> float:
    """Return the learning rate of this step; at least a thousandth of the peak, so that the first step has an effect.

    It rises linearly over the warmup and then follows `_schedule`. With a budget in steps the rise is computed from the
    step and `warmup_steps`, so that another budget gives the same bits.
    """
    progress, length = budget.progress(step, seconds), warmup_steps(train, budget)
    done, whole = (progress, train.warmup) if length is None else (step, length)
    if done < whole:
        scale = done / whole
    else:
        fraction = train.warmup if train.warmup < 1 or budget.steps is None else train.warmup / budget.steps
        scale = _schedule(train, progress, fraction)
    return train.lr * max(scale, 1e-3)


def warmup_steps(train: TrainConfig, budget: Budget) -> float | None:
    """Return how many steps the warmup takes, or None if it follows the clock."""
    if budget.steps is None or budget.seconds is not None:
        return None
    length = train.warmup if train.warmup >= 1 else train.warmup * budget.steps
    return max(1.0, length) if length else 0.0


def steps_independent_of_budget(train: TrainConfig, budget: Budget) -> int:
    """Return how many steps from the start have the same learning rates with every larger budget, to the last bit.

    These are the steps before the decay of `wsd` (rounded down: the step at its beginning may be part of it), and all
    steps with `constant`. 0 for other schedules, and if the schedule follows the clock.
    """
    if budget.steps is None or budget.seconds is not None:
        return 0
    stable = {"wsd": 1.0 - train.decay, "constant": 1.0}
    return int(stable.get(train.schedule, 0.0) * budget.steps)


def make_optimizer(model: LanguageModel, train: TrainConfig) -> AdamW | Muon:
    """Return fused AdamW (Loshchilov & Hutter, 2019), or with `muon`, `Muon` with AdamW for all but hidden matrices.

    Weight decay applies to matrices, but not to vectors: norm gains, biases, seeds and slopes are few and set a scale.

    AdamW's updates do not depend on the scale of a parameter, so each group has an `lr_factor`, by which the learning
    rate is multiplied. It is 1 / sqrt(E) for the word embedding and an untied output layer of width E, whose elements
    start at 1 / E instead of 1 / sqrt(E), and 5 for the gains of norms and of the token shift, which start near 1.
    """
    embeddings = {id(weight) for weight in (model.embedding.weight, *model.output.parameters())}
    gains = {id(gain) for module in model.modules() if isinstance(module, GAINS) for gain in module.parameters()}
    factors = dict.fromkeys(embeddings, model.embedding.embedding_dim**-0.5) | dict.fromkeys(gains, GAIN_FACTOR)
    matrices = model.hidden_matrices() if train.optimizer == "muon" else []
    decay = train.weight_decay
    groups: dict[tuple[float, float], list[Tensor]] = {}
    hidden = {id(parameter) for parameter in matrices}
    for parameter in model.parameters():
        if id(parameter) not in hidden:
            rate = 0.0 if parameter.ndim < 2 else decay
            groups.setdefault((rate, factors.get(id(parameter), 1.0)), []).append(parameter)
    adamw = AdamW(
        [
            {"params": parameters, "weight_decay": rate, "lr_factor": factor}
            for (rate, factor), parameters in groups.items()
        ],
        lr=train.lr,
        betas=(train.beta1, train.beta2),
        eps=train.eps,
        fused=True,
    )
    if not matrices:
        return adamw
    # If bf16 is emulated, float32 is several times faster, and more accurate.
    native = choose_precision("auto", matrices[0].device) == "bf16"
    group = {"params": matrices, "weight_decay": decay, "lr_factor": 1.0}
    return Muon([group], adamw, train.lr, torch.bfloat16 if native else torch.float32)


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the optimizer's state as named tensors: `<parameter>/<entry>`."""
    return {
        f"{name}/{entry}": value
        for name, parameter in model.named_parameters()
        for entry, value in optimizer.state.get(parameter, {}).items()
    }


def load_optimizer_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor | LazyTensor]
) -> None:
    """Restore what `optimizer_tensors` returned, bit for bit; `Optimizer.load_state_dict` would cast it.

    Raises ValueError if the names, shapes and types are not those of this optimizer's state.
    """
    entries = {
        parameter: ADAM_STATE if "betas" in group else MUON_STATE
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    parameters = dict(model.named_parameters())
    count = torch.zeros((), device=next(model.parameters()).device)
    like = {
        f"{name}/{entry}": count if entry == "step" else parameter
        for name, parameter in parameters.items()
        for entry in entries[parameter]
    }
    check_shapes(tensors, like)
    for key, tensor in like.items():
        name, _, entry = key.rpartition("/")
        optimizer.state[parameters[name]][entry] = shard_like(tensors[key], tensor)


@torch.no_grad()
def update_ema(ema: dict[str, Tensor], model: nn.Module, decay: float, step: int) -> None:
    """Move the exponential moving average of the weights towards the model's by 1 - decay, and faster early on."""
    parameters = dict(model.named_parameters())
    current: list[Tensor] = [parameters[name] for name in ema]
    torch._foreach_lerp_([*ema.values()], current, 1.0 - min(decay, (1 + step) / (10 + step)))

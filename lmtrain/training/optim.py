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


def _schedule(config: TrainConfig, progress: float, warmup: float) -> float:
    """Learning rate as a fraction of its peak, at `progress` in [`warmup`, 1] of the run.

    `cosine` decays to `final_lr` along half a cosine (Loshchilov & Hutter, 2017), `linear` decays to it linearly, `wsd`
    is constant and decays linearly over the last `decay` (Hu et al., 2024), and `constant` stays constant.
    """
    rest = min(1.0, (progress - warmup) / (1.0 - warmup))
    if config.schedule == "cosine":
        return config.final_lr + (1.0 - config.final_lr) * 0.5 * (1.0 + math.cos(math.pi * rest))
    if config.schedule == "linear":
        return 1.0 - (1.0 - config.final_lr) * rest
    if config.schedule == "wsd":
        return 1.0 - (1.0 - config.final_lr) * max(0.0, (progress - (1.0 - config.decay)) / config.decay)
    return 1.0


def learning_rate(config: TrainConfig, budget: Budget, step: int, seconds: float) -> float:
    """The learning rate of this step; never zero, so that the first step has an effect.

    It rises linearly over the warmup and then follows `_schedule`. With a budget in steps the rise is computed from the
    step and `warmup_steps`, so that another budget gives the same bits.
    """
    progress, length = budget.progress(step, seconds), warmup_steps(config, budget)
    done, whole = (progress, config.warmup) if length is None else (step, length)
    if done < whole:
        share = done / whole
    else:
        fraction = config.warmup if config.warmup < 1 or budget.steps is None else config.warmup / budget.steps
        share = _schedule(config, progress, fraction)
    return config.lr * max(share, 1e-3)


def warmup_steps(config: TrainConfig, budget: Budget) -> float | None:
    """How many steps the warmup takes; None = it follows the clock."""
    if budget.steps is None or budget.seconds is not None:
        return None
    length = config.warmup if config.warmup >= 1 else config.warmup * budget.steps
    return max(1.0, length) if length else 0.0


def steps_before_decay(config: TrainConfig, budget: Budget) -> int:
    """How many of the first steps have learning rates that depend only on the step and `warmup_steps`, to the last bit.

    Rounded down, for the next one may be part of the decay by rounding. 0 if the schedule follows the clock.
    """
    if budget.steps is None or budget.seconds is not None:
        return 0
    stable = {"wsd": 1.0 - config.decay, "constant": 1.0}
    return int(stable.get(config.schedule, 0.0) * budget.steps)


def make_optimizer(model: LanguageModel, config: TrainConfig) -> AdamW | Muon:
    """AdamW (Loshchilov & Hutter, 2019), fused; with `muon`, `Muon` for the hidden matrices and AdamW for the others.

    Weight decay applies to matrices and not to vectors: norm gains, biases, seeds and slopes are few and set a scale.

    A group's `lr_factor` multiplies the learning rate, since AdamW's updates do not depend on the scale of what they
    change. For the word embedding and an untied output layer of width E it is 1 / sqrt(E), as their elements start at
    1 / E instead of 1 / sqrt(E). For the gains of norms and of the token shift, which start near 1, it is 5.
    """
    words = {id(weight) for weight in (model.embedding.weight, *model.output.parameters())}
    gains = {id(gain) for module in model.modules() if isinstance(module, GAINS) for gain in module.parameters()}
    factors = dict.fromkeys(words, model.embedding.embedding_dim**-0.5) | dict.fromkeys(gains, GAIN_FACTOR)
    matrices = model.hidden_matrices() if config.optimizer == "muon" else []
    decay = config.weight_decay
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
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,
    )
    if not matrices:
        return adamw
    # Where bf16 is emulated, float32 is several times faster and more accurate.
    native = choose_precision("auto", matrices[0].device) == "bf16"
    group = {"params": matrices, "weight_decay": decay, "lr_factor": 1.0}
    return Muon([group], adamw, config.lr, torch.bfloat16 if native else torch.float32)


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state as named tensors: `<parameter>/<entry>`."""
    return {
        f"{name}/{entry}": value
        for name, parameter in model.named_parameters()
        for entry, value in optimizer.state.get(parameter, {}).items()
    }


def load_optimizer_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor | LazyTensor]
) -> None:
    """Restore what `optimizer_tensors` returned, bit for bit (`Optimizer.load_state_dict` would cast).

    Raises ValueError unless names, shapes and types are those of this optimizer's state.
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
    for key, place in like.items():
        name, _, entry = key.rpartition("/")
        optimizer.state[parameters[name]][entry] = shard_like(tensors[key], place)


@torch.no_grad()
def update_ema(ema: dict[str, Tensor], model: nn.Module, decay: float, step: int) -> None:
    """Exponential moving average: move the averaged weights towards the model's by 1 - decay, faster early on."""
    parameters = dict(model.named_parameters())
    current: list[Tensor] = [parameters[name] for name in ema]
    torch._foreach_lerp_([*ema.values()], current, 1.0 - min(decay, (1 + step) / (10 + step)))

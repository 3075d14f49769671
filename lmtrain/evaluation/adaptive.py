"""A model that adapts to the text that it is measured on: a cache of its own states, and gradient steps.

Each is a `forward` for `evaluation.evaluate`, remembers what it has scored, and scores every token before it sees it.

Shapes: B windows, T tokens in each, S targets; E the width of the states, K states in memory, N new ones.
"""

import copy
import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from lmtrain.config.schema import EvalConfig
from lmtrain.data.order import SampleOrder, batch
from lmtrain.data.tokens import Split
from lmtrain.errors import LmtrainError, UsageError
from lmtrain.model.language_model import LanguageModel
from lmtrain.nn.pointer import NEVER
from lmtrain.system.device import autocast

QUERIES_AT_ONCE = 256
"""Of the cache: rows of the matrix of scores, which has a column for each state in the window."""

DEFAULT_LR = {"rms": 1e-4, "sgd": 0.02}
DEFAULT_EMBEDDING = 1.0
"""Of dynamic evaluation: the learning rate by rule, and how many times that is the words' vectors'."""

STATISTICS_TOKENS = 200_000
TOKENS_PER_GRADIENT = 1_024
"""Of `gradient_rms`."""

EPS = 1.0
"""Added to the RMS of a weight's gradient, in units of the mean RMS: less lets rare words' rows fly off."""

Forward = Callable[[Tensor, Tensor], Tensor]
Scored = tuple[Tensor, Tensor]
"""Nats of the targets (B, S) or (B,), and the states that they were predicted from, with an axis E more."""
Scorer = Callable[[Tensor, Tensor], Scored]
Advance = Callable[[int], object]
Rates = list[tuple[Tensor, Tensor]]
"""The learning rate and the decay of each parameter, in its shape or ()."""


def cache_log_probs(states: Tensor, words: Tensor, nats: Tensor, theta: float, window: int) -> Tensor:
    """log p of each of the last N words by the continuous cache (Grave et al., 2017): (N,), float32.

    states (K + N, E) and the words (K + N,) that were predicted from them, in the order of the text; nats (N,), the
    model's own for the last N. p(w) is the sum over the `window` places before, i, of softmax(theta cos(h, h_i)) where
    words_i = w. The cosine stands for the paper's dot product: states of any width and size then have the same theta.
    A word that is not there has -inf; where there are no places before, the model's own probability stands. Whatever
    the model computes in, this is done in float32.
    """
    with torch.autocast(states.device.type, enabled=False):
        return _cache_log_probs(states, words, nats, theta, window)


def _cache_log_probs(states: Tensor, words: Tensor, nats: Tensor, theta: float, window: int) -> Tensor:
    unit = F.normalize(states.to(torch.promote_types(states.dtype, torch.float32)), dim=-1)
    parts = []
    for begin in range(len(states) - len(nats), len(states), QUERIES_AT_ONCE):
        end, low = min(begin + QUERIES_AT_ONCE, len(states)), max(0, begin - window)
        queries, keys = torch.arange(begin, end, device=words.device), torch.arange(low, end, device=words.device)
        ago = queries.unsqueeze(-1) - keys
        scores = (theta * unit[begin:end] @ unit[low:end].T).masked_fill((ago < 1) | (ago > window), NEVER)
        same = words[begin:end].unsqueeze(-1) == words[low:end]
        found = scores.masked_fill(~same, NEVER).logsumexp(-1)
        parts.append(torch.where(found == NEVER, NEVER, found - scores.logsumexp(-1)))
    log_probs = torch.cat(parts)
    if len(states) == len(nats):
        log_probs[0] = -nats[0]
    return log_probs


def mix(nats: Tensor, log_cache: Tensor, weight: float) -> Tensor:
    """-log[(1 - weight) p_model + weight p_cache]: (N,) and (N,) -> (N,)."""
    share = math.log(weight) if weight else NEVER
    return -torch.logaddexp(math.log1p(-weight) - nats, log_cache + share)


class Cached:
    """`score`, mixed with a cache of the last `window` states and words that it has scored."""

    def __init__(self, score: Scorer, weight: float, theta: float, window: int) -> None:
        self.score = score
        self.weight, self.theta, self.window = weight, theta, window
        self.states: Tensor | None = None
        self.words: Tensor | None = None

    def __call__(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Inputs (B, T), targets (B, S) or (B,) -> nats, as the targets; the windows in the order of the text."""
        nats, new_states = self.score(inputs, targets)
        new_states = new_states.flatten(0, -2)
        states = new_states if self.states is None else torch.cat((self.states, new_states))
        words = targets.flatten() if self.words is None else torch.cat((self.words, targets.flatten()))
        log_cache = cache_log_probs(states, words, nats.flatten(), self.theta, self.window)
        self.states, self.words = states[-self.window :], words[-self.window :]
        return mix(nats.flatten(), log_cache, self.weight).view_as(nats)


def sgd_rates(model: LanguageModel, lr: float, decay: float) -> Rates:
    """w <- w - lr g + decay (w0 - w) (Krause et al., 2018)."""
    return [(parameter.new_tensor(lr), parameter.new_tensor(decay)) for parameter in model.parameters()]


def rms_rates(rms: list[Tensor], lr: float, decay: float, segment: int) -> Rates:
    """w <- w - lr g / (RMS + eps) + min(1, decay RMS / mean RMS) (w0 - w) (Krause et al., 2018).

    `rms` is `gradient_rms`, of one token; the gradient of a segment, the mean over its tokens, has an RMS smaller by
    the root of their number. eps is EPS times the mean RMS over all parameters.
    """
    rms = [value / math.sqrt(segment) for value in rms]
    mean = math.fsum(float(value.double().sum()) for value in rms) / sum(value.numel() for value in rms)
    return [(lr / (value + EPS * mean), (decay / mean * value).clamp_max(1.0)) for value in rms]


class Dynamic:
    """Dynamic evaluation: a copy of the model that takes a gradient step on every segment after it was scored.

    A segment is one call. The trained model stays as it is, and the copy decays towards it.
    """

    def __init__(self, trained: LanguageModel, rates: Rates, temperature: float = 1.0) -> None:
        self.model = copy.deepcopy(trained)
        self.trained = list(trained.parameters())
        self.rates = rates
        self.temperature = temperature

    def __call__(self, inputs: Tensor, targets: Tensor) -> Scored:
        """Inputs (1, T), targets (1, S) -> nats (1, S) and states (1, S, E), both from before the step."""
        if len(inputs) != 1:
            raise ValueError(f"{len(inputs)} windows at once: dynamic evaluation reads one text, segment by segment")
        with torch.enable_grad():
            nats, states = self.model.score(inputs, targets, temperature=self.temperature)
        gradients = _gradients(nats, self.model)
        changes = zip(self.model.parameters(), self.trained, gradients, self.rates, strict=True)
        with torch.no_grad():
            for weight, trained, gradient, (lr, decay) in changes:
                weight.lerp_(trained, decay).addcmul_(gradient, lr, value=-1.0)
        return nats.detach(), states.detach()


def gradient_rms(
    model: LanguageModel, split: Split, *, device: torch.device, precision: str, advance: Advance | None = None
) -> list[Tensor]:
    """The root mean square of the gradient of one token's loss, for each parameter of a causal model, on `split`.

    From the gradients of batches, each the mean over n tokens, as sqrt(n E[g^2]): as if the tokens' own had a mean of
    zero, which training brings about, and were independent. Raises LmtrainError for a split shorter than a window.
    """
    context = model.config.context
    order = SampleOrder(split.tokens, context, "causal", seed=0)
    rows = min(max(1, TOKENS_PER_GRADIENT // context), order.per_epoch())
    batches = max(1, min(STATISTICS_TOKENS // context, order.per_epoch()) // rows)
    squares = [torch.zeros_like(parameter) for parameter in model.parameters()]
    for index in range(batches):
        inputs, targets = batch(split.ids, order.starts(index * rows, rows), context, "causal")
        with torch.enable_grad(), autocast(device, precision):
            nats = model(inputs.to(device), targets.to(device))
        for square, gradient in zip(squares, _gradients(nats, model), strict=True):
            square.addcmul_(gradient, gradient)
        if advance is not None:
            advance(targets.numel())
    return [(square * (rows * context / batches)).sqrt() for square in squares]


def _gradients(nats: Tensor, model: LanguageModel) -> tuple[Tensor, ...]:
    """Of the mean of `nats`, for each parameter; zero for one that had no part in it."""
    # Without autocast: the types of the backward pass are those of the forward pass.
    with torch.enable_grad(), torch.autocast(nats.device.type, enabled=False):
        return torch.autograd.grad(nats.mean(), list(model.parameters()), materialize_grads=True)


def dynamic_scorer(model: LanguageModel, settings: EvalConfig, rms: list[Tensor], segment: int) -> Dynamic:
    """Dynamic evaluation by the rule of the settings; `rms` is `gradient_rms`, for the rule of that name.

    The words' own vectors, in the embedding and the output layer, learn `dynamic_embedding` times as fast as the rest.
    """
    (lr, times), decay = learning_rates(settings), settings.dynamic_decay
    by_rms = settings.dynamic_rule == "rms"
    rates = rms_rates(rms, lr, decay, segment) if by_rms else sgd_rates(model, lr, decay)
    of_words = {id(model.embedding.weight), id(model.output.weight)}
    return Dynamic(
        model,
        [
            (rate * times if id(parameter) in of_words else rate, back)
            for parameter, (rate, back) in zip(model.parameters(), rates, strict=True)
        ],
        settings.temperature,
    )


def learning_rates(settings: EvalConfig) -> tuple[float, float]:
    """Of dynamic evaluation, and how many times that is the words' vectors': as set, or else the defaults."""
    lr, times = settings.dynamic_lr, settings.dynamic_embedding
    return DEFAULT_LR[settings.dynamic_rule] if lr is None else lr, DEFAULT_EMBEDDING if times is None else times


def settings_used(settings: EvalConfig, *, dynamic: bool, cache: bool) -> dict[str, float | str]:
    """The settings that `adapted` goes by, under their own names."""
    used: dict[str, float | str] = {"temperature": settings.temperature}
    if cache:
        used |= settings.model_dump(include={"cache_weight", "cache_theta", "cache_window"})
    if dynamic:
        lr, times = learning_rates(settings)
        used |= {"dynamic_rule": settings.dynamic_rule, "dynamic_lr": lr, "dynamic_embedding": times}
        used |= {"dynamic_decay": settings.dynamic_decay}
    return used


def adapted(
    model: LanguageModel,
    settings: EvalConfig,
    train: Split | None,
    *,
    dynamic: bool,
    cache: bool,
    segment: int,
    device: torch.device,
    precision: str,
    advance: Advance | None = None,
) -> Forward:
    """A `forward` for `evaluation.evaluate`, from a model in evaluation mode and the settings.

    `segment`, `train` and `advance` are for `dynamic`: the targets of each call,
    the split that `gradient_rms` is of, and who hears of its progress. Raises LmtrainError for what can't be done, and
    ValueError where that split is missing.
    """
    score: Scorer = partial(model.score, temperature=settings.temperature)
    if dynamic:
        if not model.causal:
            raise LmtrainError("--dynamic learns from segments of a text, and a windowed model predicts one token")
        if precision not in ("fp32", "bf16"):
            raise UsageError(f"--dynamic needs gradients, which {precision} has not the range for: use fp32 or bf16")
        rms: list[Tensor] = []
        if settings.dynamic_rule == "rms":
            if train is None:
                raise ValueError("the gradients' mean squares are measured on a training split")
            rms = gradient_rms(model, train, device=device, precision=precision, advance=advance)
        score = dynamic_scorer(model, settings, rms, segment)
    if cache:
        return Cached(score, settings.cache_weight, settings.cache_theta, settings.cache_window)
    return lambda inputs, targets: score(inputs, targets)[0]

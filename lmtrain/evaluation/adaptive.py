"""Evaluation of a model that adapts to the text: by a cache of its own states, and by gradient steps.

Both remember the text they have scored, and score every token before they learn from it. Both are scorers, as a model
is; the cache changes the nats of another scorer.

Shapes: B windows, T tokens in each, S targets; E the width of the states, K states in memory, N new ones.
"""

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lmtrain.config.schema import EvalConfig
from lmtrain.data.order import SampleOrder
from lmtrain.data.tokens import Split
from lmtrain.errors import LmtrainError, UsageError
from lmtrain.evaluation.perplexity import Advance
from lmtrain.model.cuda_graph import GraphedCallable
from lmtrain.model.ensemble import Ensemble, Predictor
from lmtrain.model.language_model import LanguageModel
from lmtrain.nn.precision import at_least_float32
from lmtrain.system.device import autocast

CACHE_BLOCK = 256
"""How many states are compared with the cached ones at once."""

MATCHED = 5
"""How many of the tokens before two positions `matches` compares."""

RMS_TOKENS = 200_000
TOKENS_PER_GRADIENT = 1_024
"""How many tokens `gradient_rms` is measured on, and how many a batch has."""

Scored = tuple[Tensor, Tensor]
"""Nats of the targets (B, S), and the states that predicted them, (B, S, E)."""
Scorer = Callable[[Tensor, Tensor], Scored]
"""Inputs (B, T) and targets -> `Scored`, as `LanguageModel.score`."""


def matches(words: Tensor, queries: slice, keys: slice) -> Tensor:
    """Return how many words before each of the positions `queries` equal those before each of `keys`, counted backward
    up to the first that differs, and at most MATCHED: words (K + N,) -> (queries, keys), int8."""
    # The words before position i are before[i : i + MATCHED]; before the text they are padding, which equals no word.
    before = torch.cat([words.new_full((MATCHED,), -1), words[:-1]])
    rows, columns = (before[part.start : part.stop + MATCHED - 1] for part in (queries, keys))
    is_same = rows.unsqueeze(-1) == columns
    shape = len(rows) - MATCHED + 1, len(columns) - MATCHED + 1
    is_match = torch.ones(shape, dtype=torch.bool, device=words.device)
    length = torch.zeros(shape, dtype=torch.int8, device=words.device)
    for place in reversed(range(MATCHED)):
        is_match = is_match & is_same[place : place + shape[0], place : place + shape[1]]
        length = length + is_match
    return length


def mixed_with_cache(states: Tensor, words: Tensor, nats: Tensor, settings: EvalConfig) -> Tensor:
    """Return -log[(1 - weight) p_model + weight p] of each of the last N words, where p is the continuous cache's
    (Grave et al., 2017): (N,), float32.

    `states` (K + N, E) predicted the `words` (K + N,), in the order of the text; `nats` (N,) are the model's own for
    the last N words. For a state h, a = softmax(theta cos(h, h_i) + m_i) over the `window` positions i before it, and
    p(w) is the sum of a_i over those with words_i = w. The cosine replaces the paper's dot product, so that theta does
    not depend on the states' width and size; m_i = `matches` is not in the paper. The first word of a text has no
    positions before it: its p is the model's own. Weight, theta and window are the fields of `settings` that begin with
    `cache_`. Computed in float32, also under autocast.
    """
    first, window = len(states) - len(nats), settings.cache_window
    positions = torch.arange(len(states), device=states.device)
    blocks = []
    with torch.autocast(states.device.type, enabled=False):
        unit = F.normalize(at_least_float32(states), dim=-1)
        for start in range(first, len(states), CACHE_BLOCK):
            queries = slice(start, start + CACHE_BLOCK)
            keys = slice(max(0, start - window), start + CACHE_BLOCK)
            ago = positions[queries].unsqueeze(-1) - positions[keys]
            scores = settings.cache_theta * unit[queries] @ unit[keys].T + matches(words, queries, keys)
            scores = scores.masked_fill((ago < 1) | (ago > window), -torch.inf)
            same = words[queries].unsqueeze(-1) == words[keys]
            blocks.append(scores.masked_fill(~same, -torch.inf).logsumexp(-1) - scores.logsumexp(-1))
    log_probs = torch.cat(blocks)
    if first == 0:  # the difference of two empty sums
        log_probs[0] = -nats[0]
    weight = settings.cache_weight
    log_weight = math.log(weight) if weight else -torch.inf
    return -torch.logaddexp(math.log1p(-weight) - nats, log_probs + log_weight)


class ContinuousCache:
    """Mixes `score` with a cache of the last `cache_window` states and words that it has scored."""

    def __init__(self, score: Scorer, settings: EvalConfig) -> None:
        self.score, self.settings = score, settings
        self.states, self.words = list[Tensor](), list[Tensor]()

    def __call__(self, inputs: Tensor, targets: Tensor) -> Scored:
        """Score windows in text order: inputs (B, T), targets (B, S) -> mixed nats, and the states."""
        nats, new_states = self.score(inputs, targets)
        states = torch.cat((*self.states, new_states.flatten(0, -2)))
        words = torch.cat((*self.words, targets.flatten()))
        mixed = mixed_with_cache(states, words, nats.flatten(), self.settings)
        # Also the words that `matches` compares before the first position of the window.
        kept = self.settings.cache_window + MATCHED
        self.states, self.words = [states[-kept:]], [words[-kept:]]
        return mixed.view_as(nats), new_states


def gradient_rms(model: LanguageModel, split: Split, *, precision: str, advance: Advance) -> list[Tensor]:
    """Return the root mean square of the gradient of one token's loss on `split`, for each parameter of a causal model.

    The estimate is sqrt(n E[g^2]), where g is the gradient of a batch's mean loss over n tokens. It assumes that the
    tokens' own gradients are independent with mean zero, which holds near the end of training.
    Raises LmtrainError for a split shorter than a window.
    """
    context, device = model.config.context, model.embedding.weight.device
    order = SampleOrder(split.tokens, context, targets=context, seed=0)
    rows = min(max(1, TOKENS_PER_GRADIENT // context), order.per_epoch())
    batches = max(1, min(RMS_TOKENS // context, order.per_epoch()) // rows)
    squares = [torch.zeros_like(parameter) for parameter in model.parameters()]

    def add_squares(inputs: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        with torch.enable_grad(), autocast(device, precision):
            nats = model(inputs, targets)
        gradients = _gradients_of(nats, model)
        torch._foreach_addcmul_(squares, gradients, gradients)
        return ()

    add = _captured(add_squares, model)
    for index in range(batches):
        inputs, targets = order.batch(split.ids, index * rows, rows)
        add(inputs.to(device), targets.to(device))
        advance(targets.numel())
    return [(square * (rows * context / batches)).sqrt() for square in squares]


def _gradients_of(nats: Tensor, model: LanguageModel) -> tuple[Tensor, ...]:
    """Return the gradient of the mean of `nats` for each parameter; zero if the mean does not depend on it."""
    # Without autocast: the dtypes of the backward pass are those of the forward pass.
    with torch.enable_grad(), torch.autocast(nats.device.type, enabled=False):
        return torch.autograd.grad(nats.mean(), list(model.parameters()), materialize_grads=True)


def dynamic_scorer(trained: LanguageModel, rms: list[Tensor], settings: EvalConfig, segment: int) -> Scorer:
    """Return a scorer for dynamic evaluation: a copy of the model takes a gradient step after each call, on the segment
    it has scored.

    The step is w <- w - `dynamic_rate` |w| g / (RMS + eps) (after Krause et al., 2018), where g is the gradient of the
    segment's mean loss. RMS is that of such a gradient: `gradient_rms`, that of one token's gradient, divided by the
    square root of `segment`, the number of tokens. For each parameter, |w| is the root mean square of its trained
    weights, as in LARS (You et al., 2017), and eps its mean RMS, which bounds the rates of rare words.
    """
    model, scale = copy.deepcopy(trained), settings.dynamic_rate * math.sqrt(segment)
    rates = [scale * _rate(weight.detach(), value) for weight, value in zip(model.parameters(), rms, strict=True)]

    def score(inputs: Tensor, targets: Tensor) -> Scored:
        """Inputs (1, T), targets (1, S) -> nats (1, S) and states (1, S, E), computed before the step."""
        torch.clear_autocast_cache()  # a caller's autocast would keep the weights before the last step
        with torch.enable_grad():
            nats, states = model.score(inputs, targets, temperature=settings.temperature)
        gradients = _gradients_of(nats, model)
        with torch.no_grad():
            torch._foreach_addcmul_(list(model.parameters()), gradients, rates, value=-1.0)
        return nats.detach(), states.detach()

    return _captured(score, model)


def _captured(step: Callable[..., tuple[Tensor, ...]], model: LanguageModel) -> Callable[..., Any]:
    """Return a step of this model, captured as a CUDA graph where it can be: an adaptive output reads on the host how
    many targets are in its clusters."""
    return GraphedCallable(step) if model.embedding.weight.is_cuda and model.adaptive is None else step


def _rate(weight: Tensor, rms: Tensor) -> Tensor:
    """|w| / (RMS + eps) for every element of a parameter; zero for a parameter that the loss does not depend on."""
    eps = rms.mean()
    return torch.where(eps == 0, 0.0, weight.square().mean().sqrt() / (rms + eps))


def settings_used(settings: EvalConfig, *, dynamic: bool, cache: bool) -> dict[str, float]:
    """Return the settings that have an effect on the scores, by name."""
    of_cache, of_dynamic = ("cache_weight", "cache_theta", "cache_window"), ("dynamic_rate",)
    names = ("temperature", *(of_cache if cache else ()), *(of_dynamic if dynamic else ()))
    return {name: getattr(settings, name) for name in names}


def adaptable(model: Predictor, precision: str) -> list[LanguageModel]:
    """Return the members that dynamic evaluation adapts, each by itself. Raises LmtrainError or UsageError if it can't
    adapt them in this precision."""
    members = list(model.members) if isinstance(model, Ensemble) else [model]
    if not members[0].causal:
        raise LmtrainError("--dynamic needs a causal model, and this one is windowed: leave --dynamic out")
    if precision not in ("fp32", "bf16"):
        raise UsageError(f"--dynamic needs gradients, for which {precision} has too small a range: use fp32 or bf16")
    return members

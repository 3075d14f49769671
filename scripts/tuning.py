"""The search of the settings of `lmtrain eval --temperature --cache --dynamic` for a run.

Only the first tokens of the validation split are looked at. The temperature comes first and holds for the rest; then
every cache, on states that are made once; then dynamic evaluation, its rates by `climb`, its decay and its segment one
after the other; then every cache again, on the states of the best dynamic evaluation.
"""

import itertools
import math
import sys
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from lmtrain.config.loader import change
from lmtrain.data.tokens import TokenStore
from lmtrain.evaluation.adaptive import Scorer, cache_log_probs, dynamic_scorer, gradient_rms, learning_rates, mix
from lmtrain.evaluation.perplexity import default_stride, evaluate
from lmtrain.model.trained import Trained
from lmtrain.system.device import choose_precision

TEMPERATURES = (0.9, 0.95, 1.0, 1.02, 1.04, 1.06, 1.1, 1.15)
WEIGHTS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4)
THETAS = (5.0, 10.0, 15.0, 20.0, 30.0, 40.0)
WINDOWS = (500, 2_000, 8_000, 32_000)
DECAYS = (0.0, 1e-3, 1e-2)
SEGMENTS = (16, 32, 64)
MOVES = ((0.5, 1.0), (2.0, 1.0), (0.5, 2.0), (2.0, 0.5), (1.0, 0.5), (1.0, 2.0))
"""Factors of the rate and of how many times that is the words' vectors': of all weights, of all but these, of these."""

Stream = tuple[Tensor, Tensor, Tensor]
"""Of every token scored, in order: nats (N,), the state it was predicted from (N, E), and itself (N,)."""
Found = tuple[float, list[str]]
"""Nats per token, and the options that give them."""
Setting = tuple[float, float, float, int]
"""Of dynamic evaluation: its rate, how many times that is the embedding's, its decay, its segment."""


def stream_of(trained: Trained, store: TokenStore, score: Scorer, tokens: int, stride: int, batch_size: int) -> Stream:
    """Score the first `tokens` of the validation split."""
    kept: list[Stream] = []

    def forward(inputs: Tensor, targets: Tensor) -> Tensor:
        nats, states = score(inputs, targets)
        kept.append((nats.flatten(), states.flatten(0, -2).float(), targets.flatten()))
        return nats

    evaluate(
        forward,
        store.split("valid"),
        mode=trained.config.model.mode,
        context=trained.config.model.context,
        stride=stride,
        batch_size=batch_size,
        first_token=trained.tokenizer.eos_id,
        device=trained.device,
        precision=choose_precision(trained.config.train.precision, trained.device),
        limit=tokens,
    )
    nats, states, words = (torch.cat(parts) for parts in zip(*kept, strict=True))
    return nats, states, words


def best_cache(stream: Stream, options: list[str]) -> Found:
    """The best cache on top of what has these nats and states."""
    nats, states, words = stream
    found = []
    for theta, window in itertools.product(THETAS, WINDOWS):
        log_cache = cache_log_probs(states, words, nats, theta, window)
        for weight in WEIGHTS:
            fields = [f"eval.cache_weight={weight}", f"eval.cache_theta={theta}", f"eval.cache_window={window}"]
            found.append((float(mix(nats, log_cache, weight).double().mean()), [*options, "--cache", *fields]))
    return best(found)


def best(found: list[Found]) -> Found:
    """The lowest; what diverged is no result."""
    return min((pair for pair in found if math.isfinite(pair[0])), key=lambda pair: pair[0])


@torch.no_grad()
def search(trained: Trained, store: TokenStore, tokens: int, rule: str = "rms") -> tuple[dict[str, Found], list[Found]]:
    """The best of each way to score: plain, temperature, cache, dynamic, dynamic and cache; and every dynamic one."""
    model, config = trained.model, trained.config
    stride = config.eval.stride or default_stride(config.model.mode, config.model.context)
    found: dict[str, Found] = {}
    streams: dict[float, Stream] = {}
    for temperature in TEMPERATURES:
        model.temperature = temperature
        streams[temperature] = stream_of(trained, store, model.score, tokens, stride, config.eval.batch_size)
        say("temperature", (float(streams[temperature][0].double().mean()), [f"--temperature {temperature}"]))
    losses = {temperature: float(stream[0].double().mean()) for temperature, stream in streams.items()}
    model.temperature = min(losses, key=lambda temperature: losses[temperature])
    options = [f"--temperature {model.temperature}"]
    found["plain"] = (losses[1.0], [])
    found["temperature"] = (losses[model.temperature], options)
    found["cache"] = say("cache", best_cache(streams[model.temperature], options))
    if not model.causal:
        return found, []
    found["dynamic"], stream, tried = best_dynamic(trained, store, tokens, rule, options)
    found["dynamic and cache"] = say("dynamic and cache", best_cache(stream, found["dynamic"][1]))
    return found, tried


def best_dynamic(
    trained: Trained, store: TokenStore, tokens: int, rule: str, options: list[str]
) -> tuple[Found, Stream, list[Found]]:
    """The best dynamic evaluation at the temperature that the model has, what it gives, and all that were tried."""
    model, config = trained.model, trained.config
    precision = choose_precision(config.train.precision, trained.device)
    rms = gradient_rms(model, store.split("train"), device=trained.device, precision=precision) if rule == "rms" else []
    settings = change(config, [f"eval.dynamic_rule={rule}"]).eval
    segments = tuple(size for size in SEGMENTS if size <= config.model.context)
    chosen: Setting = (*learning_rates(settings), 0.0, segments[len(segments) // 2])

    tried: list[Found] = []

    @cache
    def run(lr: float, embedding: float, decay: float, segment: int) -> tuple[Found, Stream]:
        changes = {"dynamic_lr": lr, "dynamic_embedding": embedding, "dynamic_decay": decay}
        own = settings.model_copy(update=changes)
        stream = stream_of(trained, store, dynamic_scorer(model, own, rms, segment), tokens, segment, 1)
        fields = [f"eval.dynamic_rule={rule}", f"eval.dynamic_lr={lr:.4g}"]
        fields += [f"eval.dynamic_embedding={embedding}", f"eval.dynamic_decay={decay}"]
        nats = float(stream[0].double().mean())
        tried.append(say("dynamic", (nats, [*options, f"--stride {segment}", "--dynamic", *fields])))
        return tried[-1], stream

    def nats(setting: Setting) -> float:
        value = run(*setting)[0][0]
        return value if math.isfinite(value) else math.inf

    chosen = climb(chosen, nats)
    chosen = min(((*chosen[:2], decay, chosen[3]) for decay in DECAYS), key=nats)
    chosen = min(((*chosen[:3], segment) for segment in segments), key=nats)
    return *run(*chosen), tried


def climb(setting: Setting, loss: Callable[[Setting], float]) -> Setting:
    """Make each move for as long as it helps, in turn, until none does, from a rate that doesn't diverge."""
    while loss(setting) == math.inf:
        setting = (setting[0] / 2, *setting[1:])
    best = None
    while best != setting:
        best = setting
        for lr, times in MOVES:
            while loss(moved := (lr * setting[0], times * setting[1], *setting[2:])) < loss(setting):
                setting = moved
    return setting


def say(mode: str, pair: Found) -> Found:
    print(f"{mode}: {math.exp(min(pair[0], 700)):.3f} {' '.join(pair[1])}", file=sys.stderr)
    return pair

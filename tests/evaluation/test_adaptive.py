"""Adaptive evaluation: against plain loops, and that no score depends on learning from its own or a later token."""

import copy
import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor

from lmtrain.config.schema import EvalConfig, ModelConfig
from lmtrain.errors import LmtrainError, UsageError
from lmtrain.evaluation import adaptive
from lmtrain.evaluation.adaptive import (
    MATCHED,
    ContinuousCache,
    Scored,
    Scorer,
    adaptable,
    dynamic_scorer,
    gradient_rms,
    mixed_with_cache,
)
from lmtrain.evaluation.perplexity import Forward
from lmtrain.model.build import build_model
from lmtrain.model.ensemble import Ensemble, Predictor, mean_score
from lmtrain.model.language_model import LanguageModel
from lmtrain.system.device import autocast
from tests.evaluation.scoring import score_of, split_of
from tests.helpers import Lmtrain, contents

Update = Callable[[str, Tensor, Tensor], Tensor]
VOCABULARY, CONTEXT, SEGMENT = 13, 8, 3
IDS = np.random.default_rng(0).integers(1, VOCABULARY, 40)
TRAIN = split_of(np.random.default_rng(1).integers(1, VOCABULARY, 300))
MODES = ["temperature", "cache", "dynamic", "cache over dynamic"]


def tiny_model(
    *, mode: str = "causal", copying: bool = True, output: str = "softmax", tied: bool = True
) -> LanguageModel:
    """Predictions far from uniform, so that every mistake is large, in float64, so that none is rounding."""
    torch.manual_seed(0)
    fields: dict[str, object] = {"context": CONTEXT, "dim": 16, "embed_dim": 8, "layers": 1, "heads": 2}
    fields |= {"tie_embeddings": tied, "mode": mode, "copy": copying, "output": output}
    fields |= {"output_cutoffs": (3, 7)} if output == "adaptive" else {}
    model = build_model(ModelConfig.model_validate(fields), VOCABULARY).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def nats_of(score: Scorer) -> Forward:
    """A scorer without its states."""
    return lambda inputs, targets: score(inputs, targets)[0]


def adapt(model: Any, settings: EvalConfig, *, dynamic: bool = False, cache: bool = False) -> Forward:
    own = functools.partial(model.score, temperature=settings.temperature)
    score = dynamic_of(model, settings) if dynamic else own
    return nats_of(ContinuousCache(score, settings) if cache else score)


def forward_of(model: LanguageModel, mode: str) -> Forward:
    """A new forward of a mode, with settings that change every score considerably."""
    settings = EvalConfig(
        temperature=1.0 if mode == "cache" else 1.3,
        cache_weight=0.4,
        cache_theta=5.0,
        cache_window=20,
        dynamic_rate=0.2,
    )
    return adapt(model, settings, dynamic="dynamic" in mode, cache="cache" in mode)


def scores(forward: Forward, ids: np.ndarray, *, mode: str = "causal", batch_size: int = 1) -> Tensor:
    """Nats of every token of `ids`, in order."""
    found: list[Tensor] = []

    def recorded(inputs: Tensor, targets: Tensor) -> Tensor:
        found.append(forward(inputs, targets))
        return found[-1]

    stride = 1 if mode == "windowed" else SEGMENT
    score_of(recorded, split_of(ids), mode=mode, context=CONTEXT, stride=stride, batch_size=batch_size)
    return torch.cat([nats.flatten() for nats in found])


def assert_close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found.double(), wanted.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("copying", "output"), [(False, "softmax"), (True, "softmax"), (False, "adaptive")])
@torch.no_grad()
def test_temperature_divides_log_probabilities_but_not_the_pointer_s(copying: bool, output: str) -> None:
    model = tiny_model(copying=copying, output=output)
    tokens = torch.from_numpy(IDS[:CONTEXT]).unsqueeze(0)
    without_pointer = model._log_probs(model.score(tokens, tokens)[1])[0].double()
    vocabulary, at_one = ((without_pointer / t).softmax(-1) for t in (1.7, 1.0))
    with_pointer = model.predict(tokens)[0].exp()
    forward = adapt(model, EvalConfig(temperature=1.7))
    words = [torch.full_like(tokens, word) for word in range(VOCABULARY)]
    found = torch.stack([-forward(tokens, word)[0] for word in words], -1).exp().double()
    assert_close(found.sum(-1), torch.ones(CONTEXT))
    if copying:  # the pointer's part is the same at any temperature: solve for the gate at a word that it can't copy
        absent = next(word for word in range(VOCABULARY) if word not in IDS[:CONTEXT])
        gate = (with_pointer[:, absent] / at_one[:, absent]).unsqueeze(-1)
        assert_close(found, with_pointer + gate * (vocabulary - at_one))
    else:
        assert_close(found, vocabulary)


def naive_cache(states: Tensor, words: list[int], nats: Tensor, weight: float, theta: float, window: int) -> Tensor:
    """-log of the mixture, position by position and pair by pair, in float64."""
    result = []
    for now in range(len(words)):
        total = hit = 0.0
        for before in range(max(0, now - window), now):
            a, b = states[now].double(), states[before].double()
            matched = 0
            while matched < min(before, MATCHED) and words[now - matched - 1] == words[before - matched - 1]:
                matched += 1
            score = math.exp(theta * float(a @ b / (a.norm() * b.norm())) + matched)
            total += score
            hit += score if words[before] == words[now] else 0.0
        p = math.exp(-float(nats[now]))
        result.append(-math.log((1 - weight) * p + weight * hit / total if now else p))
    return torch.tensor(result)


@pytest.mark.parametrize("theta", [5.0, 40.0])
@pytest.mark.parametrize("vocabulary", [2, 9])
def test_the_cache_is_computed_in_float32(theta: float, vocabulary: int) -> None:
    """In bf16, its scores would be rounded to an eighth of a nat and more."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(200, 16, generator=generator).bfloat16()
    words = torch.randint(vocabulary, (200,), generator=generator)
    nats = torch.rand(200, generator=generator)
    settings = EvalConfig(cache_weight=0.3, cache_theta=theta, cache_window=100)
    with torch.autocast("cpu", torch.bfloat16):
        found = mixed_with_cache(states, words, nats, settings)
    assert_close(found, naive_cache(states, words.tolist(), nats, 0.3, theta, 100))


@pytest.mark.parametrize("mode", ["causal", "windowed"])
@pytest.mark.parametrize("window", [1, 7, 100])
@torch.no_grad()
def test_the_cache_equals_a_double_loop(mode: str, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmtrain.evaluation.adaptive.CACHE_BLOCK", 5)
    model = tiny_model(mode=mode)
    ids = IDS % 2 + 1  # two words, so that several words before two positions are often equal
    states: list[Tensor] = []

    def score(inputs: Tensor, targets: Tensor) -> Scored:
        nats, own = model.score(inputs, targets)
        states.append(own.flatten(0, -2))
        return nats, own

    settings = EvalConfig(cache_weight=0.4, cache_theta=5.0, cache_window=window)
    for batch_size in (1, 4):
        states.clear()
        plain = scores(model, ids, mode=mode, batch_size=batch_size)
        found = scores(nats_of(ContinuousCache(score, settings)), ids, mode=mode, batch_size=batch_size)
        assert_close(found, naive_cache(torch.cat(states), ids.tolist(), plain, 0.4, 5.0, window))
        assert (found - plain).abs().max() > 0.1


def naive_dynamic(start: LanguageModel, update: Update) -> Tensor:
    """Score a segment with all the context that fits, then take a step."""
    model, stream, result = copy.deepcopy(start), [0, *IDS.tolist()], []
    for begin in range(0, len(IDS), SEGMENT):
        end = min(begin + SEGMENT, len(IDS))
        window = stream[max(0, end - CONTEXT) : end + 1]
        nats: Tensor = model(torch.tensor([window[:-1]]), torch.tensor([window[-(end - begin) :]]))
        model.zero_grad()
        nats.mean().backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for name, weight in model.named_parameters():
                assert weight.grad is not None
                weight.copy_(update(name, weight, weight.grad))
        result.append(nats.detach().flatten())
    return torch.cat(result)


def gradient_rms_of(model: LanguageModel) -> list[Tensor]:
    return gradient_rms(model, TRAIN, precision="fp32", advance=lambda _tokens: None)


def dynamic_of(model: Predictor, settings: EvalConfig) -> Scorer:
    own = [dynamic_scorer(each, gradient_rms_of(each), settings, SEGMENT) for each in adaptable(model, "fp32")]
    return own[0] if len(own) == 1 else lambda inputs, targets: mean_score([score(inputs, targets) for score in own])


@pytest.mark.parametrize("tied", [True, False])
def test_dynamic_evaluation_equals_a_plain_loop(tied: bool) -> None:
    model = tiny_model(tied=tied)
    rms = gradient_rms_of(model)
    segment_rms = {
        name: value / math.sqrt(SEGMENT) for (name, _), value in zip(model.named_parameters(), rms, strict=True)
    }
    sizes = {name: float((weight**2).detach().mean() ** 0.5) for name, weight in model.named_parameters()}

    def update(name: str, weight: Tensor, gradient: Tensor) -> Tensor:
        return weight - 0.1 * sizes[name] * gradient / (segment_rms[name] + segment_rms[name].mean())

    plain = scores(model, IDS).detach()
    dynamic = adapt(model, EvalConfig(dynamic_rate=0.1), dynamic=True)
    found = scores(dynamic, IDS)
    assert_close(found, naive_dynamic(model, update))
    assert torch.equal(found[:SEGMENT], plain[:SEGMENT])
    assert (found - plain).abs().max() > 0.05


def test_a_parameter_whose_gradients_are_zero_has_a_rate_of_zero() -> None:
    """Such as the queries of a model whose context is one token."""
    assert torch.equal(adaptive._rate(torch.ones(3), torch.zeros(3)), torch.zeros(3))
    assert adaptive._rate(torch.ones(3), torch.full((3,), torch.nan)).isnan().all()


def test_the_gradients_rms_is_that_of_batches_times_the_root_of_their_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmtrain.evaluation.adaptive.TOKENS_PER_GRADIENT", 2 * CONTEXT)
    model = tiny_model()
    forward = model.forward
    batches: list[tuple[Tensor, Tensor]] = []

    def recorded(inputs: Tensor, targets: Tensor) -> Tensor:
        batches.append((inputs, targets))
        return forward(inputs, targets)

    monkeypatch.setattr(model, "forward", recorded)
    found = gradient_rms_of(model)
    assert len(batches) == 18  # 36 whole windows of 300 tokens, two at a time
    assert len({tuple(window) for inputs, _ in batches for window in inputs.tolist()}) == 36
    squares = [torch.zeros_like(value) for value in found]
    for inputs, targets in batches:
        assert torch.equal(targets[:, :-1], inputs[:, 1:])
        model.zero_grad()
        forward(inputs, targets).mean().backward()  # type: ignore[no-untyped-call]
        for square, parameter in zip(squares, model.parameters(), strict=True):
            assert parameter.grad is not None
            square.add_(parameter.grad**2)
    for value, square in zip(found, squares, strict=True):
        assert_close(value, (square / 18 * 2 * CONTEXT).sqrt())


@pytest.mark.parametrize("mode", MODES)
def test_probabilities_sum_to_one(mode: str) -> None:
    """The distribution at a position: the same stream with each possible word there, and nothing after it."""
    for position in (0, 13):
        streams = [np.append(IDS[:position], word) for word in range(VOCABULARY)]
        nats = [float(scores(forward_of(tiny_model(), mode), ids)[-1]) for ids in streams]
        assert math.fsum(math.exp(-value) for value in nats) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_a_token_is_scored_before_it_is_learned_from(mode: str) -> None:
    """Other words from a position on leave the scores before it bit for bit, and change what comes after."""
    before = scores(forward_of(tiny_model(), mode), IDS)
    assert len(before) == len(IDS)
    for position in (SEGMENT * 4, SEGMENT * 4 + 1, SEGMENT * 4 + 2):
        other = IDS.copy()
        other[position:] = (other[position:] + 1) % VOCABULARY
        assert torch.equal(scores(forward_of(tiny_model(), mode), other)[:position], before[:position])
        single = IDS.copy()
        single[position] = (single[position] + 1) % VOCABULARY
        changed = scores(forward_of(tiny_model(), mode), single) != before
        assert not changed[:position].any()
        assert changed[position]
        # Beyond the context, only learning still changes scores, and temperature does not learn.
        assert bool(changed[position + 2 * CONTEXT :].any()) == (mode != "temperature")


def test_each_member_of_an_ensemble_learns_by_itself() -> None:
    members = [tiny_model(tied=tied) for tied in (True, False)]
    settings = EvalConfig(temperature=1.3, dynamic_rate=0.2)
    own = [scores(adapt(member, settings, dynamic=True), IDS) for member in members]
    mean = math.log(2) - torch.stack([-nats for nats in own]).logsumexp(0)
    assert (own[0] - own[1]).abs().max() > 0.05
    assert_close(scores(adapt(Ensemble(members), settings, dynamic=True), IDS), mean)
    adapted = [dynamic_of(member, settings) for member in members]

    def states(inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Of the ensemble: the mean of probabilities, and both states, each of length 1."""
        nats, vectors = zip(*(member(inputs, targets) for member in adapted), strict=True)
        unit = [torch.nn.functional.normalize(vector, dim=-1) for vector in vectors]
        return math.log(2) - torch.stack([-part for part in nats]).logsumexp(0), torch.cat(unit, -1)

    together = settings.model_copy(update={"cache_weight": 0.4, "cache_theta": 5.0})
    found = scores(adapt(Ensemble(members), together, dynamic=True, cache=True), IDS)
    assert_close(found, scores(nats_of(ContinuousCache(states, together)), IDS))
    assert (found - mean).abs().max() > 0.05


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_captured_steps_equal_plain_ones(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64, and in float32 as bf16 under autocast; with 18 batches for the gradients' RMS."""
    monkeypatch.setattr(adaptive, "TOKENS_PER_GRADIENT", 2 * CONTEXT)
    members = [model.cuda().to(dtype) for model in (tiny_model(), tiny_model(tied=False))]
    lengths = [3, 6, *[CONTEXT] * 6, 5, *[CONTEXT] * 4]
    streams = [torch.randint(1, VOCABULARY, (1, length + 1), device="cuda") for length in lengths]

    def results() -> list[Tensor]:
        score = dynamic_of(Ensemble(members), EvalConfig(temperature=1.3, dynamic_rate=0.02))
        with autocast(torch.device("cuda"), "bf16" if dtype == torch.float32 else "fp32"):
            found = [score(stream[:, :-1], stream[:, -SEGMENT:]) for stream in streams]
        return [part.double() for parts in found for part in parts]

    recorded = results()
    with monkeypatch.context() as patch:
        patch.setattr(adaptive, "GraphedCallable", lambda step: step)
        plain = results()
    close = 1e-5 if dtype == torch.float64 else 0.1
    torch.testing.assert_close(recorded, plain, rtol=close, atol=close)


@torch.no_grad()
def test_without_a_cache_s_share_or_a_learning_rate_scores_are_plain() -> None:
    model = tiny_model()
    plain = scores(model, IDS)
    assert torch.equal(scores(adapt(model, EvalConfig(cache_weight=0.0), cache=True), IDS), plain)
    assert torch.equal(scores(adapt(model, EvalConfig(dynamic_rate=0.0), dynamic=True), IDS), plain)


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_is_deterministic_and_leaves_the_trained_weights(mode: str) -> None:
    model = tiny_model()
    weights = copy.deepcopy(model.state_dict())
    assert torch.equal(scores(forward_of(model, mode), IDS), scores(forward_of(model, mode), IDS))
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def test_dynamic_evaluation_is_for_causal_models() -> None:
    windowed = tiny_model(mode="windowed")
    for model in (windowed, Ensemble([windowed, windowed])):
        with pytest.raises(LmtrainError, match="needs a causal model"):
            adaptable(model, "fp32")


ADAPTIVE = ["--dynamic", "--cache", "eval.temperature=1.1"]


def test_each_option_of_the_command_has_an_effect_and_none_goes_below_the_floor(
    lmtrain: Lmtrain, workdir: Path
) -> None:
    """On the sample corpus, whose entropy is known: no mode may get below it, and no file of the run may change."""
    before = contents(workdir / "runs")
    floor = json.loads((workdir / "data/sample-3000/manifest.json").read_text())["floor"]["valid"]
    part = ["eval", "--json", "--limit", "96", "eval.stride=8"]
    plain = lmtrain(*part).json
    assert plain["temperature"] == 1.0
    assert not {"cache_weight", "dynamic_rate"} & plain.keys()
    results = [plain["nats"]]
    for options in (["eval.temperature=1.1"], ["--cache"], ["--dynamic"], [*ADAPTIVE, "eval.cache_theta=9"], ADAPTIVE):
        found = lmtrain(*part, *options).json
        assert found["tokens"] == plain["tokens"]
        assert found["word_perplexity"] > floor["word_perplexity"]
        results.append(found["nats"])
    assert len(set(results)) == len(results)
    assert found["dynamic_rate"] == 5e-4
    assert (found["temperature"], found["cache_weight"]) == (1.1, 0.1)
    assert lmtrain(*part, *ADAPTIVE).json == found
    text = lmtrain("eval", *ADAPTIVE, "eval.dynamic_rate=2e-4", "--limit", "20", "eval.stride=2").out
    assert "stride 2, temperature 1.1, cache weight 0.1" in text
    assert "dynamic rate 0.0002" in text
    assert contents(workdir / "runs") == before


def test_running_out_of_memory_names_the_remedy(
    lmtrain: Lmtrain, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starved = Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory"))
    monkeypatch.setattr("lmtrain.api.run.evaluate", starved)
    done = lmtrain("eval", "--limit", "20")
    assert (done.code, done.out) == (1, "")
    remedy = "lower eval.batch_size or, with --cache, lower eval.cache_window"
    assert done.err.endswith(f"lmtrain: out of memory: {remedy}\n")
    assert "out of memory: leave --dynamic out, or use --device cpu" in lmtrain("eval", "--dynamic", "--limit", "9").err


def test_the_rms_of_gradients_is_measured_on_a_part_of_a_long_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adaptive, "RMS_TOKENS", 100)
    monkeypatch.setattr(adaptive, "TOKENS_PER_GRADIENT", 2 * CONTEXT)
    seen: list[int] = []
    gradient_rms(tiny_model(), TRAIN, precision="fp32", advance=seen.append)
    assert seen == [2 * CONTEXT] * 6


def test_dynamic_evaluation_needs_the_range_of_gradients() -> None:
    with pytest.raises(UsageError, match=r"--dynamic needs gradients, for which fp16 .*: use fp32 or bf16$"):
        adaptable(tiny_model(), "fp16")

"""Adaptive evaluation: against written-out loops, and that no score depends on its own or a later token's learning."""

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lmtrain.config.schema import EvalConfig, ModelConfig
from lmtrain.data.ids import Ids
from lmtrain.data.tokens import Split
from lmtrain.evaluation import perplexity as evaluation
from lmtrain.evaluation.adaptive import (
    EPS,
    Cached,
    Dynamic,
    Forward,
    Rates,
    Scored,
    adapted,
    cache_log_probs,
    dynamic_scorer,
    gradient_rms,
    mix,
    rms_rates,
    sgd_rates,
)
from lmtrain.evaluation.perplexity import evaluate
from lmtrain.model.build import build_model
from lmtrain.model.language_model import LanguageModel
from lmtrain.storage.files import sha256_bytes
from tests.conftest import Lmtrain

CPU = torch.device("cpu")
Update = Callable[[str, Tensor, Tensor, Tensor], Tensor]
VOCABULARY, CONTEXT, SEGMENT = 13, 8, 3
IDS = np.random.default_rng(0).integers(1, VOCABULARY, 40)
TRAIN = np.random.default_rng(1).integers(1, VOCABULARY, 300)
MODES = ["temperature", "cache", "dynamic sgd", "dynamic rms", "cache over dynamic"]


def split_of(ids: np.ndarray) -> Split:
    return Split(Ids([ids]), np.zeros(1, np.int64), len(ids), len(ids), 5 * len(ids))


def tiny_model(
    *, mode: str = "causal", copying: bool = True, output: str = "softmax", tied: bool = True
) -> LanguageModel:
    """Weights far from uniform predictions, so that every mistake is large, in float64, so that none is rounding."""
    torch.manual_seed(0)
    shape = {"context": CONTEXT, "dim": 16, "embed_dim": 8, "layers": 1, "heads": 2, "output_cutoffs": (3, 7)}
    shape = shape if output == "adaptive" else shape | {"output_cutoffs": None}
    shape |= {"tie_embeddings": tied}
    config = ModelConfig.model_validate({"mode": mode, "copy": copying, "output": output, **shape})
    model = build_model(config, VOCABULARY).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def forward_of(model: LanguageModel, mode: str) -> Forward:
    """A fresh forward of a mode, at settings that change every score a lot."""
    sgd = mode == "dynamic sgd"
    settings = EvalConfig(
        temperature=1.0 if mode == "cache" else 1.3,
        cache_weight=0.4,
        cache_theta=5.0,
        cache_window=20,
        dynamic_rule="sgd" if sgd else "rms",
        dynamic_lr=0.1 if sgd else 0.05,
        dynamic_embedding=0.5,
        dynamic_decay=0.05,
    )
    options = {"segment": SEGMENT, "device": CPU, "precision": "fp32"}
    return adapted(model, settings, split_of(TRAIN), dynamic="dynamic" in mode, cache="cache" in mode, **options)  # type: ignore[arg-type]


def scores(forward: Forward, ids: np.ndarray, *, mode: str = "causal", batch_size: int = 1) -> Tensor:
    """Nats of every token of `ids`, in order."""
    kept: list[Tensor] = []

    def keep(inputs: Tensor, targets: Tensor) -> Tensor:
        kept.append(forward(inputs, targets))
        return kept[-1]

    options = {"context": CONTEXT, "stride": 1 if mode == "windowed" else SEGMENT, "batch_size": batch_size}
    evaluate(keep, split_of(ids), mode=mode, first_token=0, device=CPU, precision="fp32", **options)  # type: ignore[arg-type]
    return torch.cat([nats.flatten() for nats in kept])


def assert_close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found.double(), wanted.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("copying", "output"), [(False, "softmax"), (True, "softmax"), (False, "adaptive")])
@torch.no_grad()
def test_temperature_divides_the_vocabulary_s_logits_and_leaves_the_pointer(copying: bool, output: str) -> None:
    model = tiny_model(copying=copying, output=output)
    tokens = torch.from_numpy(IDS[:CONTEXT]).unsqueeze(0)
    vocabulary = (model.logits(model.encode(tokens)) / 1.7).softmax(-1)[0].double()
    with_pointer = model.predict(tokens)[0].exp()
    at_one = model.logits(model.encode(tokens)).softmax(-1)[0].double()
    words = [torch.full_like(tokens, word) for word in range(VOCABULARY)]
    found = torch.stack([-model.score(tokens, word, temperature=1.7)[0][0] for word in words], -1).exp().double()
    assert_close(found.sum(-1), torch.ones(CONTEXT))
    if copying:  # what the pointer adds is the same at any temperature: solve for the gate at a word that is not there
        absent = next(word for word in range(VOCABULARY) if word not in IDS[:CONTEXT])
        keep = (with_pointer[:, absent] / at_one[:, absent]).unsqueeze(-1)
        assert_close(found, with_pointer + keep * (vocabulary - at_one))
    else:
        assert_close(found, vocabulary)


def naive_cache(states: Tensor, words: list[int], nats: Tensor, weight: float, theta: float, window: int) -> Tensor:
    """-log of the mixture, place by place and pair by pair, in float64."""
    result = []
    for now in range(len(words)):
        total = hit = 0.0
        for before in range(max(0, now - window), now):
            a, b = states[now].double(), states[before].double()
            score = math.exp(theta * float(a @ b / (a.norm() * b.norm())))
            total += score
            hit += score if words[before] == words[now] else 0.0
        p = math.exp(-float(nats[now]))
        result.append(-math.log((1 - weight) * p + weight * hit / total if now else p))
    return torch.tensor(result)


@pytest.mark.parametrize("theta", [5.0, 40.0])
def test_the_cache_is_exact_whatever_the_model_computes_in(theta: float) -> None:
    """Its scores are no product of bf16, whose steps at 16 and more are an eighth of a nat and larger."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(200, 16, generator=generator).bfloat16()
    words = torch.randint(9, (200,), generator=generator)
    nats = torch.rand(200, generator=generator)
    with torch.autocast("cpu", torch.bfloat16):
        found = mix(nats, cache_log_probs(states, words, nats, theta, 100), 0.3)
    assert_close(found, naive_cache(states, words.tolist(), nats, 0.3, theta, 100))


@pytest.mark.parametrize("mode", ["causal", "windowed"])
@pytest.mark.parametrize("window", [1, 7, 100])
@torch.no_grad()
def test_the_cache_equals_a_double_loop(mode: str, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmtrain.evaluation.adaptive.QUERIES_AT_ONCE", 5)
    model = tiny_model(mode=mode)
    states: list[Tensor] = []

    def score(inputs: Tensor, targets: Tensor) -> Scored:
        nats, own = model.score(inputs, targets)
        states.append(own.flatten(0, -2))
        return nats, own

    for batch_size in (1, 4):
        states.clear()
        plain = scores(model, IDS, mode=mode, batch_size=batch_size)
        found = scores(Cached(score, 0.4, 5.0, window), IDS, mode=mode, batch_size=batch_size)
        assert_close(found, naive_cache(torch.cat(states), IDS.tolist(), plain, 0.4, 5.0, window))
        assert (found - plain).abs().max() > 0.1


def naive_step(model: LanguageModel, start: LanguageModel, segment: tuple[Tensor, Tensor], update: Update) -> Tensor:
    nats: Tensor = model(*segment)
    model.zero_grad()
    nats.mean().backward()  # type: ignore[no-untyped-call]
    trained = dict(start.named_parameters())
    with torch.no_grad():
        for name, weight in model.named_parameters():
            assert weight.grad is not None
            weight.copy_(update(name, weight, weight.grad, trained[name]))
    return nats.detach().flatten()


def naive_dynamic(start: LanguageModel, ids: np.ndarray, update: Update) -> Tensor:
    """Score a segment with all the context that fits, then step; the model read anew for every segment."""
    model, stream, result = copy.deepcopy(start), [0, *ids.tolist()], []
    for begin in range(0, len(ids), SEGMENT):
        end = min(begin + SEGMENT, len(ids))
        window = stream[max(0, end - CONTEXT) : end + 1]
        inputs, targets = torch.tensor([window[:-1]]), torch.tensor([window[-(end - begin) :]])
        result.append(naive_step(model, start, (inputs, targets), update))
    return torch.cat(result)


def test_dynamic_evaluation_equals_a_written_out_loop() -> None:
    model = tiny_model()
    rms = dict(zip(dict(model.named_parameters()), gradient_rms_of(model), strict=True))
    segment_rms = {name: value / math.sqrt(SEGMENT) for name, value in rms.items()}
    mean = torch.cat([value.flatten() for value in segment_rms.values()]).mean()

    def by_sgd(name: str, weight: Tensor, gradient: Tensor, trained: Tensor) -> Tensor:
        return weight - 0.3 * gradient + 0.05 * (trained - weight)

    def by_rms(name: str, weight: Tensor, gradient: Tensor, trained: Tensor) -> Tensor:
        back = (0.7 * segment_rms[name] / mean).clamp(max=1.0)
        return weight - 0.05 * gradient / (segment_rms[name] + EPS * mean) + back * (trained - weight)

    for update, rates in (
        (by_sgd, sgd_rates(model, 0.3, 0.05)),
        (by_rms, rms_rates(list(rms.values()), 0.05, 0.7, SEGMENT)),
    ):
        plain = scores(model, IDS).detach()
        found = scores(only_nats(Dynamic(model, rates)), IDS)
        assert_close(found, naive_dynamic(model, IDS, update))
        assert torch.equal(found[:SEGMENT], plain[:SEGMENT])
        assert (found - plain).abs().max() > 0.05


@pytest.mark.parametrize("rule", ["sgd", "rms"])
@pytest.mark.parametrize("tied", [True, False])
def test_words_learn_at_a_rate_of_their_own(rule: str, tied: bool) -> None:
    """After one segment: the embedding and an untied output layer have moved 5 times as far, all else as far."""
    model = tiny_model(tied=tied)
    rms = gradient_rms_of(model)
    segment = torch.from_numpy(IDS[None, :SEGMENT]), torch.from_numpy(IDS[None, 1 : SEGMENT + 1])
    moved = []
    for factor in (1.0, 5.0):
        settings = EvalConfig.model_validate({"dynamic_rule": rule, "dynamic_embedding": factor})
        dynamic = dynamic_scorer(model, settings, rms, SEGMENT)
        dynamic(*segment)
        start = dict(model.named_parameters())
        moved.append({name: weight - start[name] for name, weight in dynamic.model.named_parameters()})
    of_words = {"embedding.weight"} if tied else {"embedding.weight", "output.weight"}
    for name, once in moved[0].items():
        torch.testing.assert_close(moved[1][name], once * (5.0 if name in of_words else 1.0), rtol=1e-9, atol=1e-12)
        assert once.any() or name not in of_words


def only_nats(score: Dynamic) -> Forward:
    return lambda inputs, targets: score(inputs, targets)[0]


def gradient_rms_of(model: LanguageModel) -> list[Tensor]:
    return gradient_rms(model, split_of(TRAIN), device=CPU, precision="fp32")


def test_the_gradients_rms_is_that_of_batches_times_the_root_of_their_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmtrain.evaluation.adaptive.TOKENS_PER_GRADIENT", 2 * CONTEXT)
    model = tiny_model()
    forward = model.forward
    seen: list[tuple[Tensor, Tensor]] = []

    def watched(inputs: Tensor, targets: Tensor) -> Tensor:
        seen.append((inputs, targets))
        return forward(inputs, targets)

    monkeypatch.setattr(model, "forward", watched)
    found = gradient_rms_of(model)
    assert len(seen) == 18  # 36 whole windows of 300 tokens, two at a time
    squares = [torch.zeros_like(value) for value in found]
    for inputs, targets in seen:
        model.zero_grad()
        forward(inputs, targets).mean().backward()  # type: ignore[no-untyped-call]
        for square, parameter in zip(squares, model.parameters(), strict=True):
            assert parameter.grad is not None
            square.add_(parameter.grad**2)
    for value, square in zip(found, squares, strict=True):
        assert_close(value, (square / 18 * 2 * CONTEXT).sqrt())
    rows = torch.cat([inputs[:, 0] for inputs, _ in seen])
    assert len(rows) == 36
    assert all(bool((targets[:, :-1] == inputs[:, 1:]).all()) for inputs, targets in seen)


@pytest.mark.parametrize("mode", MODES)
def test_probabilities_sum_to_one(mode: str) -> None:
    """The distribution at a place: the same stream with each possible word there, and nothing after it."""
    for place in (0, 13):
        total = 0.0
        for word in range(VOCABULARY):
            ids = np.append(IDS[:place], word)
            total += math.exp(-float(scores(forward_of(tiny_model(), mode), ids)[-1]))
        assert total == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_a_token_is_scored_before_it_is_learned_from(mode: str) -> None:
    """Other words from a place on leave the scores before it as they are, bit for bit, and change what comes after."""
    before = scores(forward_of(tiny_model(), mode), IDS)
    assert len(before) == len(IDS)
    for place in (SEGMENT * 4, SEGMENT * 4 + 1, SEGMENT * 4 + 2):
        other = IDS.copy()
        other[place:] = (other[place:] + 1) % VOCABULARY
        after = scores(forward_of(tiny_model(), mode), other)
        assert torch.equal(after[:place], before[:place])
        single = IDS.copy()
        single[place] = (single[place] + 1) % VOCABULARY
        changed = scores(forward_of(tiny_model(), mode), single) != before
        assert not changed[:place].any()
        assert changed[place]
        # The context ends after CONTEXT tokens: what still changes then has learned, and temperature does not.
        assert bool(changed[place + 2 * CONTEXT :].any()) == (mode != "temperature")


def test_a_token_s_own_score_does_not_learn_from_it() -> None:
    """The first segment, whatever its words, is scored by the trained model; the next ones no longer are."""
    model = tiny_model()
    for forward in (forward_of(model, "dynamic rms"), forward_of(model, "dynamic sgd")):
        plain, found = scores(forward_of(model, "temperature"), IDS).detach(), scores(forward, IDS)
        assert torch.equal(found[:SEGMENT], plain[:SEGMENT])
        assert (found[SEGMENT:] != plain[SEGMENT:]).all()


@torch.no_grad()
def test_nothing_mixed_in_and_nothing_learned_is_the_plain_score() -> None:
    model = tiny_model()
    plain = scores(model, IDS)
    assert torch.equal(scores(Cached(model.score, 0.0, 5.0, 20), IDS), plain)
    still: Rates = sgd_rates(model, 0.0, 0.5)
    assert torch.equal(scores(only_nats(Dynamic(model, still)), IDS), plain)
    assert torch.equal(mix(plain, torch.full_like(plain, -math.inf), 0.0), plain)


def test_repeats_are_found_by_the_cache_and_learned() -> None:
    """A stream of one phrase over and over: everything that adapts must gain on it."""
    ids = np.tile(IDS[:11], 8)
    model = tiny_model(copying=False)
    plain = float(scores(model, ids).detach()[44:].mean())
    for mode in MODES[1:]:
        assert float(scores(forward_of(tiny_model(copying=False), mode), ids)[44:].mean()) < 0.9 * plain


def test_every_mode_repeats_itself_and_leaves_the_trained_model() -> None:
    for mode in MODES:
        model = tiny_model()
        weights = copy.deepcopy(model.state_dict())
        assert torch.equal(scores(forward_of(model, mode), IDS), scores(forward_of(model, mode), IDS))
        assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def test_dynamic_evaluation_reads_one_text() -> None:
    with pytest.raises(ValueError, match="2 windows at once"):
        scores(forward_of(tiny_model(), "dynamic rms"), IDS, batch_size=2)


def test_a_cache_in_pieces_is_one_cache() -> None:
    states, words = torch.randn(50, 4), torch.randint(0, 5, (50,))
    nats = torch.rand(50)
    whole = cache_log_probs(states, words, nats, 3.0, 12)
    assert_close(cache_log_probs(states[13:], words[13:], nats[30:], 3.0, 12), whole[30:])
    assert whole[0] == -nats[0]
    unit = F.normalize(states, dim=-1)
    assert_close(cache_log_probs(7 * unit, words, nats, 3.0, 12), whole)


ADAPTIVE = ["--dynamic", "--cache", "--temperature", "1.1"]


def test_the_command(lmtrain: Lmtrain, workdir: Path) -> None:
    """On the sample corpus, whose entropy is known: no mode may get below it, and no file of the run may change."""

    def hashes() -> dict[Path, str]:
        return {path: sha256_bytes(path.read_bytes()) for path in (workdir / "runs").rglob("*") if path.is_file()}

    before = hashes()
    floor = json.loads(next((workdir / "data").glob("*.word-*/manifest.json")).read_text())["floor"]["valid"]
    part = ["eval", "--json", "--limit", "96", "--stride", "8"]
    plain = json.loads(lmtrain(*part).out)
    assert plain["temperature"] == 1.0
    assert not {"cache_weight", "dynamic_lr"} & plain.keys()
    results = [plain["nats"]]
    for options in (["--temperature", "1.1"], ["--cache"], ["--dynamic"], [*ADAPTIVE, "eval.cache_theta=9"], ADAPTIVE):
        done = lmtrain(*part, *options)
        assert done.code == 0, done.err
        found = json.loads(done.out)
        assert found["tokens"] == plain["tokens"]
        assert found["word_perplexity"] > floor["word_perplexity"]
        results.append(found["nats"])
    assert len(set(results)) == len(results)
    assert (found["dynamic_rule"], found["dynamic_embedding"]) == ("rms", 1.0)
    assert (found["temperature"], found["cache_weight"]) == (1.1, 0.1)
    text = lmtrain("eval", *ADAPTIVE, "eval.dynamic_rule=sgd", "--limit", "20", "--stride", "2").out
    assert "stride 2, temperature 1.1, cache weight 0.1" in text
    assert "dynamic rule sgd, dynamic lr 0.02, dynamic embedding 1.0" in text
    assert hashes() == before


MISTAKES = {
    "int8": (["--dynamic", "--precision", "int8"], "--dynamic needs gradients"),
    "another section": (["model.dim=8"], "model.dim=8': eval takes eval.field=value and data."),
    "unknown field": (["eval.cache_size=8"], "unknown key eval.cache_size"),
    "all cache": (["--cache", "eval.cache_weight=1"], "eval.cache_weight=1"),
    "no temperature": (["--temperature", "0"], "eval.temperature=0.0"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_what_makes_no_sense_is_refused_in_one_sentence(lmtrain: Lmtrain, workdir: Path, name: str) -> None:
    arguments, says = MISTAKES[name]
    done = lmtrain("eval", *arguments)
    assert done.code == 2
    assert says in done.err
    assert "Traceback" not in done.err


def test_the_end_of_memory_is_a_sentence(lmtrain: Lmtrain, workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def starved(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(evaluation, "evaluate", starved)
    done = lmtrain("eval", "--limit", "20")
    assert (done.code, done.out) == (1, "")
    assert done.err.endswith("lmtrain: out of memory: lower --batch-size or, with --cache, eval.cache_window\n")


def test_a_windowed_model_is_refused() -> None:
    with pytest.raises(Exception, match="a windowed model"):
        forward_of(tiny_model(mode="windowed"), "dynamic rms")

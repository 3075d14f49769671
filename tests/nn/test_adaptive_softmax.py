"""The adaptive softmax against its definition written out, in whole models and by itself."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from lmtrain.config.loader import load
from lmtrain.config.schema import ModelConfig
from lmtrain.errors import LmtrainError
from lmtrain.model.build import build_model, set_output_bias
from lmtrain.model.language_model import LanguageModel
from lmtrain.nn.adaptive_softmax import AdaptiveSoftmax
from lmtrain.nn.chunked_loss import _backward_chunks, _forward_chunks, linear_cross_entropy
from lmtrain.nn.output_loss import Chunk
from tests.model.models import VOCABULARY, build, hidden, targets_of, tokens
from tests.nn.measuring import assert_near, largest_tensor

CUTOFFS: list[tuple[int, ...] | None] = [None, (4,), (1, 2, 22), (7, 15)]


def made(**fields: object) -> LanguageModel:
    """A model whose clusters have weights and biases of their own."""
    model = build(output="adaptive", **fields)
    assert model.adaptive is not None
    with torch.no_grad():
        model.adaptive.clusters.weight.normal_()
        model.adaptive.bias.normal_()
        model.output_bias.normal_()
    return model


def written_out(model: LanguageModel, vectors: Tensor) -> Tensor:
    """log p of every word for each hidden vector (N, E), cluster by cluster: (N, V)."""
    part = model.adaptive
    assert part is not None
    edges = [*part.cutoffs, VOCABULARY]
    rows = []
    for vector in vectors:
        words = (model.output.weight @ vector + model.output_bias).exp()
        clusters = (part.clusters.weight @ vector + part.bias).exp()
        total = words[: edges[0]].sum() + clusters.sum()
        row = [words[: edges[0]] / total]
        for k, (start, end) in enumerate(itertools.pairwise(edges)):
            row.append(clusters[k] / total * words[start:end] / words[start:end].sum())
        rows.append(torch.cat(row).log())
    return torch.stack(rows)


@pytest.mark.parametrize("chunk", [None, 2])
@pytest.mark.parametrize(
    ("cutoffs", "fields"),
    [
        *((cutoffs, {}) for cutoffs in CUTOFFS),
        *(((7, 15), fields) for fields in ({"mode": "windowed", "embed_dim": 6}, {"tie_embeddings": False})),
    ],
    ids=str,
)
def test_loss_prediction_and_gradients_are_those_written_out(
    cutoffs: tuple[int, ...] | None, chunk: Chunk, fields: dict[str, object]
) -> None:
    model, text = made(output_cutoffs=cutoffs, **fields).double(), tokens(3, 7)
    targets = targets_of(model, tokens(3, 8)[:, 1:])
    expected = written_out(model, hidden(model, text).flatten(0, -2))
    found = model.predict(text)
    torch.testing.assert_close(found.flatten(0, -2), expected)
    torch.testing.assert_close(found.exp().sum(-1), torch.ones(targets.shape, dtype=torch.float64))
    expected = -expected.gather(1, targets.reshape(-1, 1)).view_as(targets)
    model.train().loss_chunk = chunk
    nats = model(text, targets)
    torch.testing.assert_close(nats, expected)
    weights = torch.linspace(-1, 2, targets.numel(), dtype=torch.float64).view_as(targets)
    parameters = list(model.parameters())  # the embedding among them, which is the output's weight where tied
    wanted = torch.autograd.grad((expected * weights).sum(), parameters)
    assert_near(list(torch.autograd.grad((nats * weights).sum(), parameters)), list(wanted), 1e-10)


@pytest.mark.parametrize("mode", ["causal", "windowed"])
def test_copying_is_mixed_with_it(mode: str) -> None:
    model, text = made(mode=mode, copy=True, output_cutoffs=(4, 9)), tokens(2, 12)
    targets = targets_of(model, tokens(2, 13)[:, 1:])
    log_probs = model.predict(text)
    torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(targets.shape))
    torch.testing.assert_close(model(text, targets), -log_probs.gather(-1, targets.unsqueeze(-1)).squeeze(-1))


def test_without_a_state_it_predicts_equal_words_and_then_the_frequencies() -> None:
    model, counts = build(output="adaptive", output_cutoffs=(4, 9)), torch.arange(VOCABULARY) ** 3
    torch.testing.assert_close(model._log_probs(torch.zeros(8)).exp(), torch.full((VOCABULARY,), 1 / VOCABULARY))
    set_output_bias(model, counts)
    expected = (counts + 1) / (counts + 1).sum()
    torch.testing.assert_close(model._log_probs(torch.zeros(8)).exp(), expected)
    assert model.adaptive is not None
    model.adaptive.bias.data[0] += 1
    assert (model._log_probs(torch.zeros(8)).exp() - expected).abs().max() > 0.01


@pytest.mark.parametrize(
    ("multiple", "rows", "logits"),
    [(1, 40, 8 * 10), (2, 40, 8 * 10), (3, 40, 9 * 10), (3, 8, 8 * 10), (16, 40, 16 * 20)],
)
def test_only_the_logits_of_a_tails_own_targets_are_computed(
    monkeypatch: pytest.MonkeyPatch, multiple: int, rows: int, logits: int
) -> None:
    """Of 8 targets among 10 words and 2 among 20, each filled up to the multiple, but to no more than `rows`."""
    monkeypatch.setattr("lmtrain.nn.chunked_loss.MULTIPLE", multiple)
    hidden, weight, bias = torch.randn(41, 3), torch.randn(30, 3), torch.zeros(30)
    targets, sizes = torch.tensor([-1] * 30 + [3] * 8 + [25] * 2 + [-1]), [10, 20]
    with largest_tensor() as seen:
        nats = _forward_chunks(hidden, weight, bias, targets, sizes, rows, torch.float32)
    assert seen.largest == logits
    with largest_tensor() as seen:
        _backward_chunks(torch.ones(41), hidden, weight, bias, targets, sizes, rows, torch.float32)
    assert seen.largest == max(41 * 3, logits)  # the gradient of the states, or the logits
    assert (nats[:30] == 0).all()
    assert (nats[30:40] > 0).all()


def test_clusters_of_very_different_biases_have_finite_gradients() -> None:
    """Also in the row that fills up each cluster."""
    hidden, weight = (torch.randn(count, 4, dtype=torch.float64, requires_grad=True) for count in (3, 5))
    bias = torch.tensor([0.0, 1.0, -800.0, -801.0, -799.0], dtype=torch.float64, requires_grad=True)
    targets, sizes = torch.tensor([1, 3, -1]), [2, 3]
    logits = hidden @ weight.T + bias
    chosen = [logits[0, :2].log_softmax(0)[1], logits[1, 2:].log_softmax(0)[1], logits.new_zeros(())]
    written = -torch.stack(chosen)
    nats = linear_cross_entropy(hidden, weight, bias, targets, 64, sizes)
    torch.testing.assert_close(nats, written)
    found, expected = (torch.autograd.grad(x.sum(), (hidden, weight, bias)) for x in (nats, written))
    torch.testing.assert_close(found, expected)


def test_the_largest_cluster_decides_how_many_logits_exist_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its 120 words, and the 30 of the other, in 64 rows."""
    at_once: list[int] = []

    def noted(*arguments: Any) -> Tensor:
        at_once.append(arguments[4])
        return linear_cross_entropy(*arguments)

    monkeypatch.setattr("lmtrain.nn.adaptive_softmax.linear_cross_entropy", noted)
    monkeypatch.setattr("lmtrain.nn.output_loss.MAX_LOGIT_BYTES", 4 * 64 * 40)
    monkeypatch.setattr("lmtrain.nn.output_loss.MIN_ROWS", 6)
    part, hidden, weight = AdaptiveSoftmax(3, 160, None), torch.randn(64, 3), torch.randn(160, 3)
    part.nats(hidden, weight, torch.zeros(160), torch.full((64,), 159), "auto")
    assert at_once == [6]


def test_traced_as_one_graph_equals_eager() -> None:
    model, text = made(layers=0, output_cutoffs=(4, 9)), tokens(2, 12)
    one_cluster = torch.zeros_like(text)
    torch.compiler.reset()  # what other tests compiled counts
    compiled = torch.compile(model, dynamic=False, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16), torch._dynamo.config.patch(recompile_limit=1):
        for targets in (text.flip(1), one_cluster):  # other counts in each cluster: nothing is compiled again
            found, expected = compiled(text, targets), model(text, targets)
            torch.testing.assert_close(found, expected, atol=0.05, rtol=1e-2)
            gradients = [torch.autograd.grad(nats.sum(), list(model.parameters())) for nats in (found, expected)]
            assert_near(list(gradients[0]), list(gradients[1]), 3e-2)


def test_a_target_takes_the_logits_of_its_share_of_the_tails() -> None:
    part = AdaptiveSoftmax(3, 10, (2, 6))
    counts = torch.tensor([30, 20, 10, 10, 5, 5, 5, 5, 5, 5])  # 50 of 100, 30, 20
    assert part.tail_logits_per_target(counts) == pytest.approx(0.3 * 4 + 0.2 * 4)


@pytest.mark.parametrize(
    ("cutoffs", "words", "message"),
    [((4, 10), 10, r"cluster would be empty: \(4, 10\), 10 words"), (None, 15, r"empty: \(0, 3\), 15 words")],
)
def test_cutoffs_beyond_the_vocabulary_are_rejected(cutoffs: tuple[int, ...] | None, words: int, message: str) -> None:
    with pytest.raises(LmtrainError, match=rf"model\.output_cutoffs: .* {message}; set others"):
        build_model(ModelConfig(output="adaptive", output_cutoffs=cutoffs), words)
    with pytest.raises(ValueError, match=message):
        AdaptiveSoftmax(3, words, cutoffs)


@pytest.mark.parametrize("value", ["[5, 5]", "[9, 4]", "[0, 4]", "some"])
def test_wrong_cutoffs_are_named(value: str) -> None:
    with pytest.raises(LmtrainError, match=r"model\.output_cutoffs"):
        load(None, [f"model.output_cutoffs={value}"], {})
    assert load(None, ["model.output=adaptive", "model.output_cutoffs=[4, 9]"], {}).model.output_cutoffs == (4, 9)

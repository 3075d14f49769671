"""Weights of an ensemble, fitted to a text, against a search by brute force."""

import numpy as np
import pytest
import torch
from torch import Tensor

from lmtrain.config.schema import EvalConfig
from lmtrain.evaluation.adaptive import adapted
from lmtrain.evaluation.ensemble_weights import TOLERANCE, em_step, fitted_weights, member_nats, weight_gradient
from lmtrain.evaluation.perplexity import Forward, Score
from lmtrain.model.ensemble import Ensemble
from tests.evaluation.scoring import score_of, split_of
from tests.model.models import VOCABULARY, build

IDS = np.random.default_rng(0).integers(1, VOCABULARY, 60)


def plain(ensemble: Ensemble) -> Forward:
    return adapted(ensemble, EvalConfig(), list, dynamic=False, cache=False, segment=5, precision="fp32")


def random_nats(members: int, better: float = 0.0) -> Tensor:
    """Of 500 tokens, by members of which the first is `better` by so many nats."""
    nats = torch.randn(members, 500, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).abs() + 1
    nats[0] -= better
    return nats


def mixed(nats: Tensor, weights: list[float]) -> float:
    """The mean nats of the mixture, as a plain loop over the tokens."""
    total = 0.0
    for column in nats.T.tolist():
        total -= np.log(sum(w * np.exp(-value) for w, value in zip(weights, column, strict=True)))
    return total / nats.shape[1]


@pytest.mark.parametrize("better", [0.0, 0.4, 5.0])
def test_two_weights_are_the_best_of_a_fine_grid(better: float) -> None:
    nats = random_nats(2, better)
    grid = [mixed(nats, [share, 1 - share]) for share in np.linspace(0, 1, 201)]
    weights = fitted_weights(nats)
    assert sum(weights) == pytest.approx(1)
    assert mixed(nats, weights) <= min(grid) + TOLERANCE
    assert weights[0] == pytest.approx(np.linspace(0, 1, 201)[int(np.argmin(grid))], abs=0.01)


def test_no_step_raises_the_nats_and_the_gradient_bounds_what_is_left() -> None:
    nats = random_nats(4, 0.5)
    best = mixed(nats, fitted_weights(nats))
    weights = torch.full((4,), 0.25, dtype=torch.float64)
    before = np.inf
    for _ in range(30):
        now, gradient = mixed(nats, weights.tolist()), weight_gradient((-nats).exp(), weights)
        assert now <= before + 1e-12
        assert now - best <= float(gradient.amax()) - 1 + 1e-12
        before, weights = now, em_step(weights, gradient)


def test_equal_members_keep_equal_weights_and_a_hopeless_one_has_none() -> None:
    nats = random_nats(1)
    assert fitted_weights(nats.expand(3, -1)) == pytest.approx([1 / 3] * 3)
    assert fitted_weights(torch.cat((nats, nats + 800.0))) == pytest.approx([1.0, 0.0])  # exp(-800) is 0


def test_a_fitted_ensemble_scores_no_worse_than_an_equal_one_or_its_members() -> None:
    ensemble = Ensemble([build(), build(dim=12, copy=True), build(position="alibi", layers=1)]).eval()
    text = split_of(IDS)

    def score(forward: Forward) -> Score:
        return score_of(forward, text, context=12, stride=5, batch_size=3)

    nats = member_nats(ensemble, score, 1.0)
    alone = [score(member).nats for member in ensemble.members]
    assert nats.sum(1).tolist() == pytest.approx(alone)
    fitted = Ensemble(ensemble.members, fitted_weights(nats)).eval()
    equal, best = (score(plain(model)).nats for model in (ensemble, fitted))
    assert equal == pytest.approx(len(IDS) * mixed(nats, [1 / 3] * 3), rel=1e-6)
    assert best <= min(equal, *alone)

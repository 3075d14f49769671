"""The weights of an ensemble's members that give a text the highest probability.

Shapes: M members, N tokens.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from lmtrain.evaluation.perplexity import Forward
from lmtrain.model.ensemble import Ensemble

TOLERANCE = 1e-6
"""Nats per token by which fitted weights may fall short of the best ones."""


def member_nats(ensemble: Ensemble, pass_over: Callable[[Forward], object], temperature: float) -> Tensor:
    """The nats of every token under each member: (M, N) float64.

    `pass_over(forward)` is a call of `perplexity.evaluate` on the text, whose result is not used.
    """
    found = []

    def forward(inputs: Tensor, targets: Tensor) -> Tensor:
        scored = [member.score(inputs, targets, temperature=temperature)[0] for member in ensemble.members]
        nats = torch.stack([nats.flatten() for nats in scored])
        found.append(nats.double().cpu())
        return nats[0].view_as(targets)

    pass_over(forward)
    return torch.cat(found, dim=1)


def fitted_weights(nats: Tensor) -> list[float]:
    """The weights, sum 1, that minimize the mean of -log sum_m weight_m p_m: nats (M, N) float64.

    By expectation-maximization (Dempster et al., 1977) from equal weights. The mean is convex in the weights, so for
    any others it is lower by at most the largest gradient minus 1, which ends the iteration.
    """
    likelihoods = (nats.amin(0) - nats).exp()  # relative to the best member's, for each token
    weights = torch.full((len(nats),), 1 / len(nats), dtype=nats.dtype)
    while (gradient := weight_gradient(likelihoods, weights)).amax() - 1 > TOLERANCE:
        weights = em_step(weights, gradient)
    return weights.tolist()


def em_step(weights: Tensor, gradient: Tensor) -> Tensor:
    """Each member's share of the responsibility for the tokens under the present weights: (M,), (M,) -> (M,)."""
    responsibility = weights * gradient
    return responsibility / responsibility.sum()


def weight_gradient(likelihoods: Tensor, weights: Tensor) -> Tensor:
    """Of the mean log-probability, by the weights: the mean of p_m / sum_k weight_k p_k, (M, N) and (M,) -> (M,)."""
    return (likelihoods / (weights @ likelihoods)).mean(1)

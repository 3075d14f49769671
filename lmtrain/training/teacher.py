"""Learning from a trained run's predictions beside the text: distillation (Hinton et al. 2015), also from a model of
the same size ("born again", Furlanello et al. 2018).

B = windows, T = tokens in one, S = predictions of one (T, or 1 without a dimension of its own if windowed), V = words
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmtrain.model.language_model import LanguageModel


class Taught(nn.Module):
    """A model's forward pass in training where a `teacher` has its share of the loss.

    Called as the model is, tokens (B, T) and targets (B, S), and returns (B, S), for each prediction
    (1 - weight) * -log p(target) + weight * KL(the teacher's distribution || the model's), in nats. The teacher reads
    the same tokens, without dropout, and learns nothing.
    """

    def __init__(self, model: LanguageModel, teacher: LanguageModel, weight: float) -> None:
        super().__init__()
        self.model = model
        self.teacher = teacher.eval().requires_grad_(False)
        self.weight = weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.no_grad():
            taught = self.teacher.predict(tokens)
        log_probs = self.model.predict(tokens)
        nats = F.nll_loss(log_probs.flatten(0, -2), targets.flatten(), reduction="none").view_as(targets)
        divergence = (taught.exp() * (taught - log_probs)).sum(-1)
        return (1 - self.weight) * nats + self.weight * divergence

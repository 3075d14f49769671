"""The loss of a language model on the text, mixed with a teacher's predictions.

Shapes: B rows, T tokens in a row, S predictions per row (T, or 1 if windowed), V vocabulary entries.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmtrain.model.ensemble import Predictor
from lmtrain.model.language_model import LanguageModel


class Distillation(nn.Module):
    """The distillation loss of each target (Hinton et al., 2015; Furlanello et al., 2018, for a teacher of the same
    size), in place of the model's own.

    It is (1 - weight) * -log p(target) + weight * KL(the teacher's distribution || the model's). The teacher, which may
    be an ensemble, reads the same tokens, without dropout, and is not trained. `loss_chunk` has no effect: the
    divergence needs the logits of all targets.
    """

    def __init__(self, model: LanguageModel, teacher: Predictor, weight: float) -> None:
        super().__init__()
        self.model = model
        self.teacher = teacher.eval().requires_grad_(False)
        self.weight = weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Tokens (B, T), targets (B, S) -> (B, S)."""
        with torch.no_grad():
            teacher_log_probs = self.teacher.predict(tokens)
        log_probs = self.model.predict(tokens)
        nats = F.nll_loss(log_probs.flatten(0, -2), targets.flatten(), reduction="none").view_as(targets)
        divergence = (teacher_log_probs.exp() * (teacher_log_probs - log_probs)).sum(-1)
        return (1 - self.weight) * nats + self.weight * divergence

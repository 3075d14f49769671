"""Learning from a trained run's predictions beside the text: distillation (Hinton et al. 2015), also from a model of
the same size ("born again", Furlanello et al. 2018).

B = windows, T = tokens in one, S = predictions of one (T, or 1 without a dimension of its own if windowed), V = words
"""

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmtrain.checkpoint import CONFIG
from lmtrain.data.tokens import TokenStore
from lmtrain.errors import LmtrainError
from lmtrain.files import sha256_bytes
from lmtrain.inference import load_trained
from lmtrain.nn.language_model import LanguageModel
from lmtrain.schema import Config


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


def load_teacher(run_dir: Path, config: Config, store: TokenStore, device: torch.device) -> tuple[LanguageModel, str]:
    """The best checkpoint's model of the run that `config` names as its teacher, and a hash of that checkpoint.

    Raises LmtrainError where there is none, or where it can't be asked about the windows of this run.
    """
    if not (run_dir / CONFIG).is_file():
        raise LmtrainError(f"train.teacher={run_dir} is not a run folder: it has no {CONFIG}")
    found = load_trained(run_dir, "best", "auto", device)
    theirs, ours = found.config.model, config.model
    if found.tokenizer.sha256 != store.tokenizer.sha256:
        raise LmtrainError(
            f"train.teacher={run_dir} has another tokenizer: the words it predicts are not those of this run"
        )
    if theirs.mode != ours.mode:
        raise LmtrainError(
            f"train.teacher={run_dir} has model.mode={theirs.mode}, and this run {ours.mode}: use the same"
        )
    if theirs.context < ours.context:
        raise LmtrainError(
            f"train.teacher={run_dir} reads {theirs.context} tokens at most: use no longer a model.context than that"
        )
    return found.model, sha256_bytes(json.dumps(found.info["files"], sort_keys=True).encode())

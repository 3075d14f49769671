"""The trained runs whose predictions are averaged: loaded, and checked to fit each other."""

from collections.abc import Sequence
from pathlib import Path

import torch

from lmtrain.errors import LmtrainError
from lmtrain.model.ensemble import Ensemble, Predictor
from lmtrain.model.trained import TrainedWeights, build_trained, trained_weights
from lmtrain.storage.run_folder import TOKENIZER
from lmtrain.system.messages import Note, ignore


def load_members(
    run_dirs: Sequence[Path], which: str | None, weights: str, note: Note = ignore
) -> tuple[TrainedWeights, ...]:
    """The weights of each run, as `trained_weights`.

    Raises LmtrainError where that does, or unless all have the same tokenizer, mode and context.
    """
    found = tuple(trained_weights(run_dir, which, weights, note) for run_dir in run_dirs)
    for other in found[1:]:
        _check_alike(found[0], other)
    return found


def build_members(found: Sequence[TrainedWeights], device: torch.device) -> Predictor:
    """The model of a run, or the ensemble of several, in evaluation mode."""
    models = [build_trained(one, device) for one in found]
    return models[0] if len(models) == 1 else Ensemble(models).eval()


def _check_alike(first: TrainedWeights, other: TrainedWeights) -> None:
    if other.tokenizer.sha256 != first.tokenizer.sha256:
        raise LmtrainError(
            f"{other.run_dir} and {first.run_dir} have different tokenizers, so their predictions can't be averaged: "
            f"leave one of them out, or train it again with tokenizer.file={first.run_dir / TOKENIZER}"
        )
    for name in ("mode", "context"):
        ours, theirs = getattr(first.config.model, name), getattr(other.config.model, name)
        if theirs != ours:
            raise LmtrainError(
                f"{other.run_dir} has model.{name}={theirs}, and {first.run_dir} {ours}: leave one of them out, or "
                f"train it again with model.{name}={ours}"
            )

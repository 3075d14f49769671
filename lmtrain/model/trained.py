"""The weights of a trained run, verified, and the model that has them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lmtrain.config.schema import Config
from lmtrain.data.tokenizer import Tokenizer
from lmtrain.errors import LmtrainError
from lmtrain.model.build import build_uninitialized
from lmtrain.model.language_model import LanguageModel
from lmtrain.storage import checkpoint, run_checkpoints, run_folder
from lmtrain.storage.tensor_files import LazyTensor
from lmtrain.system.messages import Note, ignore

GROUPS = ("model", "ema")
"""The tensors of a checkpoint that scoring needs."""


@dataclass(frozen=True)
class TrainedWeights:
    """A run's weights at one verified checkpoint; each tensor is read on first use."""

    run_dir: Path
    config: Config
    tokenizer: Tokenizer
    tensors: dict[str, LazyTensor]
    kind: str
    """`ema` or `raw`."""
    info: dict[str, Any]


def trained_weights(run_dir: Path, which: str | None, weights: str, note: Note = ignore) -> TrainedWeights:
    """The checkpoint `which` (`best`, `last` or a step) with its `ema` or `raw` weights (`auto`: ema if it was saved).

    None is the best one that is not damaged; a note says where another one may be better.
    Raises LmtrainError when the checkpoint is damaged, has no such weights, or belongs to another tokenizer or model.
    """
    config = run_folder.run_config(run_dir)
    tokenizer = Tokenizer.load(run_dir / run_folder.TOKENIZER)
    loaded = run_checkpoints.load_chosen(run_dir, which, GROUPS, note)
    folder = loaded.folder
    checkpoint.check_model(loaded, config.model)
    if weights == "ema" and "ema" not in loaded.tensors:
        raise LmtrainError(f"{folder} has no averaged weights: use --weights raw, or train with train.ema")
    if loaded.info.get("tokenizer") != tokenizer.sha256:
        raise LmtrainError(f"{run_dir / run_folder.TOKENIZER} is not the tokenizer that {folder} was trained with")
    averaged = weights != "raw" and "ema" in loaded.tensors
    tensors = loaded.tensors["model"] | (loaded.tensors["ema"] if averaged else {})
    try:
        _check_width(tensors, config.model.dim)
        model = build_uninitialized(config.model, tokenizer.vocab_size)
        checkpoint.check_shapes(tensors, dict(model.named_parameters()))
    except (RuntimeError, ValueError) as error:
        raise LmtrainError(f"{folder} does not fit {run_dir / run_folder.CONFIG}: {error}") from error
    return TrainedWeights(run_dir, config, tokenizer, tensors, "ema" if averaged else "raw", loaded.info)


def build_trained(found: TrainedWeights, device: torch.device) -> LanguageModel:
    """The model with these weights, in evaluation mode."""
    model = build_uninitialized(found.config.model, found.tokenizer.vocab_size)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(found.tensors[name][...])  # one at a time, so that there is no second copy of the model
    return model.to(device).eval()


def _check_width(tensors: dict[str, LazyTensor], dim: int) -> None:
    """Raise ValueError unless the model is as wide as its configuration says: its tables of positions will be."""
    if "pool.seed" in tensors and tuple(tensors["pool.seed"].shape) != (dim,):
        raise ValueError(f"pool.seed has shape {tuple(tensors['pool.seed'].shape)}, not {(dim,)}")

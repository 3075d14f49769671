"""Verified weights of trained runs, and the model or ensemble that is built from them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lmtrain.config.schema import Config
from lmtrain.data.tokenizer import Tokenizer
from lmtrain.errors import LmtrainError
from lmtrain.model.build import build_uninitialized
from lmtrain.model.ensemble import Ensemble, Predictor
from lmtrain.model.language_model import LanguageModel
from lmtrain.storage import checkpoint, run_checkpoints, run_folder
from lmtrain.storage.tensor_files import LazyTensor


@dataclass(frozen=True)
class TrainedWeights:
    """A run's weights at one verified checkpoint; each tensor is read when it is indexed."""

    run_dir: Path
    config: Config
    tokenizer: Tokenizer
    tensors: dict[str, LazyTensor]
    weights: str
    """`ema` or `raw`."""
    info: dict[str, Any]


def check_default_dtype() -> None:
    """Raise LmtrainError if torch's default dtype is not float32."""
    if torch.get_default_dtype() != torch.float32:  # a run with other weights can't be loaded in another process
        raise LmtrainError(
            f"torch's default dtype is {torch.get_default_dtype()}, and a run has weights of float32: call "
            "torch.set_default_dtype(torch.float32) first"
        )


def trained_weights(run_dir: Path, which: str | None, weights: str) -> TrainedWeights:
    """Load a checkpoint (`which`: `best`, `last`, a step or None) with its `ema` or `raw` weights.

    `auto` weights are ema if the checkpoint has them. `which=None` chooses the best checkpoint that is not damaged;
    a warning says if another one may be better. Raises LmtrainError if the checkpoint is damaged, has no such
    weights, or belongs to another tokenizer or model, and as `check_default_dtype` does.
    """
    check_default_dtype()
    config = run_folder.run_config(run_dir)
    tokenizer = Tokenizer.load(run_dir / run_folder.TOKENIZER)
    loaded = run_checkpoints.load_chosen(run_dir, which)
    folder = loaded.folder
    if weights == "ema" and "ema" not in loaded.tensors:
        raise LmtrainError(f"{folder} has no EMA weights: use --weights raw, or train with train.ema")
    if loaded.info.get("tokenizer") != tokenizer.sha256:
        raise LmtrainError(f"{run_dir / run_folder.TOKENIZER} is not the tokenizer that {folder} was trained with")
    use_ema = weights != "raw" and "ema" in loaded.tensors
    tensors = loaded.tensors["model"] | (loaded.tensors["ema"] if use_ema else {})
    shape = config.model
    sizes = {  # of the parameters that the tables, which are computed, depend on
        "pool.seed": (shape.dim,),
        "embedding.weight": (tokenizer.vocab_size, shape.embed_dim or shape.dim),
        **({"encoder.global_tokens": (shape.global_tokens, shape.dim)} if shape.global_tokens else {}),
    }
    try:
        for name, size in sizes.items():
            if name not in tensors or tensors[name].shape != size:
                raise ValueError(f"it lacks {name} of shape {size}")
        model = build_uninitialized(config.model, tokenizer.vocab_size)
        checkpoint.check_shapes(tensors, dict(model.named_parameters()))
    except (RuntimeError, ValueError) as error:
        raise LmtrainError(f"{folder} does not fit {run_dir / run_folder.CONFIG}: {error}") from error
    return TrainedWeights(run_dir, config, tokenizer, tensors, "ema" if use_ema else "raw", loaded.info)


def load_weights(run_dirs: Sequence[Path], which: str | None, weights: str) -> tuple[TrainedWeights, ...]:
    """Load the weights of each run by `trained_weights`.

    Raises LmtrainError as it does, and if two runs differ in tokenizer, mode or context.
    """
    loaded = first, *others = tuple(trained_weights(run_dir, which, weights) for run_dir in run_dirs)
    for other in others:
        if other.tokenizer.sha256 != first.tokenizer.sha256:
            raise LmtrainError(
                f"{other.run_dir} and {first.run_dir} have different tokenizers, so their predictions can't be "
                "averaged: leave one of them out, or train it again with "
                f"tokenizer.file={first.run_dir / run_folder.TOKENIZER}"
            )
        for name in ("mode", "context"):
            ours, theirs = getattr(first.config.model, name), getattr(other.config.model, name)
            if theirs != ours:
                raise LmtrainError(
                    f"{other.run_dir} has model.{name}={theirs}, and {first.run_dir} {ours}: leave one of them out, or "
                    f"train it again with model.{name}={ours}"
                )
    return loaded


@torch.inference_mode(False)
def build_trained(trained: TrainedWeights, device: torch.device) -> LanguageModel:
    """Build the model with the weights of a run, in evaluation mode.

    The weights can have gradients later, even if the caller is in torch's inference mode now.
    """
    model = build_uninitialized(trained.config.model, trained.tokenizer.vocab_size)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(trained.tensors[name][...])  # one at a time, so that there is no second copy of the model
    return model.to(device).eval()


def build_predictor(runs: Sequence[TrainedWeights], device: torch.device) -> Predictor:
    """Build the model of one run, or the ensemble of several, in evaluation mode."""
    models = [build_trained(trained, device) for trained in runs]
    return models[0] if len(models) == 1 else Ensemble(models).eval()

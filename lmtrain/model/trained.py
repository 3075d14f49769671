"""A trained run, loaded: its model and its tokenizer."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmtrain.config.schema import Config
from lmtrain.data.tokenizer import Tokenizer
from lmtrain.errors import LmtrainError
from lmtrain.model.build import build_uninitialized
from lmtrain.model.cuda_graph import step_function
from lmtrain.model.decoding_state import State
from lmtrain.model.language_model import LanguageModel
from lmtrain.model.packing import pack
from lmtrain.storage import checkpoint, run_checkpoints, run_folder
from lmtrain.storage.tensor_files import Stored
from lmtrain.system.device import choose_device, choose_precision

Note = Callable[[str], None]

_GROUPS = ("model", "ema")


@dataclass(frozen=True)
class TrainedWeights:
    """A run's weights at one verified checkpoint; each tensor is read on first use."""

    run_dir: Path
    config: Config
    tokenizer: Tokenizer
    tensors: dict[str, Stored]
    kind: str
    """`ema` or `raw`."""
    info: dict[str, Any]


@dataclass(frozen=True)
class Trained:
    """A run's model at one checkpoint, ready to use."""

    run_dir: Path
    config: Config
    tokenizer: Tokenizer
    model: LanguageModel
    step: int
    weights: str
    device: torch.device
    info: dict[str, Any]
    take_step: Callable[[State, Tensor], tuple[Tensor, State]]
    """`model.step`, or a faster form of it."""


def trained_weights(run_dir: Path, which: str | None, weights: str, note: Note = lambda _: None) -> TrainedWeights:
    """The checkpoint `which` (`best`, `last` or a step) with its `ema` or `raw` weights (`auto`: ema if it was saved).

    None is the best one that is not damaged; a note says where another one may be better.
    Raises LmtrainError when the checkpoint is damaged, has no such weights, or belongs to another tokenizer or model.
    """
    config = run_folder.run_config(run_dir)
    tokenizer = Tokenizer.load(run_dir / run_folder.TOKENIZER)
    loaded = run_checkpoints.load_chosen(run_dir, which, _GROUPS, note)
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
        checkpoint.check_fit(tensors, dict(build_uninitialized(config.model, tokenizer.vocab_size).named_parameters()))
    except (RuntimeError, ValueError) as error:
        raise LmtrainError(f"{folder} does not fit {run_dir / run_folder.CONFIG}: {error}") from error
    return TrainedWeights(run_dir, config, tokenizer, tensors, "ema" if averaged else "raw", loaded.info)


def with_weights(found: TrainedWeights, device: torch.device) -> Trained:
    """The model with these weights, in evaluation mode."""
    model = build_uninitialized(found.config.model, found.tokenizer.vocab_size)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(found.tensors[name][...])  # one at a time, so that there is no second copy of the model
    model.to(device).eval()
    step = found.info["step"]
    return Trained(
        found.run_dir, found.config, found.tokenizer, model, step, found.kind, device, found.info, model.step
    )


def load_trained(
    run_dir: Path, which: str | None, weights: str, device: torch.device, note: Note = lambda _: None
) -> Trained:
    """The model of the checkpoint that `trained_weights` finds, and raises as it does."""
    return with_weights(trained_weights(run_dir, which, weights, note), device)


def _check_width(tensors: dict[str, Stored], dim: int) -> None:
    """Raise ValueError unless the model is as wide as its configuration says: its tables of positions will be."""
    if "pool.seed" in tensors and tuple(tensors["pool.seed"].shape) != (dim,):
        raise ValueError(f"pool.seed has shape {tuple(tensors['pool.seed'].shape)}, not {(dim,)}")


def ready_to_generate(trained: Trained, precision: str) -> Trained:
    """The same model for generation only, with packed weights and the fastest step function.

    `precision` is one of `packing.pack`, or `auto`, which is that of training. Raises LmtrainError where the device
    can't compute in it.
    """
    try:
        pack(trained.model, choose_precision(precision, trained.device))
    except ValueError as error:
        raise LmtrainError(f"--precision {precision}: {error}; use another one") from error
    return replace(trained, take_step=step_function(trained.model))


def open_trained(run_dir: Path, which: str | None, weights: str, device: str, note: Note = lambda _: None) -> Trained:
    """`load_trained` on the device of that name."""
    return load_trained(run_dir, which, weights, choose_device(device), note)

"""What a run takes from another, trained one: its predictions to learn from, or its weights to begin with."""

import json
from pathlib import Path

import torch
from torch import Tensor

from lmtrain.config.loader import flat
from lmtrain.config.schema import Config, ModelConfig
from lmtrain.data.tokens import TOKENIZER, TokenStore
from lmtrain.errors import LmtrainError
from lmtrain.model.language_model import LanguageModel
from lmtrain.model.trained import TrainedWeights, trained_weights, with_weights
from lmtrain.storage.checkpoint import CONFIG
from lmtrain.storage.files import sha256_bytes
from lmtrain.system.distributed import ALONE, Workers
from lmtrain.training.parallel import copy_all

_FREE = {"context", "dropout", "attention_dropout", "input_dropout", "output_dropout"}
"""Fields of a model that its weights have no part in; where positions are learned, `context` is none of them."""


def check_other_runs(config: Config, store: TokenStore) -> None:
    """Raise LmtrainError where `load_teacher` or `begin_with` would, before anything is made for them."""
    if config.train.teacher is not None:
        _teacher(config.train.teacher, config, store)
    if config.train.init_from is not None:
        _base(config.train.init_from, config, store)


def load_teacher(
    run_dir: Path, config: Config, store: TokenStore, device: torch.device, workers: Workers = ALONE
) -> tuple[LanguageModel, str]:
    """The best checkpoint's model of the run that `config` names as its teacher, and a hash of that checkpoint.

    Raises LmtrainError where there is none, or where it can't be asked about the windows of this run.
    """
    found = _teacher(run_dir, config, store, workers)
    return with_weights(found, device).model, sha256_bytes(json.dumps(found.info["files"], sort_keys=True).encode())


def begin_with(
    run_dir: Path,
    config: Config,
    store: TokenStore,
    model: LanguageModel,
    ema: dict[str, Tensor] | None,
    workers: Workers = ALONE,
) -> int:
    """Put the best weights of another run into a model, and into its average; the step that they are of.

    The averaged weights are taken where they were kept. Of a sharded model, each process reads the rows that it holds.
    Raises LmtrainError where there are none, or where they are those of another model or of other words.
    """
    found = _base(run_dir, config, store, workers)
    copy_all(found.tensors, dict(model.named_parameters()))
    if ema is not None:
        copy_all(found.tensors, ema)
    step: int = found.info["step"]
    return step


def _teacher(run_dir: Path, config: Config, store: TokenStore, workers: Workers = ALONE) -> TrainedWeights:
    found = _best("train.teacher", run_dir, config, store, {"mode"}, workers)
    context = found.config.model.context
    if context < config.model.context:
        raise LmtrainError(
            f"train.teacher={run_dir} reads {context} tokens at most: use no longer a model.context than that"
        )
    return found


def _base(run_dir: Path, config: Config, store: TokenStore, workers: Workers = ALONE) -> TrainedWeights:
    fixed = ModelConfig.model_fields.keys() - _FREE | ({"context"} if config.model.position == "learned" else set())
    return _best("train.init_from", run_dir, config, store, fixed, workers)


def _best(
    field: str, run_dir: Path, config: Config, store: TokenStore, same: set[str], workers: Workers
) -> TrainedWeights:
    """The best weights of the run that `field` names, the same ones in all processes, though it may be training still.

    It must have the tokenizer of `store` and the `same` model.
    """
    found: list[TrainedWeights] = []

    def find() -> str:
        found.append(_fitting(field, run_dir, "best", config, store, same))
        return str(found[0].info["step"])

    step = workers.from_leader(find)
    return found[0] if found else _fitting(field, run_dir, step, config, store, same)


def _fitting(
    field: str, run_dir: Path, which: str, config: Config, store: TokenStore, same: set[str]
) -> TrainedWeights:
    if not (run_dir / CONFIG).is_file():
        raise LmtrainError(f"{field}={run_dir} is not a run folder: it has no {CONFIG}")
    found = trained_weights(run_dir, which, "auto")
    if found.tokenizer.sha256 != store.tokenizer.sha256:
        raise LmtrainError(
            f"{field}={run_dir} has another tokenizer, and so other words than this: give "
            f"tokenizer.file={run_dir / TOKENIZER}"
        )
    theirs, ours = flat(found.config), flat(config)
    for name in sorted(f"model.{name}" for name in same):
        if theirs[name] != ours[name]:
            raise LmtrainError(f"{field}={run_dir} has {name}={theirs[name]}, and this run {ours[name]}: use the same")
    return found

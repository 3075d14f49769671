"""What a run takes from other, trained runs: their predictions as teachers', or the weights of one to start from."""

import json
from pathlib import Path

import torch

from lmtrain.config.loader import flat
from lmtrain.config.schema import Config, ModelConfig
from lmtrain.data.tokens import TokenStore
from lmtrain.errors import LmtrainError
from lmtrain.model.ensemble import Predictor
from lmtrain.model.trained import TrainedWeights, build_predictor, trained_weights
from lmtrain.storage import run_checkpoints
from lmtrain.storage.files import sha256_bytes
from lmtrain.storage.run_folder import CONFIG, TOKENIZER
from lmtrain.system.process_group import SINGLE_PROCESS, ProcessGroup

_FREE = {"context", "dropout", "attention_dropout", "input_dropout", "output_dropout"}
"""Model fields that do not affect the weights' meaning; with learned positions or Linformer, `context` does."""


def check_other_runs(config: Config, store: TokenStore) -> None:
    """Raise LmtrainError if `load_teacher` or `initial_weights` would, before anything is created."""
    for run_dir in config.train.teacher:
        _teacher(run_dir, config, store)
    if config.train.init_from is not None:
        initial_weights(config.train.init_from, config, store)


def load_teacher(
    config: Config, store: TokenStore, device: torch.device, processes: ProcessGroup = SINGLE_PROCESS
) -> tuple[Predictor, str]:
    """The model of the best checkpoint of the run that `config` names as its teacher, and a hash of that checkpoint; of
    several runs, their ensemble, and a hash of all.

    Raises LmtrainError if there is none, or if it can't predict this run's windows.
    """
    found = [_teacher(run_dir, config, store, processes) for run_dir in config.train.teacher]
    hashes = [sha256_bytes(json.dumps(weights.info["files"], sort_keys=True).encode()) for weights in found]
    joined = hashes[0] if len(hashes) == 1 else sha256_bytes(" ".join(hashes).encode())
    return build_predictor(found, device), joined


def initial_weights(
    run_dir: Path, config: Config, store: TokenStore, processes: ProcessGroup = SINGLE_PROCESS
) -> TrainedWeights:
    """The best weights of the run to start from: its averaged weights if it has them.

    Raises LmtrainError if there are none, or if they belong to a different model or tokenizer.
    """
    model = config.model
    has_context = model.position == "learned" or "linformer" in model.layer_attention
    fixed = ModelConfig.model_fields.keys() - _FREE | ({"context"} if has_context else set())
    return _best("train.init_from", run_dir, config, store, fixed, processes)


def _teacher(
    run_dir: Path, config: Config, store: TokenStore, processes: ProcessGroup = SINGLE_PROCESS
) -> TrainedWeights:
    found = _best("train.teacher", run_dir, config, store, {"mode"}, processes)
    context = found.config.model.context
    if context < config.model.context:
        raise LmtrainError(
            f"train.teacher={run_dir} reads {context} tokens at most: use no longer a model.context than that"
        )
    return found


def _best(
    field: str, run_dir: Path, config: Config, store: TokenStore, same: set[str], processes: ProcessGroup
) -> TrainedWeights:
    """The best weights of the run that `field` names, the same in all processes, though that run may still be training.

    It must have the tokenizer of `store`, and equal values of the model fields `same`.
    """

    def best_step() -> str:
        if not (run_dir / CONFIG).is_file():
            raise LmtrainError(f"{field}={run_dir} is not a run folder: it has no {CONFIG}")
        return run_checkpoints.choose(run_dir, "best").name.removeprefix("step-")

    found = trained_weights(run_dir, processes.on_main(best_step), "auto")
    if found.tokenizer.sha256 != store.tokenizer.sha256:
        raise LmtrainError(
            f"{field}={run_dir} has another tokenizer, and so another vocabulary: give "
            f"tokenizer.file={run_dir / TOKENIZER}"
        )
    theirs, ours = flat(found.config), flat(config)
    for name in sorted(f"model.{name}" for name in same):
        if theirs[name] != ours[name]:
            raise LmtrainError(f"{field}={run_dir} has {name}={theirs[name]}, and this run {ours[name]}: use the same")
    return found

"""Other runs that a run uses: teachers (`train.teacher`), or weights to start from (`train.init_from`)."""

import json
from pathlib import Path

import torch

from lmtrain.config.loader import differences
from lmtrain.config.schema import DROPOUT_FIELDS, Config, ModelConfig
from lmtrain.data.tokens import TokenStore
from lmtrain.errors import LmtrainError
from lmtrain.model.ensemble import Predictor
from lmtrain.model.trained import TrainedWeights, build_predictor, trained_weights
from lmtrain.storage import run_checkpoints
from lmtrain.storage.files import sha256_bytes
from lmtrain.storage.run_folder import TOKENIZER, find_run, step_of
from lmtrain.system.process_group import SINGLE_PROCESS, ProcessGroup

_MAY_DIFFER = {"context", *DROPOUT_FIELDS}
"""Model fields that may differ from those of `train.init_from`; `context` may not with learned positions or
Linformer."""


def load_teacher(
    config: Config, store: TokenStore, device: torch.device, processes: ProcessGroup = SINGLE_PROCESS
) -> tuple[Predictor, str]:
    """Return the teacher, and a hash of its checkpoint: the best one of the run `train.teacher`.

    If that is several runs, the teacher is their ensemble, and the hash is that of all their checkpoints.
    Raises LmtrainError if there is no checkpoint, or if its model can't predict the sequences of this run.
    """
    teachers = [_teacher(run_dir, config, store, processes) for run_dir in config.train.teacher]
    hashes = [sha256_bytes(json.dumps(teacher.info["files"], sort_keys=True).encode()) for teacher in teachers]
    joined = hashes[0] if len(hashes) == 1 else sha256_bytes(" ".join(hashes).encode())
    return build_predictor(teachers, device), joined


def initial_weights(
    config: Config, store: TokenStore, processes: ProcessGroup = SINGLE_PROCESS
) -> TrainedWeights | None:
    """Return the best weights of the run `train.init_from`: its EMA weights if it has them. None if it is not set.

    Raises LmtrainError if that run has no weights, or if they belong to a different model or tokenizer.
    """
    model, run_dir = config.model, config.train.init_from
    if run_dir is None:
        return None
    depend_on_context = model.position == "learned" or "linformer" in model.layer_attention
    same = ModelConfig.model_fields.keys() - _MAY_DIFFER | ({"context"} if depend_on_context else set())
    return _best_weights("train.init_from", run_dir, config, store, same, processes)


def _teacher(
    run_dir: Path, config: Config, store: TokenStore, processes: ProcessGroup = SINGLE_PROCESS
) -> TrainedWeights:
    """Return the best weights of a teacher."""
    teacher = _best_weights("train.teacher", run_dir, config, store, {"mode"}, processes)
    context = teacher.config.model.context
    if context < config.model.context:
        raise LmtrainError(
            f"train.teacher={run_dir} reads {context} tokens at most: set model.context={context} or less"
        )
    return teacher


def _best_weights(
    field: str, run_dir: Path, config: Config, store: TokenStore, same: set[str], processes: ProcessGroup
) -> TrainedWeights:
    """Return the best weights of the run `run_dir`, to which `field` is set.

    They are the same in all processes, even if that run is being trained. The run must have the tokenizer of `store`,
    and the model fields `same` must have the values of `config`.
    """

    def best_step() -> str:
        return str(step_of(run_checkpoints.choose(find_run(run_dir.absolute(), config.run.dir), "best")))

    weights = trained_weights(run_dir, processes.on_main(best_step), "auto")
    if weights.tokenizer.sha256 != store.tokenizer.sha256:
        raise LmtrainError(
            f"{field}={run_dir} has another tokenizer, and so another vocabulary: give "
            f"tokenizer.file={run_dir / TOKENIZER}"
        )
    for name, (theirs, ours) in differences(weights.config, config).items():
        if name.removeprefix("model.") in same:
            raise LmtrainError(f"{field}={run_dir} has {name}={theirs}, and this run {ours}: use the same")
    return weights

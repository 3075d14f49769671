"""What `lmtrain train` is to train: the configuration of the run, its folder, and its tokens.

Where no configuration is given, an existing run keeps its own, and a new one gets that of `config.automatic`, which
depends on the text. Fields that are set one by one come on top of either.
"""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lmtrain.config.automatic import MINUTES, automatic
from lmtrain.config.loader import ConfigSource, environment_of, flat, load
from lmtrain.config.schema import RUN_NAME, Config, DataConfig, TokenizerConfig
from lmtrain.config.train import BUDGETS
from lmtrain.data.sources import KNOWN, local_path
from lmtrain.data.tokenizer_choice import of_store
from lmtrain.data.tokenizing import prepare_store
from lmtrain.data.tokens import TokenStore, find_store
from lmtrain.errors import LmtrainError, UsageError
from lmtrain.storage import run_checkpoints
from lmtrain.storage.checkpoint import FORMAT
from lmtrain.storage.files import read_manifest
from lmtrain.storage.run_folder import CONFIG, TOKENIZER, default_name, find_run, run_config
from lmtrain.system.device import choose_device, cores
from lmtrain.system.messages import Note
from lmtrain.training.budget import targets_per_step

STAND_IN_TEXT = 1 << 20, 0
"""Tokens and vocabulary entries (0: not known) by which overrides are checked before those of the text are known."""


@dataclass(frozen=True)
class RunPlan:
    """What is known before the text is read: a configuration that may not be complete, and the run folder."""

    config: Config
    run_dir: Path
    overrides: Sequence[str]
    stored: Config | None
    """The configuration of the run, if it exists."""
    is_automatic: bool
    """Whether sizes and budget are to follow from the text."""


def plan_run(given: ConfigSource, overrides: Sequence[str], resume: Path | None = None) -> RunPlan:
    """What to train: the configuration `given`, or the run `resume`, or neither, with `overrides`.

    Raises UsageError where they contradict each other, and LmtrainError where one can't be read.
    """
    if resume is not None:
        if given is not None or any(text.startswith("run.name=") for text in overrides):
            raise UsageError("--resume names the run and takes its configuration: leave --config and run.name out")
        return _plan_existing(find_run(resume, _partial_config(overrides, "run.dir").run.dir), overrides)
    if given is None:
        run_dir = _run_dir(_partial_config(overrides, "run.dir", "run.name", "data.source"), None)
        if (run_dir / CONFIG).is_file() and run_checkpoints.folders(run_dir):
            return _plan_existing(run_dir, overrides)
    config = load(given, overrides) if given is not None else _recipe(overrides, *STAND_IN_TEXT)
    run_dir = _run_dir(config, given)
    stored = run_config(run_dir) if (run_dir / CONFIG).is_file() else None
    return RunPlan(_with_absolute_paths(config, run_dir), run_dir, overrides, stored, given is None)


def _run_dir(config: Config, given: ConfigSource) -> Path:
    """The folder of the run: its name, or else that of the configuration file or the text."""
    named_after = given if isinstance(given, Path) else Path(config.data.source)
    return config.run.dir / (config.run.name or default_name(named_after))


def _partial_config(overrides: Sequence[str], *fields: str) -> Config:
    """The values of these fields; the others may be right for an existing run and not beside the defaults."""
    own = [text for text in overrides if text.partition("=")[0].strip() in fields]
    return load(None, own, environment_of(*fields))


def _recipe(overrides: Sequence[str], tokens: int, vocab_size: int) -> Config:
    """The configuration for a training text of this size on this machine, with what the user has set."""
    train = _partial_config(
        overrides, "train.device", "train.max_minutes", *(f"train.{name}" for name in BUDGETS)
    ).train
    is_given = any(getattr(train, name) is not None for name in BUDGETS)
    minutes = train.max_minutes or (None if is_given else MINUTES)
    cuda = choose_device(train.device).type == "cuda"

    def for_epochs(epochs: float) -> Config:
        return load(automatic(tokens, vocab_size, cores(), cuda, minutes, epochs), overrides)

    if train.steps is not None:
        return for_epochs(train.steps * targets_per_step(for_epochs(math.inf)) / tokens)
    return for_epochs(train.epochs or (train.tokens / tokens if train.tokens else math.inf))


def _plan_existing(run_dir: Path, overrides: Sequence[str]) -> RunPlan:
    """A run that exists, with its own configuration."""
    stored = run_config(run_dir)
    if not stored.data.dir.exists():  # the run comes from elsewhere
        stored = load(stored, [f"data.dir={DataConfig().dir}"], {})
    config = load(stored, overrides)
    return RunPlan(_with_absolute_paths(config, run_dir), run_dir, overrides, stored, False)


def _with_absolute_paths(config: Config, run_dir: Path) -> Config:
    """The configuration with the name of the run, and with paths of its data that mean the same anywhere."""
    source = local_path(config.data.source)
    data = {"dir": config.data.dir.absolute(), **({"source": str(source.absolute())} if source else {})}
    # A folder that was renamed may have a name that no new run can have; its runs are found by their folders.
    name = run_dir.name if re.match(RUN_NAME, run_dir.name) else None
    return config.model_copy(
        update={
            "run": config.run.model_copy(update={"name": name, "dir": run_dir.parent}),
            "data": config.data.model_copy(update=data),
            "train": config.train.model_copy(
                update={"teacher": tuple(path.absolute() for path in config.train.teacher)}
            ),
        }
    )


def prepare(plan: RunPlan, *, note: Note) -> tuple[Config, TokenStore]:
    """The whole configuration, and the token store to train on, which is made if it is missing.

    Raises LmtrainError as `prepare_store` does, and UsageError for fields that don't fit the automatic ones.
    """
    store = _tokens_of(plan, note)
    config = plan.config
    if plan.is_automatic:
        whole = _recipe(plan.overrides, store.split("train").tokens, store.tokenizer.vocab_size)
        config = _with_absolute_paths(whole, plan.run_dir)
    return config.model_copy(update={"tokenizer": of_store(config.tokenizer, store)}), store


def _tokens_of(plan: RunPlan, note: Note) -> TokenStore:
    """The token store to train on: for a run that exists the one that it was trained on, found by its hash, unless its
    text has changed; else a store that is made if it is missing."""
    config = plan.config
    if plan.stored is None or not run_checkpoints.folders(plan.run_dir):
        return prepare_store(config, note=note)
    source, trained_on = config.data.source, _trained_on(plan.run_dir)
    is_own = Path(source).absolute() == Path(plan.stored.data.source).absolute()
    if trained_on is not None and is_own and source not in KNOWN and local_path(source) is None:
        found = find_store(config.data.dir, trained_on, note)
        if found is not None:
            return found
    asked, stored = config.tokenizer, plan.stored.tokenizer
    if asked != stored and (
        asked.file is not None
        or asked.kind not in ("auto", stored.kind)
        or asked.vocab_size not in (None, stored.vocab_size)
    ):
        return prepare_store(config, note=note)  # and be rejected, if that is another tokenizer
    own = TokenizerConfig(file=plan.run_dir / TOKENIZER)
    config = config.model_copy(update={"tokenizer": own})
    return prepare_store(config, trained_on=trained_on, note=note)


def _trained_on(run_dir: Path) -> str | None:
    """The hash of the tokens that a run was trained on, by its newest checkpoint; None if no checkpoint has it."""
    for folder in reversed(run_checkpoints.folders(run_dir)):
        try:
            return str(read_manifest(folder, FORMAT)["store"])
        except (LmtrainError, KeyError):
            continue
    return None


def chosen(config: Config, also: tuple[str, ...] = ()) -> list[str]:
    """The fields of the model, its tokenizer, its training and `also` that differ from the defaults, as overrides."""
    defaults = flat(Config())
    return [
        f"{key}={value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}"
        for key, value in flat(config).items()
        if key.startswith(("tokenizer.", "model.", "train.", *also)) and value != defaults[key]
    ]

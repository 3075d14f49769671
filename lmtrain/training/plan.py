"""What `lmtrain train` is to train: the configuration of the run, its folder, and its tokens.

If no configuration is given, an existing run keeps its own, and a new one gets the automatic recipe, which depends on
the text. Overrides apply in both cases.
"""

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from lmtrain.config.automatic import MINUTES, automatic
from lmtrain.config.loader import ConfigSource, differences, load, load_fields, override_value, overrides_of
from lmtrain.config.schema import DROPOUT_FIELDS, RUN_NAME, Config, DataConfig, TokenizerConfig
from lmtrain.config.train import BUDGETS
from lmtrain.data.corpus import make_corpus
from lmtrain.data.sources import local_path
from lmtrain.data.tokenizing import prepare_run_store, tokenize, with_vocab_size
from lmtrain.data.tokens import TokenStore, find_store
from lmtrain.errors import LmtrainError, UsageError
from lmtrain.storage import run_checkpoints
from lmtrain.storage.checkpoint import FORMAT
from lmtrain.storage.files import read_manifest
from lmtrain.storage.run_folder import TOKENIZER, default_name, find_run, has_checkpoint, run_config
from lmtrain.system.device import choose_device, cores
from lmtrain.system.messages import log

GPU_CORES = 15
"""A multiprocessor of a GPU counts as this many cores of a CPU, by the tokens per second of `wikitext2` on an H200,
which has 132 multiprocessors."""
STAND_IN_TOKENS = 1 << 20
"""Tokens of a stand-in text, by which overrides are checked before the text is read."""


@dataclass(frozen=True)
class RunPlan:
    """The plan of a run before its text is read; `prepare` completes it."""

    config: Config
    """With `recipe_overrides` it is the recipe for a stand-in text."""
    run_dir: Path
    recipe_overrides: Sequence[str] | None = None
    """The overrides of the automatic recipe, if that is to be chosen by the text."""


def plan_run(source: ConfigSource, overrides: Sequence[str], resume: Path | None = None) -> RunPlan:
    """Return the plan for the configuration `source`, or the run `resume`, or neither, with `overrides`.

    Raises UsageError if they contradict each other, and LmtrainError if one can't be read.
    """
    if resume is not None:
        if source is not None or overrides_of(overrides, "run.name"):
            raise UsageError("--resume names the run and takes its configuration: leave --config and run.name out")
        return _plan_existing(find_run(resume, load_fields(None, overrides, "run.dir").run.dir), overrides)
    if source is not None:
        config = load(source, overrides)
        run_dir = _run_dir(config, source)
        return RunPlan(_with_absolute_paths(config, run_dir), run_dir)
    run_dir = _run_dir(load_fields(None, overrides, "run.dir", "run.name", "data.source"), None)
    if has_checkpoint(run_dir):
        return _plan_existing(run_dir, overrides)
    config = _recipe(overrides, STAND_IN_TOKENS, vocab_size=0)
    return RunPlan(_with_absolute_paths(config, run_dir), run_dir, overrides)


def _run_dir(config: Config, source: ConfigSource) -> Path:
    """Return the folder of the run, which is called `run.name`, or else like the configuration file or the text."""
    named_after = source if isinstance(source, Path) else Path(config.data.source)
    return config.run.dir / (config.run.name or default_name(named_after))


def _recipe(overrides: Sequence[str], tokens: int, vocab_size: int) -> Config:
    """Return the automatic recipe for a training text of this size on this machine, with the overrides.

    The model and the tokenizer are those of the run `train.init_from`, if that is set. Raises UsageError if the
    overrides then set another tokenizer's kind or size, which would have no effect.
    """
    names = ("device", "threads", "max_minutes", "init_from", *BUDGETS)
    given = load_fields(None, overrides, "run.dir", *(f"train.{name}" for name in names))
    train = given.train
    if train.init_from is not None and (own := overrides_of(overrides, "tokenizer.kind", "tokenizer.vocab_size")):
        raise UsageError(f"train.init_from takes the tokenizer of that run: leave {' and '.join(own)} out")
    base = train.init_from and find_run(train.init_from.absolute(), given.run.dir)
    has_steps = any(getattr(train, name) is not None for name in BUDGETS)
    minutes = train.max_minutes or (None if has_steps else MINUTES)
    device = choose_device(train.device)
    cuda = device.type == "cuda"
    if cuda:
        count = GPU_CORES * torch.cuda.get_device_properties(device).multi_processor_count
    else:
        count = train.threads or cores()

    def recipe(epochs: float = math.inf, context: int | None = None) -> Config:
        own = automatic(tokens, vocab_size, count, cuda, minutes, epochs, context)
        return own if base is None else _with_model_of(base, own)

    # The batch follows from the context, which an override or the other run may set, and the dropout from the epochs.
    context = load_fields(recipe(), overrides, "model.context").model.context
    if train.steps is not None:
        epochs = train.steps * load(recipe(context=context), overrides).targets_per_step / tokens
    elif train.tokens is not None:
        epochs = train.tokens / tokens
    else:
        epochs = train.epochs or math.inf
    return load(recipe(epochs, context), overrides)


def _with_model_of(run_dir: Path, recipe: Config) -> Config:
    """Return the recipe with the model and the tokenizer of a run, but with its own dropout."""
    model = run_config(run_dir).model.model_copy(update={name: getattr(recipe.model, name) for name in DROPOUT_FIELDS})
    tokenizer = TokenizerConfig(file=run_dir / TOKENIZER)
    return recipe.model_copy(update={"model": model, "tokenizer": tokenizer})


def _plan_existing(run_dir: Path, overrides: Sequence[str]) -> RunPlan:
    """Return the plan for a run that exists, with its own configuration and the overrides."""
    stored = run_config(run_dir)
    if not os.path.isdir(stored.data.dir):  # noqa: PTH112 -- the run comes from elsewhere, perhaps from another user
        stored = load(stored, [f"data.dir={DataConfig().dir}"], {})
    config = load(stored, overrides)
    return RunPlan(_with_absolute_paths(config, run_dir), run_dir)


def _with_absolute_paths(config: Config, run_dir: Path) -> Config:
    """Return the configuration with the name and folder of the run, and absolute paths of its data and teachers."""
    source = local_path(config.data.source)
    data = {"dir": config.data.dir.absolute(), **({"source": str(source.absolute())} if source else {})}
    # A user may have renamed the folder to what `run.name` does not allow; such a run is found by its folder.
    name = run_dir.name if re.match(RUN_NAME, run_dir.name) else None
    teachers = tuple(path.absolute() for path in config.train.teacher)
    return config.with_fields(run={"name": name, "dir": run_dir.parent}, data=data, train={"teacher": teachers})


def prepare(plan: RunPlan) -> tuple[Config, TokenStore]:
    """Return the complete configuration, and the token store to train on, which is made if it is missing.

    Raises LmtrainError as `make_corpus` and `tokenize` do, and UsageError for overrides that don't fit the automatic
    recipe.
    """
    tokenizer, store = _tokens_of(plan)
    if plan.recipe_overrides is None:
        return plan.config.model_copy(update={"tokenizer": tokenizer}), store
    recipe = _recipe(plan.recipe_overrides, store.split("train").tokens, store.tokenizer.vocab_size)
    config = _with_absolute_paths(recipe, plan.run_dir).model_copy(update={"tokenizer": tokenizer})
    fields = " ".join(changed_fields(config))
    log.info(f"recipe for this text and machine, where it differs from the defaults: {fields}")
    return config, store


def _tokens_of(plan: RunPlan) -> tuple[TokenizerConfig, TokenStore]:
    """Return the section `tokenizer` of the run, and the token store to train on, which is made if it is missing.

    An existing run keeps its tokenizer, unless another one is configured (`check_same_run` then rejects it). Unless its
    text is a file on this machine, which may have changed, the store is found by its hash.
    """
    config = plan.config
    stored = run_config(plan.run_dir) if has_checkpoint(plan.run_dir) else None
    if stored is None or _wants_other_tokenizer(config.tokenizer, stored.tokenizer):
        corpus = make_corpus(config.data)
        tokenizer = with_vocab_size(config.tokenizer, corpus)
        return tokenizer, tokenize(corpus, tokenizer)
    found = find_store(config.data.dir, _store_hash(plan.run_dir))
    if found is not None and local_path(config.data.source) is None and _text(config.data) == _text(stored.data):
        return stored.tokenizer, found
    return stored.tokenizer, prepare_run_store(config.data, plan.run_dir, found)


def _text(data: DataConfig) -> DataConfig:
    """Return the fields that decide which text is read, in a form that can be compared."""
    return data.model_copy(update={"source": str(Path(data.source).absolute()), "dir": DataConfig().dir})


def _wants_other_tokenizer(configured: TokenizerConfig, stored: TokenizerConfig) -> bool:
    """Whether another tokenizer than that of the run is configured; a size of null accepts the run's."""
    return configured != stored and (
        configured.file is not None
        or configured.kind != stored.kind
        or configured.vocab_size not in (None, stored.vocab_size)
    )


def _store_hash(run_dir: Path) -> str | None:
    """Return the hash of the token store in a run's newest checkpoint that has one, or None."""
    for folder in reversed(run_checkpoints.folders(run_dir)):
        try:
            return str(read_manifest(folder, FORMAT)["store"])
        except (LmtrainError, KeyError):
            continue
    return None


def changed_fields(config: Config) -> list[str]:
    """Return the tokenizer, model and train fields that differ from the defaults, as overrides."""
    return [
        f"{key}={override_value(value)}"
        for key, (_, value) in differences(Config(), config).items()
        if key.startswith(("tokenizer.", "model.", "train."))
    ]

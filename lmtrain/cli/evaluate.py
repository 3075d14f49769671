"""`lmtrain eval`: finds what is to be scored, scores it, and prints the perplexity."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lmtrain.cli.options import (
    Checkpoint,
    ConfigFile,
    DataDir,
    Device,
    DeviceChoice,
    Json,
    Overrides,
    Precision,
    Quiet,
    Run,
    TextColumn,
    Weights,
    WeightsChoice,
    as_overrides,
    run_folder,
)
from lmtrain.cli.output import floor, note, show
from lmtrain.errors import LmtrainError, UsageError

if TYPE_CHECKING:
    from lmtrain.config.schema import Config
    from lmtrain.data.tokens import Split, TokenStore
    from lmtrain.evaluation.perplexity import Score
    from lmtrain.model.trained import Trained


class SplitName(StrEnum):
    """The parts of a corpus."""

    train = "train"
    valid = "valid"
    test = "test"


def evaluate(
    overrides: Overrides = None,
    config: ConfigFile = None,
    run: Run = None,
    split: Annotated[SplitName | None, typer.Option(help="[default: valid]")] = None,
    text: Annotated[
        Path | None, typer.Option(help="Score a file of text instead of a split, with the run's own tokenizer.")
    ] = None,
    checkpoint: Checkpoint = None,
    weights: WeightsChoice = Weights.auto,
    stride: Annotated[int | None, typer.Option(help="Tokens scored per window; fewer = more context.")] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Windows per forward pass; changes speed and rounding only.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Score only the first tokens, this many.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Divides the logits of the vocabulary.")] = None,
    cache: Annotated[bool, typer.Option("--cache", help="Mix in a cache of the latest words of the text.")] = False,
    dynamic: Annotated[bool, typer.Option("--dynamic", help="Learn from each stride after it is scored.")] = False,
    text_column: TextColumn = None,
    data_dir: DataDir = None,
    device: DeviceChoice = Device.auto,
    precision: Annotated[
        Precision | None, typer.Option(help="Arithmetic; int8 is for a CPU. [default: that of the run]")
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure the perplexity of a trained model.

    A configuration names the run and sets fields of eval and data; everything else is what the run was trained with.
    """
    from lmtrain.system.allocator import retain_heap

    retain_heap()
    from lmtrain.evaluation.adaptive import settings_used
    from lmtrain.model.trained import open_trained, ready_to_generate
    from lmtrain.system.device import choose_precision
    from lmtrain.system.memory import enough_memory

    if text is not None and split is not None:
        raise UsageError("--split and --text both say what is scored: give one of them")
    options = {"eval.temperature": temperature, "eval.stride": stride, "eval.batch_size": batch_size}
    source = {"data.dir": data_dir} if text is not None else {"data.dir": data_dir, "data.text_column": text_column}
    overrides = [*_checked(overrides or []), *as_overrides(options), *as_overrides(source)]
    trained = open_trained(run_folder(run, config, overrides), checkpoint, weights.value, device.value, note)
    if precision is Precision.int8:
        trained = ready_to_generate(trained, "int8")
    settings, given = _settings(trained, config, overrides)
    arithmetic = choose_precision(precision.value if precision else settings.train.precision, trained.device)
    find_store = partial(_store, trained, settings, given, not quiet)
    needs_train = dynamic and settings.eval.dynamic_rule == "rms"
    if text is not None:
        column = text_column or settings.data.text_column
        scored = _text(trained, text, column, find_store if needs_train else None, not quiet)
    else:
        scored = _split(find_store(), (split or SplitName.valid).value, needs_train)
    with enough_memory("lower --batch-size or, with --cache, eval.cache_window"):
        score = _score(
            trained, settings, scored, arithmetic, limit=limit, cache=cache, dynamic=dynamic, hidden=quiet or None
        )
    _print(trained, scored, score, arithmetic, settings_used(settings.eval, dynamic=dynamic, cache=cache), as_json)


@dataclass(frozen=True)
class _Scored:
    """What is scored, and the training split if gradients are measured on it."""

    kind: str
    """`split` or `text`."""
    name: str
    part: "Split"
    train: "Split | None"
    floor: str = ""
    """The lowest possible perplexity, for the built-in corpus."""


def _split(store: "TokenStore", name: str, needs_train: bool) -> _Scored:
    """A split of the run's corpus."""
    train = store.split("train") if needs_train else None
    return _Scored("split", name, store.split(name), train, floor(store, name))


def _text(
    trained: "Trained", path: Path, column: str, find_store: "Callable[[], TokenStore] | None", progress: bool
) -> _Scored:
    """A file of text; the run's corpus is needed only for the gradients of its training split."""
    from lmtrain.data.prepare import text_split

    part = text_split(path, trained.tokenizer, column, progress=progress)
    return _Scored("text", str(path), part, find_store().split("train") if find_store is not None else None)


def _checked(overrides: list[str]) -> list[str]:
    """`overrides`; raises UsageError unless all are fields of the sections that can be set here."""
    from lmtrain.config.loader import shown

    for override in overrides:
        if not override.startswith(("eval.", "data.", "run.")):
            hint = "" if "=" in override else "; a run is named by --run"
            raise UsageError(
                f"{shown(override)}: eval accepts only eval.field=value, data.field=value and run.name=NAME, because "
                f"everything else is what the run was trained with{hint}"
            )
    return overrides


def _settings(trained: "Trained", path: Path | None, overrides: list[str]) -> tuple["Config", set[str]]:
    """The run's configuration with the user's settings, and the fields that the user has set.

    The user's are, later ones first: the overrides, the environment, and of the file at `path` the section eval and
    data.dir. The data folder that the run was trained with is not used, since the run may come from elsewhere.
    """
    from lmtrain.config.loader import change, environment_of, load

    file = load(path, environment={})
    environment = environment_of("eval", "data.dir")
    evaluation = {field: getattr(file.eval, field) for field in file.eval.model_fields_set}
    base = trained.config.model_copy(
        update={
            "eval": trained.config.eval.model_copy(update=evaluation),
            "data": trained.config.data.model_copy(update={"dir": file.data.dir}),
        }
    )
    given = {override.partition("=")[0].strip() for override in overrides}
    if environment_of("data.dir") or "dir" in file.data.model_fields_set:
        given.add("data.dir")
    return change(base, overrides, environment), given


def _store(trained: "Trained", config: "Config", given: set[str], progress: bool) -> "TokenStore":
    """The token store that the run was trained on, found by its hash.

    A missing one is created again if the user has said from what (`given` has the fields that were set) or if the
    corpus is one that lmtrain knows by name. A path or a hub id that only the run names is not read: the run may come
    from a stranger.
    """
    from lmtrain.config.loader import shown
    from lmtrain.data.prepare import prepare_store
    from lmtrain.data.sources import KNOWN
    from lmtrain.data.tokens import find_store
    from lmtrain.storage.run_folder import TOKENIZER

    wanted, may_make = trained.info.get("tokens"), "data.source" in given
    if isinstance(wanted, str) and not may_make:
        for folder in (config.data.dir, config.data.dir if "data.dir" in given else trained.config.data.dir):
            if (found := find_store(folder, wanted)) is not None:
                return found
    if not may_make and config.data.source not in KNOWN:
        raise LmtrainError(
            f"the tokens that {trained.run_dir} was trained on are not in {config.data.dir}: say where they are with "
            "data.dir=FOLDER, or what to make them from with data.source=... (the run says "
            f"{shown(config.data.source)}); --text scores any file as it is"
        )
    if config.tokenizer.file is not None:  # that file may be gone; the run has a copy
        own = config.tokenizer.model_copy(update={"file": trained.run_dir / TOKENIZER})
        config = config.model_copy(update={"tokenizer": own})
    store = prepare_store(config, note=note, progress=progress)
    if store.sha256 != wanted:
        raise LmtrainError(
            f"{store.folder} is not what {trained.run_dir} was trained on: the corpus has changed or is another one, "
            "so its test split may contain text that the run was trained on. --text scores any file as it is, "
            "--data-dir names the folder of the run's own token store, and data.source=... its own text"
        )
    return store


def _score(
    trained: "Trained",
    config: "Config",
    scored: _Scored,
    precision: str,
    *,
    limit: int | None,
    cache: bool,
    dynamic: bool,
    hidden: bool | None,
) -> "Score":
    """Score the text, with a progress bar; with `dynamic`, measure gradients on the training split first."""
    from tqdm import tqdm

    from lmtrain.evaluation.adaptive import adapted
    from lmtrain.evaluation.perplexity import default_stride, evaluate

    part, mode, context = scored.part, config.model.mode, config.model.context
    stride = config.eval.stride or default_stride(mode, context)
    with tqdm(desc="statistics", unit="tok", unit_scale=True, disable=not dynamic or hidden, leave=False) as bar:
        forward = adapted(
            trained.model,
            config.eval,
            scored.train,
            dynamic=dynamic,
            cache=cache,
            segment=stride,
            device=trained.device,
            precision=precision,
            advance=bar.update,
        )
    with tqdm(total=min(limit or part.tokens, part.tokens), unit="tok", unit_scale=True, disable=hidden) as bar:
        score = evaluate(
            forward,
            part,
            mode=mode,
            context=context,
            stride=stride,
            batch_size=1 if dynamic else config.eval.batch_size,
            first_token=trained.tokenizer.eos_id,
            device=trained.device,
            precision="fp32" if precision == "int8" else precision,  # for all but the matrix products
            limit=limit,
            advance=bar.update,
        )
    if dynamic and not math.isfinite(score.nats):
        raise LmtrainError("dynamic evaluation diverged: lower eval.dynamic_lr")
    return score


def _print(
    trained: "Trained", scored: _Scored, score: "Score", precision: str, used: "dict[str, float | str]", as_json: bool
) -> None:
    about = {
        "run": str(trained.run_dir),
        "step": trained.step,
        "weights": trained.weights,
        scored.kind: scored.name,
        "precision": precision,
        **used,
    }
    named = "".join(
        f", {key.replace('_', ' ')} {value}" for key, value in used.items() if (key, value) != ("temperature", 1.0)
    )
    remarks = f"{scored.floor}{score.remark}"
    table = (
        f"{trained.run_dir} step {trained.step:,} ({trained.weights} weights, {precision}) on {scored.name}: "
        f"context {score.context}, stride {score.stride}{named}\n"
        f"  word perplexity   {score.word_perplexity:10.3f}   over {score.words:,.0f} words{remarks}\n"
        f"  token perplexity  {score.token_perplexity:10.3f}   over {score.tokens:,} tokens"
    )
    if score.bits_per_byte is not None:
        table += f"\n  bits per byte     {score.bits_per_byte:10.4f}   over {score.bytes:,.0f} bytes"
    show({**about, **score.summary()}, table, as_json)

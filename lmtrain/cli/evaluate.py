"""`lmtrain eval`: its options, and what is made of them."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lmtrain.cli.options import (
    DataDir,
    Device,
    Json,
    Precision,
    Quiet,
    Run,
    TextColumn,
    Weights,
    Which,
    WhichDevice,
    WhichWeights,
    as_overrides,
)
from lmtrain.cli.output import floor, note, show
from lmtrain.errors import LmtrainError, UsageError

if TYPE_CHECKING:
    from lmtrain.config.schema import Config
    from lmtrain.data.tokens import Split, TokenStore
    from lmtrain.evaluation.perplexity import Score
    from lmtrain.model.trained import Trained


def evaluate(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="eval.FIELD=VALUE", help="Fields of the sections eval and data to set."),
    ] = None,
    run: Run = None,
    split: Annotated[str | None, typer.Option(help="train, valid or test. [default: valid]")] = None,
    text: Annotated[
        Path | None, typer.Option(help="A file of text to score in place of a split, by the run's own tokenizer.")
    ] = None,
    checkpoint: Which = None,
    weights: WhichWeights = Weights.auto,
    stride: Annotated[int | None, typer.Option(min=1, help="Tokens scored per window; less = more context.")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Windows per pass; changes the speed alone.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Score only so many tokens, the first ones.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Divides the logits of the vocabulary.")] = None,
    cache: Annotated[bool, typer.Option("--cache", help="Mix in a cache of the text's last words.")] = False,
    dynamic: Annotated[bool, typer.Option("--dynamic", help="Learn from each stride after it is scored.")] = False,
    text_column: TextColumn = None,
    data_dir: DataDir = None,
    device: WhichDevice = Device.auto,
    precision: Annotated[
        Precision | None,
        typer.Option(help="Arithmetic; int8, for a CPU, as `generate` has it. [default: the run's own]"),
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure the perplexity of a trained model."""
    from lmtrain.system.allocator import retain_heap

    retain_heap()
    from lmtrain.config.loader import environment_of
    from lmtrain.evaluation.adaptive import settings_used
    from lmtrain.model.trained import open_trained, ready_to_generate
    from lmtrain.system.device import choose_precision
    from lmtrain.system.memory import enough_memory

    if text is not None and split is not None:
        raise UsageError("--split and --text both say what is scored: give one of them")
    _check_overrides(overrides or [])
    trained = open_trained(run, checkpoint, weights.value, device.value, note)
    if precision is Precision.int8:
        trained = ready_to_generate(trained, "int8")
    given = as_overrides({"eval.temperature": temperature, "eval.stride": stride, "eval.batch_size": batch_size})
    given += as_overrides({"data.dir": data_dir} | ({"data.text_column": text_column} if text is None else {}))
    config = _settings(trained, overrides or [], given)
    scoring: dict[str, Any] = {
        "given": {override.partition("=")[0].strip() for override in [*(overrides or []), *given]}
        | ({"data.dir"} if environment_of("data.dir") else set()),
        "needs_train": dynamic and config.eval.dynamic_rule == "rms",
        "progress": not quiet,
    }
    if text is not None:
        name = str(text)
        scored = _text(trained, config, text, text_column, **scoring)
    else:
        name = split or "valid"
        scored = _split(trained, config, name, **scoring)
    arithmetic = choose_precision(precision.value if precision else config.train.precision, trained.device)
    with enough_memory("lower --batch-size or, with --cache, eval.cache_window"):
        score = _score(
            trained, config, scored, arithmetic, limit=limit, cache=cache, dynamic=dynamic, hidden=quiet or None
        )
    used = settings_used(config.eval, dynamic=dynamic, cache=cache)
    about = {
        "run": str(trained.run_dir),
        "step": trained.step,
        "weights": trained.weights,
        **({"text": name} if text is not None else {"split": name}),
        "precision": arithmetic,
        **used,
    }
    named = "".join(
        f", {key.replace('_', ' ')} {value}" for key, value in used.items() if (key, value) != ("temperature", 1.0)
    )
    remarks = f"{scored.floor}{score.remark}"
    table = (
        f"{trained.run_dir} step {trained.step:,} ({trained.weights} weights, {arithmetic}) on {name}: "
        f"context {score.context}, stride {score.stride}{named}\n"
        f"  word perplexity   {score.word_perplexity:10.3f}   over {score.words:,.0f} words{remarks}\n"
        f"  token perplexity  {score.token_perplexity:10.3f}   over {score.tokens:,} tokens"
    )
    if score.bits_per_byte is not None:
        table += f"\n  bits per byte     {score.bits_per_byte:10.4f}   over {score.bytes:,.0f} bytes"
    show({**about, **score.summary()}, table, as_json)


@dataclass(frozen=True)
class _Scored:
    """What is scored, the training split where gradients are measured on it, and the lowest that is possible."""

    part: "Split"
    train: "Split | None"
    floor: str = ""


def _split(
    trained: "Trained", config: "Config", name: str, *, given: set[str], needs_train: bool, progress: bool
) -> _Scored:
    """A split of the run's corpus."""
    store = _store(trained, config, given, progress)
    return _Scored(store.split(name), store.split("train") if needs_train else None, floor(store, name))


def _text(
    trained: "Trained",
    config: "Config",
    path: Path,
    text_column: str | None,
    *,
    given: set[str],
    needs_train: bool,
    progress: bool,
) -> _Scored:
    """A file of text; the run's corpus is not needed but for its gradients."""
    from lmtrain.data.text import text_split

    part = text_split(path, trained.tokenizer, text_column or config.data.text_column, progress=progress)
    return _Scored(part, _store(trained, config, given, progress).split("train") if needs_train else None)


def _store(trained: "Trained", config: "Config", given: set[str], progress: bool) -> "TokenStore":
    """The token store that the run was trained on.

    It is recognized by its hash, whatever has become of its source. A missing one is made again where the user has
    said from what (`given` has the fields that were set) or the corpus is a known one, and not from a path or a hub id
    that only the run names: the run may come from a stranger.
    """
    from lmtrain.config.loader import shown
    from lmtrain.data.corpus import each, is_known
    from lmtrain.data.prepare import prepare_store
    from lmtrain.data.tokens import find_store
    from lmtrain.storage.checkpoint import TOKENIZER

    wanted, weights = trained.info.get("tokens"), [source.weight for source in config.data.sources or ()] or None
    may_make = not given.isdisjoint({"data.source", "data.sources"})
    if isinstance(wanted, str) and not may_make:
        for folder in (config.data.dir, config.data.dir if "data.dir" in given else trained.config.data.dir):
            if (found := find_store(folder, wanted, weights)) is not None:
                return found
    if not may_make and not is_known(config.data):
        sources = ", ".join(shown(data.source) for data in each(config.data))
        raise LmtrainError(
            f"the tokens that {trained.run_dir} was trained on are not in {config.data.dir}: say where they are with "
            f"data.dir=FOLDER, or what to make them from with data.source=... (the run says {sources}); --text scores "
            "any file as it is"
        )
    if config.tokenizer.file is not None:  # which need not be there any more, and the run has its own copy
        own = config.tokenizer.model_copy(update={"file": trained.run_dir / TOKENIZER})
        config = config.model_copy(update={"tokenizer": own})
    store = prepare_store(config, note=note, progress=progress)
    if store.sha256 != wanted:
        raise LmtrainError(
            f"{store.folder} is not what {trained.run_dir} was trained on: its corpus has changed, or is another one, "
            "and what looks held out may have been learned; --text scores any file as it is, --data-dir names the "
            "folder of the run's own token store, and data.source=... its own text"
        )
    return store


def _check_overrides(overrides: list[str]) -> None:
    """Refuse what is no field of the evaluation or of where the corpus lies."""
    from lmtrain.config.loader import shown

    for override in overrides:
        if not override.startswith(("eval.", "data.")):
            hint = "" if "=" in override else "; a run is named by --run"
            raise UsageError(
                f"{shown(override)}: eval takes eval.field=value and data.field=value alone, the rest being what the "
                f"run was made with{hint}"
            )


def _settings(trained: "Trained", overrides: list[str], options: list[str]) -> "Config":
    """The run's configuration with the evaluation that was asked for, and not its own data folder."""
    from lmtrain.config.loader import change, environment_of
    from lmtrain.config.schema import DataConfig

    data = trained.config.data.model_copy(update={"dir": DataConfig().dir})
    own = trained.config.model_copy(update={"data": data})
    return change(own, [*overrides, *options], environment_of("eval", "data.dir"))


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
    """Score the text, a bar on the terminal; with `dynamic`, gradients are measured on the training split first."""
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
            precision="fp32" if precision == "int8" else precision,  # of what is no product of matrices
            limit=limit,
            advance=bar.update,
        )
    if dynamic and not math.isfinite(score.nats):
        raise LmtrainError("dynamic evaluation diverged: lower eval.dynamic_lr")
    return score

"""`lmtrain eval`: finds what is to be scored, scores it, and prints the perplexity."""

import functools
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

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
    from torch import Tensor

    from lmtrain.config.schema import Config
    from lmtrain.data.tokens import Split, TokenStore
    from lmtrain.evaluation.perplexity import Score
    from lmtrain.model.trained import Trained


def evaluate(
    overrides: Overrides = None,
    config: ConfigFile = None,
    run: Run = None,
    split: Annotated[
        Literal["train", "valid", "test"] | None, typer.Option(help="The split to score. [default: valid]")
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Score a file of text instead of a split, with the run's own tokenizer."),
    ] = None,
    checkpoint: Checkpoint = None,
    weights: WeightsChoice = Weights.auto,
    stride: Annotated[
        int | None, typer.Option(metavar="N", help="Tokens scored per window; fewer = more context.")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(metavar="N", help="Windows per forward pass; changes speed and rounding only.")
    ] = None,
    limit: Annotated[int | None, typer.Option(metavar="N", min=1, help="Score only the first N tokens.")] = None,
    temperature: Annotated[
        float | None, typer.Option(metavar="T", help="Divides the logits of the vocabulary.")
    ] = None,
    cache: Annotated[bool, typer.Option("--cache", help="Mix in a cache of the latest words of the text.")] = False,
    dynamic: Annotated[
        bool, typer.Option("--dynamic", help="Dynamic evaluation: update the weights after scoring each segment.")
    ] = False,
    text_column: TextColumn = None,
    data_dir: DataDir = None,
    device: DeviceChoice = Device.auto,
    precision: Annotated[
        Precision | None, typer.Option(help="Arithmetic; int8: CPU only. [default: that of the run]")
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure the perplexity of a trained model.

    A configuration names the run and sets fields of eval and data; everything else is what the run was trained with.
    """
    from lmtrain.system.allocator import retain_heap

    retain_heap()
    from lmtrain.data.prepare import text_split
    from lmtrain.evaluation.adaptive import settings_used
    from lmtrain.evaluation.run_store import find_run_store
    from lmtrain.model.trained import open_trained, ready_to_generate
    from lmtrain.system.device import choose_precision
    from lmtrain.system.memory import enough_memory

    if text is not None and split is not None:
        raise UsageError("--split and --text both say what is scored: give one of them")
    options = {"eval.temperature": temperature, "eval.stride": stride, "eval.batch_size": batch_size}
    source = {"data.dir": data_dir, "data.text_column": None if text is not None else text_column}
    overrides = [*_checked(overrides or []), *as_overrides(options), *as_overrides(source)]
    run_dir = run_folder(run, config, overrides)
    trained = open_trained(run_dir, checkpoint, weights.value, device.value, note)
    if precision is Precision.int8:
        trained = ready_to_generate(trained, "int8")
    settings, given = _settings(trained, config, overrides)
    arithmetic = choose_precision(precision.value if precision else settings.train.precision, trained.device)

    @functools.cache
    def corpus() -> "TokenStore":
        return find_run_store(trained, settings, given, note=note, progress=not quiet)

    if text is not None:
        kind, name, lowest = "text", str(text), None
        part = text_split(text, trained.tokenizer, text_column or settings.data.text_column, progress=not quiet)
    else:
        kind, name = "split", split or "valid"
        part, lowest = corpus().split(name), floor(corpus(), name)
    measured_on = corpus() if dynamic and settings.eval.dynamic_rule == "rms" else None
    with enough_memory("lower --batch-size or, with --cache, eval.cache_window"):
        score = _score(
            trained, settings, part, measured_on, arithmetic, limit=limit, cache=cache, dynamic=dynamic, quiet=quiet
        )
    used = settings_used(settings.eval, dynamic=dynamic, cache=cache)
    about = {"run": str(run_dir), "step": trained.step, "weights": trained.weights, kind: name, "precision": arithmetic}
    named = [f", {key.replace('_', ' ')} {value}" for key, value in used.items() if (key, value) != ("temperature", 1)]
    lines = [
        f"{run_dir} step {trained.step:,} ({trained.weights} weights, {arithmetic}) on {name}: "
        f"context {score.context}, stride {score.stride}{''.join(named)}",
        *(f"  {line}" for line in score.lines(trained.tokenizer.kind, lowest)),
    ]
    show({**about, **used, **score.summary()}, "\n".join(lines), as_json)


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


def _score(
    trained: "Trained",
    config: "Config",
    part: "Split",
    measured_on: "TokenStore | None",
    precision: str,
    *,
    limit: int | None,
    cache: bool,
    dynamic: bool,
    quiet: bool,
) -> "Score":
    """Score `part`, with a progress bar, after gradients were measured on the training split of a store."""
    from tqdm import tqdm

    from lmtrain.evaluation.adaptive import adapted
    from lmtrain.evaluation.gradient_rms import kept_gradient_rms, rms_tokens
    from lmtrain.evaluation.perplexity import default_stride, evaluate

    mode, context, hidden = config.model.mode, config.model.context, quiet or None
    stride = config.eval.stride or default_stride(mode, context)

    def gradient_rms(store: "TokenStore") -> "list[Tensor]":
        train = store.split("train")
        total = rms_tokens(trained.model, train)
        with tqdm(
            desc="gradients", total=total, unit="tok", unit_scale=True, disable=hidden, leave=False, delay=0.5
        ) as bar:
            return kept_gradient_rms(
                trained.run_dir,
                trained.model,
                train,
                store.sha256,
                device=trained.device,
                precision=precision,
                advance=bar.update,
            )

    forward = adapted(
        trained.model,
        config.eval,
        None if measured_on is None else functools.partial(gradient_rms, measured_on),
        dynamic=dynamic,
        cache=cache,
        segment=stride,
        precision=precision,
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

"""`lmtrain eval`: find the run and the tokens, score them, and print the perplexity."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from lmtrain.cli.options import (
    Checkpoint,
    DeviceChoice,
    Json,
    Precision,
    Quiet,
    RunConfigFile,
    Runs,
    WeightsChoice,
    run_folders,
)
from lmtrain.cli.output import show
from lmtrain.errors import UsageError
from lmtrain.system.messages import escaped

if TYPE_CHECKING:
    from lmtrain.api.run import Run


def evaluate(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="SECTION.FIELD=VALUE", help="Fields of eval and data, run.name and run.dir."),
    ] = None,
    config: RunConfigFile = None,
    run: Runs = None,
    split: Annotated[
        Literal["train", "valid", "test"] | None, typer.Option(help="The split to score. [default: valid]")
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Score a file of text instead of a split, with the run's own tokenizer."),
    ] = None,
    checkpoint: Checkpoint = None,
    weights: WeightsChoice = "auto",
    limit: Annotated[int | None, typer.Option(metavar="N", min=1, help="Score only the first N tokens.")] = None,
    cache: Annotated[
        bool, typer.Option("--cache", help="Mix in a continuous cache of the text's recent tokens.")
    ] = False,
    dynamic: Annotated[
        bool, typer.Option("--dynamic", help="Dynamic evaluation: update the weights after scoring each segment.")
    ] = False,
    device: DeviceChoice = "auto",
    precision: Annotated[Precision | None, typer.Option(help="Arithmetic. [default: train.precision]")] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure the perplexity of a trained model.

    A configuration file also sets data.dir and the fields of eval, such as eval.stride. Everything else is what the run
    was trained with.
    """
    from lmtrain.api.run import load
    from lmtrain.config.loader import overrides_of
    from lmtrain.config.mistakes import shown
    from lmtrain.evaluation.adaptive import settings_used
    from lmtrain.system.machine import explain_out_of_memory

    if text is not None and split is not None:
        raise UsageError("give --split or --text, not both")
    overrides = overrides or []
    if words := [argument for argument in overrides if "=" not in argument]:
        raise UsageError(f"{shown(words[0])} is not an override: --text FILE scores a file, and --run RUN names a run")
    trained = load(
        run_folders("eval", run, config, overrides),
        checkpoint=checkpoint,
        weights=weights,
        device=device,
        precision=precision,
    )
    trained = _with_settings(trained, config, overrides)
    # A source that only the run names is not read.
    source = trained.config.data.source if overrides_of(overrides, "data.source") else None
    scored_as, name = ("split", split or "valid") if text is None else ("text", escaped(str(text)))
    how: dict[str, Any] = {"limit": limit, "cache": cache, "dynamic": dynamic}
    remedy = "leave --dynamic out, or use --device cpu" if dynamic else "lower eval.batch_size"
    with explain_out_of_memory(f"{remedy} or, with --cache, lower eval.cache_window"):
        if text is None:
            score = trained.evaluate(name, source=source, **how)
        else:
            score = trained.score(text, store=trained.token_store(source) if dynamic else None, **how)
    used = settings_used(trained.config.eval, dynamic=dynamic, cache=cache)
    named = [f", {key.replace('_', ' ')} {value}" for key, value in used.items() if (key, value) != ("temperature", 1)]
    arithmetic = trained.score_precision
    runs = [f"{one.run_dir} step {one.info['step']:,} ({one.weights} weights, {arithmetic})" for one in trained.members]
    heading = f"{' + '.join(runs)} on {name}: context {score.context}, stride {score.stride}{''.join(named)}"
    show(
        {**trained.about(), scored_as: name, "precision": arithmetic, **used, **score.summary()},
        "\n".join([heading, *(f"  {line}" for line in score.lines())]),
        as_json,
    )


def _with_settings(run: "Run", path: Path | None, overrides: list[str]) -> "Run":
    """Return the run with the user's settings. What takes precedence comes first: the overrides, the environment, the
    section eval and data.dir of the file at `path`; the column of a text only of the first two."""
    from lmtrain.config.loader import environment_of, load

    file, sections = load(path, environment={}), run.config.model_dump(mode="json")
    sections["eval"] |= file.eval.model_dump(mode="json", exclude_unset=True)
    sections["data"]["dir"] = file.data.dir
    return replace(run, config=load(sections, overrides, environment_of("eval", "data.dir", "data.text_column")))

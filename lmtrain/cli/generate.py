"""`lmtrain generate`: check the options and turn them into those of the library."""

import secrets
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from lmtrain.cli.options import (
    Checkpoint,
    DeviceChoice,
    Precision,
    Quiet,
    RunConfigFile,
    Runs,
    WeightsChoice,
    arguments,
    run_folders,
)
from lmtrain.errors import UsageError
from lmtrain.system.messages import log

LENGTH, SAMPLING, SEARCH = "Length and end", "Sampling (default)", "Search, in place of sampling"
SCORES, OUTPUT = "Scores and ranking", "Input and output"


def _option(group: str, text: str, *names: str, **limits: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=group, **limits)


def generate(
    context: typer.Context,
    prompt: Annotated[
        str | None,
        typer.Argument(
            metavar="PROMPT",
            help="The text to continue, in quotes. Without one, standard input is the prompt; on a terminal you are "
            "asked for prompts one after another.",
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="RUN.FIELD=VALUE", help="run.name=NAME or run.dir=FOLDER.")
    ] = None,
    config: RunConfigFile = None,
    run: Runs = None,
    checkpoint: Checkpoint = None,
    weights: WeightsChoice = "auto",
    device: DeviceChoice = "auto",
    precision: Annotated[
        Precision,
        typer.Option(
            help="Format of the weight matrices. auto: bf16 if the hardware computes in it, else fp16 on a GPU and "
            "fp32 on a CPU."
        ),
    ] = "auto",
    max_tokens: Annotated[
        int, _option(LENGTH, "Maximum number of tokens to generate.", "--max-tokens", "-n", metavar="N")
    ] = 100,
    stop: Annotated[
        Literal["none", "line", "sentence"],
        _option(LENGTH, "End at the end of the line or the sentence."),
    ] = "none",
    stop_string: Annotated[
        list[str] | None, _option(LENGTH, "End before this text. Repeat it for several.", metavar="TEXT")
    ] = None,
    temperature: Annotated[
        float, _option(SAMPLING, "Below 1: more conservative, above 1: more random, 0: greedy.", metavar="T")
    ] = 0.8,
    top_k: Annotated[int, _option(SAMPLING, "Sample from the K most likely tokens (0: all).", metavar="K")] = 0,
    top_p: Annotated[
        float, _option(SAMPLING, "Nucleus sampling: the fewest tokens with total probability P (1: all).", metavar="P")
    ] = 0.95,
    seed: Annotated[
        int | None,
        _option(SAMPLING, "Random seed; the same seed gives the same text. [default: random, printed]", metavar="N"),
    ] = None,
    samples: Annotated[int, _option(SAMPLING, "Texts to sample for each prompt.", metavar="N", max=4096)] = 1,
    greedy: Annotated[bool, _option(SEARCH, "Take the most likely token each time.", "--greedy")] = False,
    beams: Annotated[int, _option(SEARCH, "Beam search of this width.", "--beams", "-b", metavar="N", max=1024)] = 1,
    repetition_penalty: Annotated[
        float,
        _option(SCORES, "Above 1: penalize tokens already in the prompt or the text; not for beams.", metavar="X"),
    ] = 1.0,
    results: Annotated[
        int | None, _option(SCORES, "Print only the N best texts. [default: all samples, the best beam]", metavar="N")
    ] = None,
    length_penalty: Annotated[
        float, _option(SCORES, "Rank texts by log-probability / length^A (0: sum, 1: mean).", metavar="A")
    ] = 0.0,
    prompts: Annotated[
        Path | None,
        _option(
            OUTPUT,
            "Many prompts: one per line, or the column `prompt` of a .jsonl or .csv file (-: standard input).",
            metavar="FILE",
        ),
    ] = None,
    batch_size: Annotated[int, _option(OUTPUT, "Prompts per batch.", metavar="N", min=1, max=65536)] = 16,
    as_json: Annotated[bool, _option(OUTPUT, "Print one line of JSON for each prompt.", "--json")] = False,
    quiet: Quiet = False,
) -> None:
    """Continue prompts by sampling, greedily, or by beam search.

    On a terminal a single text is streamed.
    """
    from lmtrain.config.loader import is_override
    from lmtrain.config.mistakes import shown

    overrides = arguments(prompt, overrides)
    prompt = None if not overrides or is_override(overrides[0]) else overrides.pop(0)
    if words := [argument for argument in overrides if "=" not in argument]:
        quoted = " ".join(filter(None, [prompt, *words]))
        raise UsageError(
            f"put the prompt before the overrides, and quote it if it has several words: lmtrain generate {quoted!r}"
        )
    searches = [name for name, is_set in (("--greedy", greedy), ("--beams", beams > 1)) if is_set]
    if searches and (others := searches[1:] + _sampling_options(context)):
        raise UsageError(f"{searches[0]} can't be combined with {', '.join(others)}: leave out one or the other")
    if prompt is not None and prompts is not None:
        raise UsageError("give a prompt or --prompts, not both")

    from pydantic import ValidationError

    from lmtrain.api.run import load
    from lmtrain.cli.prompting import complete_prompts, typed_prompts
    from lmtrain.generation.options import Options
    from lmtrain.generation.prompts import read_all, read_prompts

    if searches:
        temperature, top_p = 0.0, 1.0
    has_random_seed = seed is None and temperature > 0
    seed = secrets.randbelow(1_000_000) if seed is None else seed
    try:
        options = Options(
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            repetition_penalty=repetition_penalty,
            samples=samples,
            beams=beams,
            results=results,
            length_penalty=length_penalty,
            seed=seed,
            stop=stop,
            stop_strings=tuple(stop_string or ()),
        )
    except ValidationError as error:
        first = error.errors()[0]
        field = f"{first['loc'][0]}={shown(first['input'])}: " if first["loc"] else ""
        raise UsageError(field + first["msg"].removeprefix("Value error, ")) from None
    folders = run_folders("generate", run, config, overrides)
    trained = load(folders, checkpoint=checkpoint, weights=weights, device=device, precision=precision)
    if has_random_seed:
        log.info(f"{trained.folder}, step {trained.step:,}, seed {seed}: --seed {seed} repeats this output")
    if prompts is not None:
        complete_prompts(trained, options, read_prompts(prompts), batch_size, as_json)
    elif prompt is None and sys.stdin.isatty():
        complete_prompts(trained, options, typed_prompts(), 1, as_json)
    else:
        complete_prompts(trained, options, iter([read_all() if prompt is None else prompt]), 1, as_json)


def _sampling_options(context: typer.Context) -> list[str]:
    """Return the sampling options that are on the command line."""
    options = [option for option in context.command.params if getattr(option, "rich_help_panel", None) == SAMPLING]
    sources = {option.opts[0]: context.get_parameter_source(option.name or "") for option in options}
    return [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]

"""`lmtrain generate`: check the options and turn them into those of the library."""

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
        float | None,
        _option(SAMPLING, "Below 1: more conservative, above 1: more random, 0: greedy. [default: 0.8]", metavar="T"),
    ] = None,
    top_k: Annotated[
        int | None, _option(SAMPLING, "Sample from the K most likely tokens. [default: all]", metavar="K")
    ] = None,
    top_p: Annotated[
        float | None,
        _option(SAMPLING, "Sample from the top tokens of total probability P. [default: 0.95]", metavar="P"),
    ] = None,
    seed: Annotated[
        int | None,
        _option(SAMPLING, "Random seed; the same seed gives the same text. [default: random, printed]", metavar="N"),
    ] = None,
    samples: Annotated[
        int | None, _option(SAMPLING, "Texts to sample for each prompt. [default: 1]", metavar="N", max=4096)
    ] = None,
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
    given = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed, "samples": samples}
    sampling = {name: value for name, value in given.items() if value is not None}
    searches = [name for name, is_set in (("--greedy", greedy), ("--beams", beams > 1)) if is_set]
    if searches and (others := searches[1:] + [f"--{name.replace('_', '-')}" for name in sampling]):
        raise UsageError(f"{searches[0]} can't be combined with {', '.join(others)}: leave out one or the other")
    if prompt is not None and prompts is not None:
        raise UsageError("give a prompt or --prompts, not both")

    from pydantic import ValidationError

    from lmtrain.api.run import load
    from lmtrain.cli.prompting import complete_prompts, typed_prompts
    from lmtrain.generation.options import options_with
    from lmtrain.generation.prompts import read_all, read_prompts

    if greedy:
        sampling["temperature"] = 0.0
    try:
        options = options_with(
            **sampling,
            max_tokens=max_tokens,
            repetition_penalty=repetition_penalty,
            beams=beams,
            results=results,
            length_penalty=length_penalty,
            stop=stop,
            stop_strings=tuple(stop_string or ()),
        )
    except ValidationError as error:
        first = error.errors()[0]
        field = f"{first['loc'][0]}={shown(first['input'])}: " if first["loc"] else ""
        raise UsageError(field + first["msg"].removeprefix("Value error, ")) from None
    folders = run_folders("generate", run, config, overrides)
    trained = load(folders, checkpoint=checkpoint, weights=weights, device=device, precision=precision)
    if seed is None and options.temperature:
        chosen = options.seed
        log.info(f"{trained.folder}, step {trained.step:,}, seed {chosen}: --seed {chosen} repeats this output")
    if prompts is not None:
        complete_prompts(trained, options, read_prompts(prompts), batch_size, as_json)
    elif prompt is None and sys.stdin.isatty():
        complete_prompts(trained, options, typed_prompts(), 1, as_json)
    else:
        complete_prompts(trained, options, iter([read_all() if prompt is None else prompt]), 1, as_json)

"""`lmtrain generate`: its options, checked and turned into those of the library."""

import secrets
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from lmtrain.cli.options import (
    Checkpoint,
    ConfigFile,
    DeviceChoice,
    Overrides,
    Precision,
    Runs,
    WeightsChoice,
    run_folders,
    split_arguments,
)
from lmtrain.errors import UsageError
from lmtrain.generation.options import SAMPLED, Options, StopKind
from lmtrain.system.messages import note

LENGTH, SAMPLING, SEARCH, OUTPUT = "Length and end", "Sampling, the default", "Search and choice", "Input and output"


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
    overrides: Overrides = None,
    config: ConfigFile = None,
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
    stop: Annotated[StopKind, _option(LENGTH, "End at the end of the line, the sentence or the document.")] = "none",
    stop_string: Annotated[
        list[str] | None, _option(LENGTH, "End before this text; may be repeated.", metavar="TEXT")
    ] = None,
    temperature: Annotated[
        float, _option(SAMPLING, "<1 more conservative, >1 more random; 0 = greedy.", metavar="T")
    ] = SAMPLED.temperature,
    top_k: Annotated[int, _option(SAMPLING, "Sample from the K most likely tokens; 0 = all.", metavar="K")] = 0,
    top_p: Annotated[
        float, _option(SAMPLING, "Sample from the fewest tokens with total probability P.", metavar="P")
    ] = SAMPLED.top_p,
    min_p: Annotated[
        float, _option(SAMPLING, "Sample from tokens with at least P times the highest probability.", metavar="P")
    ] = 0.0,
    seed: Annotated[
        int | None,
        _option(SAMPLING, "Random seed; the same seed gives the same text. [default: random, printed]", metavar="N"),
    ] = None,
    samples: Annotated[int, _option(SAMPLING, "Texts to sample for each prompt.", metavar="N", max=4096)] = 1,
    greedy: Annotated[
        bool, _option(SEARCH, "Take the most likely token each time, in place of sampling.", "--greedy")
    ] = False,
    beams: Annotated[
        int, _option(SEARCH, "Beam search of this width, in place of sampling.", "--beams", "-b", metavar="N", max=1024)
    ] = 1,
    repetition_penalty: Annotated[
        float, _option(SEARCH, ">1: penalize tokens already in the prompt or output; not for beams.", metavar="X")
    ] = 1.0,
    results: Annotated[
        int | None, _option(SEARCH, "Print only the N best texts. [default: all samples, the best beam]", metavar="N")
    ] = None,
    length_penalty: Annotated[
        float, _option(SEARCH, "A in score = log-probability / length^A: 0 = the sum, 1 = the mean.", metavar="A")
    ] = 0.0,
    prompts: Annotated[
        Path | None,
        _option(
            OUTPUT,
            'Many prompts: one per line, or JSON lines {"prompt": "text"} in a .jsonl file; - = standard input.',
            metavar="FILE",
        ),
    ] = None,
    batch_size: Annotated[int, _option(OUTPUT, "Prompts per batch.", metavar="N", min=1)] = 16,
    as_json: Annotated[bool, _option(OUTPUT, "Print one line of JSON for each prompt.", "--json")] = False,
    raw: Annotated[
        bool,
        _option(OUTPUT, "No detokenization: print and read words as the corpus has them (` @-@ `, ` , `).", "--raw"),
    ] = False,
) -> None:
    """Continue prompts by sampling, greedily, or by beam search.

    A single text is printed word by word on a terminal. A configuration names the run.
    """
    prompt, overrides = split_arguments(prompt, overrides)
    if words := [text for text in overrides if "=" not in text]:
        quoted = " ".join(filter(None, [prompt, *words]))
        raise UsageError(f"a prompt of several words needs quotes: lmtrain generate {quoted!r}")
    chosen = [name for name, given in (("--greedy", greedy), ("--beams", beams > 1)) if given]
    if chosen and (others := chosen[1:] + _given(context, SAMPLING)):
        raise UsageError(f"{chosen[0]} excludes {', '.join(others)}: leave out one or the other")
    if prompt is not None and prompts is not None:
        raise UsageError("a prompt and --prompts exclude each other: leave out one of them")
    asks = prompt is None and prompts is None and sys.stdin.isatty()
    if asks and as_json:
        raise UsageError("--json needs a prompt: give one as an argument")

    from lmtrain.api.run import load
    from lmtrain.cli.answers import answer, answer_all, converse
    from lmtrain.generation.prompts import read_all, read_prompts

    if chosen:
        temperature, top_p = 0.0, 1.0
    has_random_seed = seed is None and temperature > 0
    seed = secrets.randbelow(1_000_000) if seed is None else seed
    try:
        options = Options(
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            samples=samples,
            beams=beams,
            results=results,
            length_penalty=length_penalty,
            seed=seed,
            stop=stop,
            stop_strings=tuple(stop_string or ()),
            raw=raw,
        )
    except ValueError as error:
        raise UsageError(str(error)) from None
    rule = "generate accepts only run.name=NAME and run.dir=FOLDER: use the options (-h)"
    folders = run_folders(run, config, overrides, "run.name=", "run.dir=", rule=rule)
    trained = load(folders, checkpoint=checkpoint, weights=weights, device=device, precision=precision)
    if has_random_seed:
        note(f"{trained.folder}, step {trained.step:,}, seed {seed}: --seed {seed} repeats this output")
    if prompts is not None:
        answer_all(trained, options, read_prompts(prompts), batch_size, as_json)
    elif asks:
        converse(trained, options)
    else:
        answer(trained, options, read_all(sys.stdin.buffer) if prompt is None else prompt, as_json)


def _given(context: typer.Context, group: str) -> list[str]:
    """The options of a group that are on the command line."""
    options = [option for option in context.command.params if getattr(option, "rich_help_panel", None) == group]
    sources = {option.opts[0]: context.get_parameter_source(option.name or "") for option in options}
    return [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]

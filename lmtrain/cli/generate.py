"""`lmtrain generate`: its options, checked and turned into those of the library."""

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from lmtrain.cli.options import (
    Checkpoint,
    ConfigFile,
    Device,
    DeviceChoice,
    Overrides,
    Precision,
    Run,
    Weights,
    WeightsChoice,
    run_folder,
    split_arguments,
)
from lmtrain.cli.output import note
from lmtrain.errors import UsageError

LENGTH, SAMPLING, SEARCH, OUTPUT = (
    "Length and end",
    "Sampling: any of these but the repetition penalty samples",
    "Beam search and choice",
    "Input and output",
)


class Stop(StrEnum):
    """Where a generated text ends before it has its full length."""

    none = "none"
    line = "line"
    sentence = "sentence"
    document = "document"


class GroupedCommand(TyperCommand):
    """A command whose help lists its options in groups."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments and options, group after group, in the order of their first members."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            if record := parameter.get_help_record(ctx):
                argument = parameter.param_type_name == "argument"
                name = "Arguments" if argument else getattr(parameter, "rich_help_panel", None) or "Model"
                groups.setdefault(name, []).append(record)
        for name, records in groups.items():
            with formatter.section(name):
                formatter.write_dl(records)


def _option(group: str, text: str, *names: str, **limits: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=group, **limits)


def generate(
    prompt: Annotated[
        str | None,
        typer.Argument(
            help="The text to continue. Without one, standard input is the prompt; on a terminal you are asked for one "
            "after the other (Ctrl-C ends a text, Ctrl-D exits)."
        ),
    ] = None,
    overrides: Overrides = None,
    config: ConfigFile = None,
    run: Run = None,
    checkpoint: Checkpoint = None,
    weights: WeightsChoice = Weights.auto,
    device: DeviceChoice = Device.auto,
    precision: Annotated[
        Precision,
        typer.Option(
            help="How matrices are stored: auto is bf16 if the machine computes in it, else fp16 on a GPU and fp32 on "
            "a CPU; int8 is for a CPU."
        ),
    ] = Precision.auto,
    max_tokens: Annotated[
        int, _option(LENGTH, "Largest number of tokens to generate.", "--max-tokens", "-n", min=1)
    ] = 100,
    stop: Annotated[Stop, _option(LENGTH, "End with the line, the sentence or the document.")] = Stop.none,
    stop_string: Annotated[
        list[str] | None, _option(LENGTH, "End before this text; may be repeated.", "--stop-string")
    ] = None,
    sample: Annotated[bool, _option(SAMPLING, "Sample from the model's own probabilities.", "--sample")] = False,
    temperature: Annotated[
        float | None, _option(SAMPLING, "Below 1 safer, above 1 more diverse; 0 is greedy. [default: 1]")
    ] = None,
    top_k: Annotated[int | None, _option(SAMPLING, "Sample among the K most likely tokens; 0 = all.")] = None,
    top_p: Annotated[
        float | None, _option(SAMPLING, "Sample among the most likely tokens that together have probability P.")
    ] = None,
    min_p: Annotated[
        float | None, _option(SAMPLING, "Sample among tokens with at least P times the largest probability.")
    ] = None,
    seed: Annotated[int | None, _option(SAMPLING, "The same seed gives the same text. [default: 0]")] = None,
    samples: Annotated[
        int | None,
        _option(SAMPLING, "Texts to sample for each prompt; the best by score are printed.", min=1, max=4096),
    ] = None,
    repetition_penalty: Annotated[float, _option(SAMPLING, "Above 1: tokens that occurred before become rarer.")] = 1.0,
    beams: Annotated[int, _option(SEARCH, "Beam width; 1 = no beam search.", "--beams", "-b", min=1, max=1024)] = 1,
    results: Annotated[
        int,
        _option(
            SEARCH,
            r"Texts to print, best first. Of several, each is one line: its score, a tab, and the text with \n, \r, \t "
            r"and \\ for line ends, tabs and backslashes.",
        ),
    ] = 1,
    length_penalty: Annotated[
        float, _option(SEARCH, "a in score = sum of log p / length^a; 0 = the sum itself, 1 = the mean.")
    ] = 0.0,
    prompts: Annotated[
        Path | None,
        _option(OUTPUT, 'Many prompts: one a line, or JSON lines {"prompt": ...} in a .jsonl file; - = stdin.'),
    ] = None,
    batch_size: Annotated[int, _option(OUTPUT, "Prompts per batch.", min=1)] = 16,
    as_json: Annotated[bool, _option(OUTPUT, "Print one line of JSON for each prompt.", "--json")] = False,
    raw: Annotated[
        bool,
        _option(
            OUTPUT, "Print a word-level text as the corpus has it: ` @-@ `, ` , `; and read the prompt so.", "--raw"
        ),
    ] = False,
    show_attention: Annotated[
        Path | None,
        _option(OUTPUT, "Draw the pool's attention weights for each word of the (best) text.", metavar="FILE.png"),
    ] = None,
) -> None:
    """Continue prompts: greedily, by sampling, or by beam search.

    Greedy is the default. A single text is printed word by word on a terminal. A configuration names the run.
    """
    prompt, overrides = split_arguments(prompt, overrides)
    _check_overrides(overrides)
    if prompt is not None and prompts is not None:
        raise UsageError("a prompt and --prompts exclude each other: leave out one of them")
    if show_attention is not None and (prompts is not None or show_attention.suffix.lower() != ".png"):
        raise UsageError("--show-attention draws one text into one picture: give one prompt, and a name FILE.png")
    asks = prompt is None and prompts is None and sys.stdin.isatty()
    if asks and (as_json or show_attention is not None):
        raise UsageError("--json and --show-attention need a prompt: give one as an argument")

    from lmtrain.cli.answers import Output, answer, answer_all, converse
    from lmtrain.generation.options import Options
    from lmtrain.generation.prompts import read_all, read_prompts
    from lmtrain.generation.sampling import Sampling
    from lmtrain.model.trained import open_trained, ready_to_generate

    sampling = sample or any(value is not None for value in (temperature, top_k, top_p, min_p, seed, samples))
    try:
        options = Options(
            max_tokens=max_tokens,
            sampling=Sampling(
                temperature=(1.0 if temperature is None else temperature) if sampling else 0.0,
                top_k=top_k or 0,
                top_p=1.0 if top_p is None else top_p,
                min_p=min_p or 0.0,
                repetition_penalty=repetition_penalty,
            ),
            samples=1 if samples is None else samples,
            beams=beams,
            results=results,
            length_penalty=length_penalty,
            seed=seed or 0,
            stop=stop.value,
            stop_strings=tuple(stop_string or ()),
            raw=raw,
        )
    except ValueError as error:
        raise UsageError(str(error)) from None
    trained = open_trained(run_folder(run, config, overrides), checkpoint, weights.value, device.value, note)
    trained = ready_to_generate(trained, precision.value)
    output = Output(as_json, batch_size, show_attention)
    if prompts is not None:
        answer_all(trained, options, read_prompts(prompts), output)
    elif asks:
        converse(trained, options)
    else:
        answer(trained, options, read_all(sys.stdin.buffer) if prompt is None else prompt, output)


def _check_overrides(overrides: list[str]) -> None:
    """Raise UsageError unless all set fields of the section `run`, the only one that has an effect here."""
    from lmtrain.config.loader import shown

    for override in overrides:
        if not override.startswith("run."):
            hint = "put a prompt of several words in quotes" if "=" not in override else "use the options (-h)"
            raise UsageError(f"{shown(override)}: generate accepts only run.name=NAME and run.dir=FOLDER: {hint}")

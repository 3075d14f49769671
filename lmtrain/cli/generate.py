"""`lmtrain generate`: its options, and what is made of them."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from lmtrain.cli.options import BeamStopping, Device, Precision, Run, Stop, Weights, Which, WhichDevice, WhichWeights
from lmtrain.cli.output import note
from lmtrain.errors import UsageError

SEARCH, DRAW, BEAM, WORDS, OUTPUT = (
    "Length and end",
    "Sampling: any of these draws the text at random",
    "Beam search and choice",
    "Words",
    "Input and output",
)
BATCH = 16


class GroupedCommand(TyperCommand):
    """A command whose help lists its options under the names of their groups."""

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
            help="The text to go on from. Without one, standard input is the prompt; on a terminal you are asked for "
            "one after the other (Ctrl-C ends a text, Ctrl-D leaves)."
        ),
    ] = None,
    run: Run = None,
    checkpoint: Which = None,
    weights: WhichWeights = Weights.auto,
    device: WhichDevice = Device.auto,
    precision: Annotated[
        Precision,
        typer.Option(
            help="How the matrices are kept: auto is bf16 where the machine computes in it, else fp16 on a GPU and "
            "fp32 on a CPU; int8, for a CPU, is the quickest and the least exact."
        ),
    ] = Precision.auto,
    max_tokens: Annotated[int, _option(SEARCH, "Tokens to generate at most.", "--max-tokens", "-n", min=1)] = 100,
    min_tokens: Annotated[int, _option(SEARCH, "Tokens before a text may end.", min=0)] = 0,
    stop: Annotated[Stop, _option(SEARCH, "End with the line, the sentence or the document.")] = Stop.none,
    stop_string: Annotated[
        list[str] | None, _option(SEARCH, "End before this text; may be given many times.", "--stop-string")
    ] = None,
    draw: Annotated[bool, _option(DRAW, "Draw from the model's own probabilities.", "--sample")] = False,
    temperature: Annotated[
        float | None, _option(DRAW, "Below 1 safer, above 1 wilder; 0 takes the likeliest. [default: 1]", min=0)
    ] = None,
    top_k: Annotated[int | None, _option(DRAW, "Draw among the K likeliest tokens.", min=1)] = None,
    top_p: Annotated[
        float | None, _option(DRAW, "Draw among the likeliest tokens that together have probability P.", min=0, max=1)
    ] = None,
    min_p: Annotated[
        float | None,
        _option(DRAW, "Draw among tokens of at least P times the likeliest one's probability.", min=0, max=1),
    ] = None,
    seed: Annotated[
        int | None, _option(DRAW, "Another seed, another text; the same, the same text. [default: 0]")
    ] = None,
    samples: Annotated[
        int | None, _option(DRAW, "Texts to draw for each prompt; the best by score are printed.", min=1, max=4096)
    ] = None,
    beams: Annotated[int, _option(BEAM, "Beam width; 1 = none.", "--beams", "-b", min=1, max=1024)] = 1,
    beam_stopping: Annotated[
        BeamStopping,
        _option(BEAM, "exact: when nothing better can come; first: with enough finished texts; never: at full length."),
    ] = BeamStopping.exact,
    results: Annotated[
        int,
        _option(
            BEAM,
            r"Texts to print, best first. Of several each is one line: its score, a tab, and the text with \n, \r, \t "
            r"and \\ for line ends, tabs and backslashes.",
            min=1,
        ),
    ] = 1,
    length_penalty: Annotated[
        float, _option(BEAM, "a in score = sum of log p / length^a; 0 = the sum itself, 1 = the mean.", min=-10, max=10)
    ] = 0.0,
    repetition_penalty: Annotated[
        float, _option(WORDS, "Above 1: words that were there already become rarer; not with beams.", min=0)
    ] = 1.0,
    no_repeat_ngram: Annotated[
        int, _option(WORDS, "No N tokens in a row a second time, the prompt's included; 0 = off.", min=0)
    ] = 0,
    ban: Annotated[list[str] | None, _option(WORDS, "A word never to produce; may be given many times.")] = None,
    bias: Annotated[
        list[str] | None,
        _option(WORDS, "Add NUMBER (nats) to a word's log-probability; many times.", metavar="WORD=NUMBER"),
    ] = None,
    allow_unknown: Annotated[bool, _option(WORDS, "Let <unk> be generated.", "--allow-unk")] = False,
    prompts: Annotated[
        Path | None,
        _option(
            OUTPUT, 'Many prompts: one a line, or JSON lines {"prompt": ...} in a .jsonl file; - = standard input.'
        ),
    ] = None,
    batch_size: Annotated[int, _option(OUTPUT, "Prompts at a time; changes the speed alone.", min=1)] = BATCH,
    as_json: Annotated[bool, _option(OUTPUT, "One line of JSON for each prompt.", "--json")] = False,
    raw: Annotated[
        bool,
        _option(
            OUTPUT,
            "Leave a word-level text spaced out, as the corpus has it: ` @-@ `, ` , `; read the prompt as it is.",
            "--raw",
        ),
    ] = False,
    show_attention: Annotated[
        Path | None,
        _option(OUTPUT, "Draw what the pool looked at for each word of the (best) text.", metavar="FILE.png"),
    ] = None,
) -> None:
    """Continue prompts: greedily, by sampling, or by beam search.

    The likeliest next word is taken, unless an option below says otherwise. A text for one prompt is written while it
    is made, where it goes to a terminal.
    """
    if prompt is not None and prompts is not None:
        raise UsageError("a prompt and --prompts exclude each other: leave out one of them")
    if show_attention is not None and (prompts is not None or show_attention.suffix.lower() != ".png"):
        raise UsageError("--show-attention draws one text into one picture: give one prompt, and a name FILE.png")
    drawing = {"sample": draw or None, "temperature": temperature, "top-k": top_k, "top-p": top_p, "min-p": min_p}
    drawing |= {"seed": seed, "samples": samples}
    given = [f"--{name}" for name, value in drawing.items() if value is not None]
    _check_choice(beams, beam_stopping, samples, results, repetition_penalty, given)

    from lmtrain.cli.answers import Output, answer, answer_all, converse
    from lmtrain.generation.complete import rules_of
    from lmtrain.generation.options import Options
    from lmtrain.generation.prompts import read_all, read_prompts
    from lmtrain.generation.sampling import Sampling
    from lmtrain.generation.stops import Stops
    from lmtrain.model.trained import open_trained, ready_to_generate

    try:
        options = Options(
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            sampling=Sampling(
                temperature=(1.0 if temperature is None else temperature) if given else 0.0,
                top_k=top_k or 0,
                top_p=1.0 if top_p is None else top_p,
                min_p=min_p or 0.0,
                repetition_penalty=repetition_penalty,
            ),
            samples=samples or 1,
            beams=beams,
            stopping=beam_stopping.value,
            results=results,
            alpha=length_penalty,
            seed=seed or 0,
            no_repeat=no_repeat_ngram,
            stop=stop.value,
            stop_strings=tuple(stop_string or ()),
            allow_unknown=allow_unknown,
            ban=tuple(ban or ()),
            bias=tuple(_number(item) for item in bias or ()),
            raw=raw,
        )
    except ValueError as error:
        raise UsageError(str(error)) from None
    trained = open_trained(run, checkpoint, weights.value, device.value, note)
    trained = ready_to_generate(trained, precision.value)
    try:  # what can't be asked of this model is said at once
        rules_of(trained.tokenizer, options, Stops(trained.tokenizer, options.stop, options.stop_strings))
    except ValueError as error:
        raise UsageError(str(error)) from None
    output = Output(as_json, batch_size, show_attention)
    if prompts is not None:
        answer_all(trained, options, read_prompts(prompts), output)
    elif prompt is None and sys.stdin.isatty():
        if as_json or show_attention is not None:
            raise UsageError("--json and --show-attention need a prompt: give one as an argument")
        converse(trained, options)
    else:
        answer(trained, options, read_all(sys.stdin.buffer) if prompt is None else prompt, output)


def _check_choice(
    beams: int,
    stopping: BeamStopping,
    samples: int | None,
    results: int,
    repetition_penalty: float,
    drawing: list[str],
) -> None:
    """Refuse options that exclude each other; `drawing` are those of sampling that were given."""
    if beams > 1 and drawing:
        raise UsageError(f"--beams {beams} searches and {drawing[0]} draws: leave out one of them")
    if beams > 1 and repetition_penalty != 1:
        raise UsageError("--repetition-penalty works without --beams alone: use --no-repeat-ngram with beams")
    if beams == 1 and stopping is not BeamStopping.exact:
        raise UsageError(f"--beam-stopping {stopping.value} is for --beams above 1: raise --beams or leave it out")
    if drawing and results > (samples or 1):
        raise UsageError(f"--results {results} is more than --samples {samples or 1} can give: raise --samples")
    if not drawing and results > beams:
        raise UsageError(f"--results {results} is more than --beams {beams} can give: raise --beams")


def _number(item: str) -> tuple[str, float]:
    """A word and its number, from WORD=NUMBER; the word may hold a `=` itself."""
    word, equals, number = item.rpartition("=")
    try:
        if word and equals:
            return word, float(number)
    except ValueError:
        pass
    raise UsageError(f"--bias {item!r} is not WORD=NUMBER: write for example --bias river=2.5")

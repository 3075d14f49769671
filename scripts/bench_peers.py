"""`scripts/benchmark peers`: validation perplexity after the same minutes on the same words, on a CPU.

Every program is a process of its own with all the cores, one after another, by its own source:

python scripts/bench_peers.py SIDE        # as JSON; prints its nats over the validation split, tokens read, parameters
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from bench_training import load_source, nanogpt
from record import RESULTS, Row, lmtrain, measure_beside, train_points, write_record
from torch import Tensor, nn

from lmtrain.config.schema import Config, EvalConfig, ModelConfig
from lmtrain.data.tokens import open_store, words_and_line_ends
from lmtrain.evaluation.perplexity import Forward, evaluate
from lmtrain.system.device import autocast, cores

RECIPE, SEED = "wikitext2-cpu", 1
POINTS = 50
"""Of a curve."""
CPU = torch.device("cpu")


def peers(arguments: argparse.Namespace, folder: Path) -> None:
    """Record and draw lmtrain and of every program whose source is given."""
    recipe = arguments.recipe or RECIPE
    store = lmtrain("tokenize", "--config", recipe, *arguments.overrides)
    threads = cores()
    budget = {"store": store["folder"], "minutes": arguments.minutes, "threads": threads}
    rows: list[Row] = []

    def add(form: Row, found: Row) -> None:
        words = words_and_line_ends(store["splits"]["valid"])
        rows.append({**form, "word_perplexity": math.exp(found["nats"] / words), **found})
        print({name: value for name, value in rows[-1].items() if name != "curve"}, file=sys.stderr)

    options = [f"train.max_minutes={arguments.minutes}", f"train.threads={threads}", f"run.seed={SEED}"]
    options += ["train.device=cpu", "train.compile=true", f"run.dir={folder}"]
    ours = measure_lmtrain(["--config", recipe, *options, *arguments.overrides])
    precision = ours["precision"]
    add({"program": "lmtrain", "precision": precision}, ours)
    if arguments.nanogpt:
        # Its own configurations have no dropout for large texts, and 0.2 where a small one is read several times.
        form = {"program": "nanoGPT", "precision": precision, "compiled": True}
        form["dropout"] = 0.2 if arguments.minutes >= 30 else 0.0
        add(form, measure_beside(__file__, {**form, **budget, "source": str(arguments.nanogpt)}))
    if arguments.word_language_model:
        form = {"program": "word_language_model LSTM", "precision": "fp32", "compiled": False}
        add(form, measure_beside(__file__, {**form, **budget, "source": str(arguments.word_language_model)}))
    settings = {"recipe": recipe, "overrides": arguments.overrides, "heap": "retained"}
    metrics = {"minutes": arguments.minutes, "threads": threads, "rows": rows}
    name = f"peers-{arguments.minutes:g}-minutes"
    write_record("peers", name, metrics, seeds=[SEED], settings=settings)
    draw(rows, RESULTS / f"{name}.png")


def measure_lmtrain(options: list[str]) -> Row:
    """Train a recipe, and score the validation split."""
    costs, trained = lmtrain("train", *options, "--dry-run"), lmtrain("train", *options)
    losses = [(point["minutes"], point["loss"]) for point in train_points(trained["run"])]
    scored = lmtrain("eval", "--run", trained["run"], "--device", "cpu")
    return {
        "precision": scored["precision"],
        "compiled": costs["config"]["train"]["compile"],
        **{name: scored[name] for name in ("nats", "context", "stride")},
        "tokens": trained["step"] * costs["tokens_per_step"],
        "parameters": costs["parameters"],
        "curve": curve(losses),
    }


def curve(losses: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Minutes and training perplexity: the means of equal parts of the pairs of minutes and nats per token."""
    parts = np.array_split(np.array(losses), min(POINTS, len(losses)))
    return [(float(part[:, 0].mean()), math.exp(part[:, 1].mean())) for part in parts]


def draw(rows: list[Row], picture: Path) -> None:
    """Draw a line for each program, and a dot for its validation perplexity at the end."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for number, row in enumerate(rows):
        minutes, perplexities = zip(*row["curve"], strict=True)
        label = f"{row['program']}: {row['word_perplexity']:.1f}"
        axes.plot(minutes, perplexities, f"C{number}-", alpha=0.8)
        axes.plot(minutes[-1:], [row["word_perplexity"]], f"C{number}o", label=label, alpha=0.8)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 1.5, 2.0, 3.0, 5.0, 7.0)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    title = "Lines: the text in training. Dots: the validation split, at the end"
    axes.set(title=title, xlabel="minutes", ylabel="word perplexity", xlim=(0, None))
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    figure.savefig(picture, dpi=110)


class Program(NamedTuple):
    """A model, its training step, and its nats for windows of which `stride` tokens are scored."""

    model: nn.Module
    step: Callable[[int, float], Tensor]
    """Number of the step, share of the time after the first one that has passed -> nats per token, ()."""
    tokens: int
    """In a step."""
    score: Forward
    context: int
    stride: int
    batch_size: int


def nanogpt_program(source: Any, ids: Tensor, words: int, side: Row) -> Program:
    """nanoGPT's GPT of width 256 with 4 blocks and windows of 128 tokens, trained as its train.py does: AdamW with
    warm-up and cosine, clipped, compiled, random windows.

    As with ours, the schedule follows the clock, and the precision is bf16 where the processor computes in it; on a
    CPU, nanoGPT's train.py has float32 only.
    """
    context, batch = 128, 16
    sizes = {"layers": 4, "heads": 4, "dim": 256, "context": context, "vocab_size": words}
    model = nanogpt(source, sizes, side["dropout"])
    optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.99), "cpu")
    compiled: Any = torch.compile(model)

    def step(_number: int, progress: float) -> Tensor:
        warmth = min(1.0, progress / 0.02)
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * warmth * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))
        starts = torch.randint(len(ids) - context, (batch, 1))
        windows = ids[starts + torch.arange(context + 1)]
        with autocast(CPU, side["precision"]):
            _, loss = compiled(windows[:, :-1], windows[:, 1:].contiguous())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def score(inputs: Tensor, targets: Tensor) -> Tensor:
        logits = model(inputs, inputs.contiguous())[0][:, -targets.shape[1] :]
        return F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")

    return Program(model, step, batch * context, score, context, context // 4, 16)


def lstm_program(source: Any, ids: Tensor, words: int, _side: Row) -> Program:
    """The example's tied LSTM with its default sizes and its SGD; each lane of text is read in order."""
    model = source.RNNModel("LSTM", words, 200, 200, 2, 0.2, True)
    lanes = ids[: len(ids) // 20 * 20].view(20, -1).t().contiguous()  # (tokens, lanes)
    hidden, read = model.init_hidden(20), model.init_hidden(1)

    def step(number: int, _progress: float) -> Tensor:
        nonlocal hidden
        first = 35 * number % (len(lanes) - 36)
        hidden = tuple(part.detach() for part in hidden)
        output, hidden = model(lanes[first : first + 35], hidden)
        model.zero_grad()
        loss = F.nll_loss(output, lanes[first + 1 : first + 36].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(20.0 * parameter.grad)
        return loss.detach()

    def score(inputs: Tensor, targets: Tensor) -> Tensor:
        nonlocal read
        new = inputs[0, -targets.shape[1] :].unsqueeze(1)  # the state has read the others
        output, read = model(new, read)
        return F.nll_loss(output.double(), targets[0], reduction="none")

    return Program(model, step, 35 * 20, score, 512, 512, 1)


PROGRAMS = {"nanoGPT": nanogpt_program, "word_language_model LSTM": lstm_program}


def measure_peer(side: Row) -> Row:
    """Train one of `PROGRAMS` until the time is up, and score the validation split as `lmtrain eval` does."""
    torch.manual_seed(SEED)
    torch.set_num_threads(side["threads"])
    store = open_store(Path(side["store"]))
    ids = torch.from_numpy(store.split("train").ids.astype(np.int64))
    program = PROGRAMS[side["program"]](load_source(side["source"]), ids, store.tokenizer.vocab_size, side)
    start, setup, losses = time.perf_counter(), 0.0, list[tuple[float, float]]()
    while (minutes := (time.perf_counter() - start) / 60) < side["minutes"]:
        setup = minutes if len(losses) == 1 else setup  # the first step compiles
        losses.append((minutes, float(program.step(len(losses), (minutes - setup) / (side["minutes"] - setup)))))
    program.model.eval()
    scored = evaluate(
        program.score,
        store.split("valid"),
        Config(model=ModelConfig(context=program.context), eval=EvalConfig(batch_size=program.batch_size)),
        stride=program.stride,
        first_token=store.tokenizer.eos_id,
        device=CPU,
        precision="fp32",
    )
    parameters = sum(parameter.numel() for parameter in program.model.parameters())
    tokens = len(losses) * program.tokens
    how = {"context": program.context, "stride": program.stride}
    return {"nats": scored.nats, **how, "tokens": tokens, "parameters": parameters, "curve": curve(losses)}


if __name__ == "__main__":
    print(json.dumps(measure_peer(json.loads(sys.argv[1]))))

"""`scripts/benchmark peers`: validation perplexity after the same minutes on the same words, on a CPU.

Every program is a process of its own with all the cores, one after another, by its own source:

python scripts/bench_peers.py SIDE        # as JSON; prints its nats over the validation split, tokens read, parameters

All are scored by sums over every token of the validation split.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from bench_training import RETAINED_HEAP, load_source, recipe_options, tokens_per_step
from record import Row, last_json, lmtrain, run_python
from torch import Tensor, nn

from lmtrain.data.tokens import open_store
from lmtrain.system.device import autocast, choose_precision
from lmtrain.system.machine import machine

RECIPE, SEED = "wikitext2-cpu", 1
CPU = torch.device("cpu")


def peers(arguments: argparse.Namespace, folder: Path) -> tuple[Row, Row]:
    """Metrics and settings of lmtrain and of every program whose source is given."""
    if any(change.startswith(("data.", "tokenizer.")) for change in arguments.overrides):
        raise SystemExit("all programs read the same data: use --source, and no overrides of data or tokenizer")
    recipe = recipe_options(RECIPE)
    store = lmtrain("tokenize", arguments.source, *recipe)
    words, threads = store["splits"]["valid"]["words"], machine(CPU)["cores"]
    precision = choose_precision("auto", CPU)
    side = {"store": store["folder"], "minutes": arguments.minutes, "threads": threads}
    rows: list[Row] = []

    def add(form: Row, found: Row) -> None:
        rows.append({**form, "word_perplexity": math.exp(found["nats"] / words), **found})
        print(rows[-1], file=sys.stderr)

    budget = [f"train.max_minutes={arguments.minutes}", f"train.threads={threads}", f"run.seed={SEED}"]
    options = [
        *recipe,
        "train.compile=true",
        *arguments.overrides,
        f"data.source={arguments.source}",
        *budget,
        f"run.dir={folder}",
    ]
    costs, trained = lmtrain("train", *options, "--dry-run"), lmtrain("train", *options)
    scored = lmtrain("eval", "--run", trained["run"])
    read = trained["step"] * tokens_per_step(costs["config"])
    form = {"program": "lmtrain", "precision": precision, "compiled": costs["config"]["train"]["compile"]}
    add(form, {"nats": scored["nats"], "tokens": read, "parameters": costs["parameters"]})
    programs = [
        ("nanoGPT", arguments.nanogpt, precision, True),
        ("word_language_model LSTM", arguments.word_language_model, "fp32", False),
    ]
    for program, source, peer_precision, compiled in programs:
        if source is not None:
            form = {"program": program, "precision": peer_precision, "compiled": compiled}
            printed = run_python([__file__, json.dumps({**side, **form, "source": str(source)})], RETAINED_HEAP)
            add(form, last_json(printed))
    settings = {"recipe": RECIPE, "overrides": arguments.overrides, "corpus": Path(arguments.source).name}
    metrics = {"minutes": arguments.minutes, "threads": threads, "rows": rows}
    return metrics, settings | {"words": words, "heap": "retained"}


Trained = tuple[nn.Module, int, float]
"""A model, the tokens that it was trained on, and its nats over the validation split."""


class Text:
    """The ids of a token store: a split as one stream, or cut into lanes side by side."""

    def __init__(self, folder: Path) -> None:
        store = open_store(folder)
        self.vocab_size = store.tokenizer.vocab_size
        self.train = torch.from_numpy(store.split("train").ids[:].astype(np.int64))
        valid = store.split("valid").ids[:].astype(np.int64)
        self.valid = torch.from_numpy(np.concatenate([[store.tokenizer.eos_id], valid]))

    def lanes(self, count: int) -> Tensor:
        """The training text (tokens, lanes)."""
        length = len(self.train) // count
        return self.train[: length * count].view(count, length).t().contiguous()


def train_nanogpt(source: Any, text: Text, side: Row) -> Trained:
    """nanoGPT's GPT with the sizes of our recipe, trained as its train.py does: AdamW with warm-up and cosine, clipped,
    compiled, random windows. As with ours, the schedule follows the clock, and the precision is bf16 where the
    processor computes in it; on a CPU, nanoGPT's train.py has float32 only."""
    context, batch = 128, 16
    sizes = {"n_layer": 4, "n_head": 4, "n_embd": 256, "block_size": context}
    model = source.GPT(source.GPTConfig(**sizes, vocab_size=text.vocab_size, dropout=0.0, bias=False))
    optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.99), "cpu")
    compiled = torch.compile(model)

    def step(_number: int, progress: float) -> int:
        warmth = min(1.0, progress / 0.02)
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * warmth * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))
        starts = torch.randint(len(text.train) - context, (batch, 1))
        windows = text.train[starts + torch.arange(context + 1)]
        with autocast(CPU, side["precision"]):
            _, loss = compiled(windows[:, :-1], windows[:, 1:].contiguous())  # type: ignore[no-untyped-call]
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return batch * context

    tokens = train_until(side["minutes"], step)
    model.eval()
    return model, tokens, sliding_nats(lambda inputs: model(inputs, inputs)[0], text.valid, context)


def train_lstm(source: Any, text: Text, side: Row) -> Trained:
    """The example's tied LSTM with its default sizes and its SGD; each lane of text is read in order."""
    model = source.RNNModel("LSTM", text.vocab_size, 200, 200, 2, 0.2, True)
    lanes, hidden = text.lanes(20), model.init_hidden(20)

    def step(number: int, _progress: float) -> int:
        nonlocal hidden
        first = 35 * number % (len(lanes) - 36)
        hidden = tuple(part.detach() for part in hidden)
        output, hidden = model(lanes[first : first + 35], hidden)
        model.zero_grad()
        F.nll_loss(output, lanes[first + 1 : first + 36].flatten()).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(20.0 * parameter.grad)
        return 35 * 20

    tokens = train_until(side["minutes"], step)
    model.eval()
    nats, hidden = 0.0, model.init_hidden(1)
    with torch.no_grad():
        for first in range(0, len(text.valid) - 1, 512):
            part = text.valid[first : first + 513]
            output, hidden = model(part[:-1].unsqueeze(1), hidden)
            nats += float(F.nll_loss(output.double(), part[1:], reduction="sum"))
    return model, tokens, nats


def train_until(minutes: float, step: Callable[[int, float], int]) -> int:
    """Steps (number, share of the time that has passed) until the time is up; the tokens that they read."""
    start, tokens, number = time.perf_counter(), 0, 0
    while (progress := (time.perf_counter() - start) / (60 * minutes)) < 1:
        tokens += step(number, progress)
        number += 1
    return tokens


@torch.no_grad()
def sliding_nats(logits: Callable[[Tensor], Tensor], stream: Tensor, context: int) -> float:
    """Every token of the stream but its first, each once, by windows that slide by a quarter of their length."""
    last = len(stream) - 1
    ends = torch.arange(context, last + context // 4, context // 4).clamp(max=last)  # the last target of each window
    before = torch.cat([ends.new_zeros(1), ends[:-1]])
    nats = 0.0
    for rows in range(0, len(ends), 16):
        index = ends[rows : rows + 16, None] + torch.arange(-context, 1)
        window = stream[index]
        found = logits(window[:, :-1].contiguous()).transpose(1, 2)
        losses = F.cross_entropy(found, window[:, 1:], reduction="none")
        nats += float(losses[index[:, 1:] > before[rows : rows + 16, None]].double().sum())
    return nats


PROGRAMS = {
    "nanoGPT": train_nanogpt,
    "word_language_model LSTM": train_lstm,
}


def main() -> None:
    side = json.loads(sys.argv[1])
    torch.manual_seed(SEED)
    torch.set_num_threads(side["threads"])
    model, tokens, nats = PROGRAMS[side["program"]](load_source(side["source"]), Text(Path(side["store"])), side)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(json.dumps({"nats": nats, "tokens": tokens, "parameters": parameters}))


if __name__ == "__main__":
    main()

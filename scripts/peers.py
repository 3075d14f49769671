"""Perplexity after the same minutes on the same words: lmtrain beside other programs' models, by their own sources.

Every side is a process of its own with all the cores, one after another:

python scripts/peers.py SIDE MINUTES THREADS STORE [FOLDER]     # STORE of tokens, FOLDER of the side's source

prints what the side came to as JSON. All are scored by sums over every token of the validation split.
"""

import json
import math
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from record import ROOT, lmtrain
from torch import Tensor, nn
from training_speed import HEAP, load_source, run_alone

from lmtrain.config.loader import load
from lmtrain.data.order import SampleOrder, batch
from lmtrain.data.prepare import prepare_store
from lmtrain.data.tokens import Split, TokenStore, open_store
from lmtrain.evaluation.perplexity import evaluate
from lmtrain.system.device import autocast, choose_precision
from lmtrain.system.machine import machine

CONFIG = ROOT / "configs" / "wikitext2-cpu.yaml"
SIDES = ("lmtrain", "nanoGPT", "word_language_model LSTM", "word_language_model Transformer")
SEED = 1
CPU = torch.device("cpu")


def peers(
    nanogpt: Path, word_language_model: Path, minutes: float, overrides: list[str], sides: tuple[str, ...] = SIDES
) -> dict[str, Any]:
    """Every side: what it scored, the tokens that it read, its parameters."""
    config = load(CONFIG, overrides)
    store = prepare_store(config, note=_note, progress=False)
    threads: int = machine(CPU)["cores"]

    def run(side: str) -> dict[str, Any]:
        if side == "lmtrain":
            return _lmtrain(minutes, threads, overrides)
        folder = nanogpt if side == "nanoGPT" else word_language_model
        return run_alone([__file__, side, str(minutes), str(threads), str(store.folder), str(folder)], HEAP)

    found = {side: run(side) for side in sides}
    words = store.split("valid").words
    return {
        "title": f"validation perplexity of {Path(config.data.source).name} after {minutes:g} minutes of {threads} "
        f"thread(s) each, {f'`configs/{CONFIG.name}` beside ' if 'lmtrain' in sides else ''}others' models on the same "
        "words",
        "result": "; ".join(
            f"{side} {math.exp(one['nats'] / words):,.1f} ({one['tokens'] / 1e6:.1f}M tokens read, "
            f"{one['parameters'] / 1e6:.1f}M parameters)"
            for side, one in found.items()
        ),
        "seed": SEED,
        "minutes": minutes,
        "threads": threads,
        "sides": found,
    }


def _note(message: str) -> None:
    print(message, file=sys.stderr)


def _lmtrain(minutes: float, threads: int, overrides: list[str]) -> dict[str, Any]:
    """`lmtrain train` with the configuration as it stands, but for its minutes, and `lmtrain eval`."""
    with tempfile.TemporaryDirectory() as folder:
        given = [f"train.max_minutes={minutes}", f"train.threads={threads}", f"run.seed={SEED}", f"run.dir={folder}"]
        train = ["train", "--config", str(CONFIG), *overrides, *given]
        costs, trained = lmtrain(*train, "--dry-run"), lmtrain(*train)
        scored = lmtrain("eval", "--run", trained["run"])
    shape = costs["config"]
    tokens = trained["step"] * shape["train"]["batch_size"] * shape["model"]["context"]
    return {"nats": scored["nats"], "tokens": tokens, "parameters": costs["parameters"]}


def main() -> None:
    side, minutes, threads, folder, source = sys.argv[1:]
    torch.manual_seed(SEED)
    torch.set_num_threads(int(threads))
    train = {"nanoGPT": train_nanogpt, SIDES[2]: train_lstm, SIDES[3]: train_transformer}[side]
    model, tokens, nats = train(load_source(Path(source)), open_store(Path(folder)), float(minutes))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(json.dumps({"nats": nats, "tokens": tokens, "parameters": parameters}))


Trained = tuple[nn.Module, int, float]
"""A model, the tokens that it was trained on, and its nats over the validation split."""


def train_nanogpt(source: Any, store: TokenStore, minutes: float) -> Trained:
    """nanoGPT's GPT with the sizes of our configuration, trained as its train.py does: AdamW with a warm-up and a
    cosine, clipped, compiled. The schedule follows the clock and the precision is bf16 where the processor has it, as
    with ours; on a CPU its train.py has float32 alone."""
    sizes = {"n_layer": 4, "n_head": 4, "n_embd": 256, "block_size": 128}
    model = source.GPT(source.GPTConfig(**sizes, vocab_size=store.tokenizer.vocab_size, dropout=0.0, bias=False))
    optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.99), "cpu")
    compiled = torch.compile(model)
    precision = choose_precision("auto", CPU)
    order = SampleOrder(store.split("train").tokens, 128, "causal", SEED)

    def step(number: int, progress: float) -> int:
        warmth = min(1.0, progress / 0.02)
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * warmth * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))
        inputs, targets = batch(store.split("train").ids, order.starts(16 * number, 16), 128, "causal")
        with autocast(CPU, precision):
            _, loss = compiled(inputs, targets)  # type: ignore[no-untyped-call]
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return inputs.numel()

    tokens = train_until(minutes, step)
    model.eval()
    return model, tokens, windows_nats(lambda inputs: model(inputs, inputs)[0], store, 128)


def train_lstm(source: Any, store: TokenStore, minutes: float) -> Trained:
    """The example's tied LSTM with its default sizes and its SGD, each lane of text read in order."""
    model = source.RNNModel("LSTM", store.tokenizer.vocab_size, 200, 200, 2, 0.2, True)
    lanes = in_lanes(store.split("train"), 20)
    hidden = model.init_hidden(20)

    def step(number: int, progress: float) -> int:
        nonlocal hidden
        first = 35 * number % (len(lanes) - 36)
        hidden = tuple(part.detach() for part in hidden)
        output, hidden = model(lanes[first : first + 35], hidden)
        descend(model, F.nll_loss(output, lanes[first + 1 : first + 36].flatten()), 20.0)
        return 35 * 20

    tokens = train_until(minutes, step)
    model.eval()
    stream = stream_of(store)
    nats, hidden = 0.0, model.init_hidden(1)
    with torch.no_grad():
        for first in range(0, len(stream) - 1, 512):
            part = stream[first : first + 513]
            output, hidden = model(part[:-1].unsqueeze(1), hidden)
            nats += float(F.nll_loss(output.double(), part[1:], reduction="sum"))
    return model, tokens, nats


def train_transformer(source: Any, store: TokenStore, minutes: float) -> Trained:
    """The example's Transformer with its default sizes and AdamW, as its README says."""
    model = source.TransformerModel(store.tokenizer.vocab_size, 200, 2, 200, 2, 0.2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    lanes = in_lanes(store.split("train"), 20)

    def step(number: int, progress: float) -> int:
        first = 35 * number % (len(lanes) - 36)
        loss = F.nll_loss(model(lanes[first : first + 35]).flatten(0, 1), lanes[first + 1 : first + 36].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        optimizer.zero_grad()
        return 35 * 20

    tokens = train_until(minutes, step)
    model.eval()
    return model, tokens, windows_nats(lambda inputs: model(inputs.t()).transpose(0, 1), store, 35)


def train_until(minutes: float, step: Callable[[int, float], int]) -> int:
    """Steps (number, share of the time that is gone) until the time is up; the tokens that they read."""
    begun, tokens, number = time.perf_counter(), 0, 0
    while (progress := (time.perf_counter() - begun) / (60 * minutes)) < 1:
        tokens += step(number, progress)
        number += 1
    return tokens


def descend(model: nn.Module, loss: Tensor, lr: float) -> None:
    """One step of plain, clipped gradient descent."""
    model.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(lr * parameter.grad)


def in_lanes(split: Split, lanes: int) -> Tensor:
    """The split cut into `lanes` of equal length, side by side: (tokens, lanes)."""
    length = split.tokens // lanes
    ids = torch.from_numpy(split.ids[: length * lanes].astype(np.int64))
    return ids.view(lanes, length).t().contiguous()


def stream_of(store: TokenStore) -> Tensor:
    """The validation split after one `<eos>`."""
    ids = store.split("valid").ids[:].astype(np.int64)
    return torch.from_numpy(np.concatenate([[store.tokenizer.eos_id], ids]))


def windows_nats(logits: Callable[[Tensor], Tensor], store: TokenStore, context: int) -> float:
    """The validation split by windows that slide by a quarter of their length; logits or log-probabilities."""

    def nats(inputs: Tensor, targets: Tensor) -> Tensor:
        found = logits(inputs)[:, -targets.shape[1] :]  # of what follows: the targets are the last ones
        return F.cross_entropy(found.transpose(1, 2), targets, reduction="none")

    score = evaluate(
        nats,
        store.split("valid"),
        mode="causal",
        context=context,
        stride=context // 4,
        batch_size=16,
        first_token=store.tokenizer.eos_id,
        device=CPU,
        precision="fp32",
    )
    return score.nats


if __name__ == "__main__":
    main()

"""`scripts/benchmark train`: speed and memory of training, beside other programs' models of the same width and depth.

Every measurement is a process of its own, so that its memory and the settings of its allocator are its own. lmtrain is
measured by its own command line, from the metrics that a run logs. The others run a plain loop, in this file:

python scripts/bench_training.py SIDE        # as JSON; prints tokens per second and peak bytes
"""

import argparse
import importlib
import json
import statistics
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from record import Row, lmtrain, measure_beside, train_points, write_record

from lmtrain.system.device import autocast, choose_device, choose_precision, synchronize
from lmtrain.system.machine import peak_memory_bytes

SEED, WORDS, BLOCKS = 0, 500_000, 5
ONLY_STEPS = [
    "train.epochs=null",
    "train.tokens=null",
    "train.max_minutes=null",
    "train.warmup=0",
    "train.sample_prompts=[]",
]
"""Overrides of a run with a budget in a few steps that writes no texts."""


def training(arguments: argparse.Namespace, folder: Path) -> None:
    """Record every side, lmtrain and then each peer: compiled and, if there are peers, also not, unless train.compile
    says which."""
    options = on_random_words(arguments, folder)
    costs = lmtrain("train", *options, "--dry-run")
    config, model = costs["config"], costs["config"]["model"]
    device = choose_device(config["train"]["device"])
    precision = choose_precision(config["train"]["precision"], device)
    sizes = {name: model[name] for name in ("dim", "layers", "heads", "context")}
    sizes |= {"vocab_size": costs["vocabulary"], "batch": config["train"]["batch_size"]}
    peers = {"nanoGPT": str(arguments.nanogpt)} if arguments.nanogpt else {}
    peers |= {"transformers GPT-2": ""} if arguments.transformers else {}
    rows: list[Row] = []

    def add(form: Row, found: Row) -> None:
        rows.append(form | found)
        print(rows[-1], file=sys.stderr)

    requested = config["train"]["compile"]  # "auto" would depend on the length of the run
    for compiled in (True, False) if peers and requested == "auto" else (requested is not False,):
        form = {"precision": precision, "compiled": compiled, "heap": "retained"}
        ours = [*options, f"train.compile={str(compiled).lower()}"]
        found = measure_lmtrain(ours, folder / f"runs-{len(rows)}", arguments.steps)
        add({"program": "lmtrain", **form}, found)
        for program, source in peers.items():
            side = {**sizes, **form, "program": program, "source": source, "device": device.type}
            add({"program": program, **form}, measure_beside(__file__, side | {"steps": arguments.steps}))
    settings = {"recipe": arguments.recipe, "overrides": arguments.overrides, "vocab_size": arguments.vocab_size}
    metrics = {"parameters": costs["parameters"], "tokens_per_step": costs["tokens_per_step"], "rows": rows}
    settings |= {"config": {section: config[section] for section in ("model", "train")}}
    write_record("benchmarks", "train", metrics, seeds=[SEED], settings=settings, device=config["train"]["device"])


def on_random_words(arguments: argparse.Namespace, folder: Path) -> list[str]:
    """The recipe or the defaults, with the overrides, for a text of random words, which is written first.

    Each word of the vocabulary occurs at least once, and their frequencies follow Zipf's law as in a real text.
    """
    random, texts, defaults = np.random.default_rng(SEED), folder / "texts", folder / "defaults.yaml"
    defaults.touch()  # without a configuration, lmtrain would choose one for the text
    words = arguments.vocab_size - 2  # beside <unk> and <eos>
    texts.mkdir()
    for split, count in (("train", WORDS), ("valid", 2000)):
        ids = random.zipf(1.1, count) % words
        ids = np.concatenate([random.permutation(words), ids]) if split == "train" else ids
        lines = [" ".join(f"w{index}" for index in part) for part in np.array_split(ids, len(ids) // 50)]
        (texts / f"{split}.txt").write_text("\n".join(lines) + "\n")
    kind = ["tokenizer.kind=word", "tokenizer.vocab_size=null", "tokenizer.file=null"]
    data = [f"data.source={texts}", f"data.dir={folder / 'data'}", *kind]
    return ["--config", arguments.recipe or str(defaults), *arguments.overrides, *data]


def measure_lmtrain(options: list[str], folder: Path, steps: int) -> Row:
    """Train twice `steps`, and take the median of the second half from what the run logged."""
    budget = [f"train.steps={2 * steps}", f"train.eval_steps={2 * steps}", *ONLY_STEPS]
    quiet = ["train.eval_tokens=500", "eval.stride=null", "train.save_minutes=1000", "train.keep=1"]
    logged = [f"train.log_steps={max(1, steps // BLOCKS)}", f"run.dir={folder}", "run.name=run", "run.seed=0"]
    lmtrain("train", *options, *budget, *quiet, *logged, "-q")
    points = train_points(folder / "run")
    late = [point for point in points if point["step"] > steps]
    return {
        "tokens_per_second": statistics.median(point["tokens_per_second"] for point in late),
        "peak_share": statistics.median(point["mfu"] for point in late),
        "peak_bytes": round(1e9 * max(point["memory_gb"] for point in points)),
    }


def measure_peer(side: Row) -> Row:
    """A plain loop: random windows, forward, backward, clipping, AdamW; the median of `BLOCKS` blocks of steps."""
    device = torch.device(side["device"])
    torch.manual_seed(SEED)
    is_nanogpt = side["program"] == "nanoGPT"
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = nanogpt(load_source(side["source"]), side) if is_nanogpt else gpt2(side, **no_dropout, use_cache=False)
    model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    forward: Any = torch.compile(model) if side["compiled"] else model
    random = np.random.default_rng(SEED)
    ids = random.zipf(1.1, WORDS) % side["vocab_size"]

    def step() -> None:
        starts = random.integers(0, len(ids) - side["context"] - 1, side["batch"])
        windows = torch.from_numpy(np.stack([ids[start : start + side["context"] + 1] for start in starts])).to(device)
        inputs, targets = windows[:, :-1], windows[:, 1:].contiguous()
        with autocast(device, side["precision"]):  # GPT-2 shifts the labels by itself
            loss = forward(inputs, targets)[1] if is_nanogpt else forward(input_ids=inputs, labels=inputs).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def rate(steps: int) -> float:
        synchronize(device)
        start = time.perf_counter()
        for _ in range(steps):
            step()
        synchronize(device)
        return float(steps * side["batch"] * side["context"] / (time.perf_counter() - start))

    rate(side["steps"])  # compiles and warms up
    rates = [rate(max(1, side["steps"] // BLOCKS)) for _ in range(BLOCKS)]
    return {"tokens_per_second": statistics.median(rates), "peak_bytes": peak_memory_bytes(device)}


def load_source(folder: str) -> ModuleType:
    """The module `model.py` of a program whose source is in `folder`."""
    sys.path.insert(0, folder)
    return importlib.import_module("model")


def nanogpt(source: Any, sizes: Row, dropout: float = 0.0) -> Any:
    """nanoGPT's model by its own source."""
    shape = {"n_layer": sizes["layers"], "n_head": sizes["heads"], "n_embd": sizes["dim"]}
    shape |= {"block_size": sizes["context"], "vocab_size": sizes["vocab_size"]}
    return source.GPT(source.GPTConfig(**shape, dropout=dropout, bias=False))


def gpt2(sizes: Row, **options: Any) -> Any:
    """transformers' GPT-2."""
    transformers: Any = importlib.import_module("transformers")
    shape = {"n_layer": sizes["layers"], "n_head": sizes["heads"], "n_embd": sizes["dim"]}
    shape |= {"n_positions": sizes["context"], "vocab_size": sizes["vocab_size"]}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape, **options))


if __name__ == "__main__":
    print(json.dumps(measure_peer(json.loads(sys.argv[1]))))

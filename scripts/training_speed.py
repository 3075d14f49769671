"""Tokens per second and memory of training: beside other programs' models of the same size, and as each size grows.

Every measurement is a process of its own, so that its memory is its own and so are the settings of its allocator:

python scripts/training_speed.py SIDE SIZES [NANOGPT]      # SIZES as JSON, NANOGPT the folder of its source

prints what it measured as JSON. All sides train on random windows of the same random tokens.
"""

import importlib.util
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from lmtrain.config.loader import load
from lmtrain.data.ids import Ids
from lmtrain.data.tokens import Split, TokenStore
from lmtrain.system.device import autocast, choose_device, choose_precision, synchronize
from lmtrain.system.machine import peak_flops
from lmtrain.system.memory import memory_bytes
from lmtrain.training.costs import step_flops
from lmtrain.training.loop import train_step
from lmtrain.training.state import Training, prepare

TOKENS, SEED = 2_000_000, 0
WARM_UP, STEPS, BLOCKS, ROUNDS = 2, 2, 4, 3
HEAP = {
    "THP_MEM_ALLOC_ENABLE": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1),
    "MALLOC_TOP_PAD_": str(64 << 20),
}
"""What `lmtrain.system.allocator.retain_heap` sets, as an environment."""
SIDES = {
    "lmtrain": HEAP,
    "lmtrain, not compiled": HEAP,
    "nanoGPT": {},
    "nanoGPT, compiled": {},
    "nanoGPT, compiled, autocast, heap kept": HEAP,
    "Hugging Face": {},
    "Hugging Face, compiled, autocast, heap kept": HEAP,
}
"""Each side, and the environment that it is given. `autocast` is to what the machine is fastest in."""


@dataclass(frozen=True)
class Sizes:
    """A causal model (`windowed`: one prediction per window) and its batch."""

    dim: int = 256
    layers: int = 4
    heads: int = 4
    context: int = 128
    vocab: int = 33_278
    batch: int = 32
    mode: str = "causal"


BASE = Sizes()
SMALL = Sizes(vocab=8192, batch=8)
CURVES: dict[str, tuple[int, ...]] = {
    "context": (128, 256, 512, 1024, 2048, 4096, 8192),
    "dim": (128, 256, 512, 1024),
    "layers": (2, 4, 8, 16),
    "vocab": (1024, 8192, 32_768, 100_000),
    "batch": (1, 2, 4, 8, 16, 32),
}
"""What grows, from `SMALL`; in longer rows the batch shrinks, so that a step keeps its tokens."""


def beside(nanogpt: Path, sizes: Sizes) -> dict[str, Any]:
    """The rates and the memory of every side."""
    found, rates, memory = in_turn(SIDES, lambda name: measure(name, sizes, nanogpt))
    ours = found["lmtrain"]
    peak = max(one["peak_flops"] for one in ours)
    share = rates["lmtrain"] * ours[0]["flops_per_token"] / peak
    device = choose_device("auto")
    precision = choose_precision("auto", device)
    others = ", ".join(
        f"{name} {rates[name]:,.0f} ({rates['lmtrain'] / rates[name]:.1f} times)"
        for name in rates
        if not name.startswith("lmtrain")
    )
    return {
        "title": f"training, {precision}, {sizes.dim} x {sizes.layers}, V = {sizes.vocab:,}, "
        f"{sizes.batch} x {sizes.context} tokens a step, beside nanoGPT and transformers' GPT-2 of the same size",
        "result": f"{rates['lmtrain']:,.0f} tokens/s at {share:.0%} of the matrix peak in "
        f"{memory['lmtrain'] / 2**30:.1f} GiB; {others}; least memory of the others "
        f"{min(used for name, used in memory.items() if not name.startswith('lmtrain')) / 2**30:.1f} GiB",
        "seed": SEED,
        "sizes": asdict(sizes),
        "tokens_per_second": rates,
        "peak_bytes": memory,
        "peak_flops": peak,
        "rounds": found,
    }


Found = dict[str, list[dict[str, Any]]]


def in_turn(
    names: Iterable[str], measured: Callable[[str], dict[str, Any]]
) -> tuple[Found, dict[str, float], dict[str, int]]:
    """All measured in turn, `ROUNDS` times: what was found, and the best rate and the most memory of each."""
    found: Found = {name: [] for name in names}
    for _ in range(ROUNDS):
        for name, rounds in found.items():
            rounds.append(measured(name))
            print(name, rounds[-1], flush=True)
    rates = {name: max(max(one["tokens_per_second"]) for one in rounds) for name, rounds in found.items()}
    memory = {name: max(one["peak_bytes"] for one in rounds) for name, rounds in found.items()}
    return found, rates, memory


def curves() -> dict[str, Any]:
    """Seconds per step and memory as each size grows alone, not compiled, and the exponent over the upper half."""
    found: Found = {}
    for axis, values in CURVES.items():
        for value in values:
            grown: dict[str, Any] = {axis: value}
            sizes = replace(SMALL, **grown)
            if axis == "context":
                sizes = replace(sizes, batch=max(1, SMALL.batch * SMALL.context // value))
            measured = measure("lmtrain, not compiled", sizes)
            found.setdefault(axis, []).append({"value": value, "batch": sizes.batch, **measured})
            print(axis, found[axis][-1], flush=True)
    exponents = {axis: _exponents(points) for axis, points in found.items()}
    text = "; ".join(
        f"{axis} {points[0]['value']:,} to {points[-1]['value']:,}: "
        f"{max(points[0]['tokens_per_second']):,.0f} to {max(points[-1]['tokens_per_second']):,.0f} tokens/s "
        f"(time per token ~ {axis}^{exponents[axis]['seconds_per_token']:.2f}), "
        f"{points[0]['peak_bytes'] / 2**30:.1f} to {points[-1]['peak_bytes'] / 2**30:.1f} GiB"
        for axis, points in found.items()
    )
    return {
        "title": f"training as each size grows, from {SMALL.dim} x {SMALL.layers}, {SMALL.batch} x {SMALL.context} "
        f"tokens, V = {SMALL.vocab:,}; exponents between the two largest",
        "result": text,
        "seed": SEED,
        "base": asdict(SMALL),
        "exponents": exponents,
        "points": found,
    }


def _exponents(points: list[dict[str, Any]]) -> dict[str, float]:
    """Of time per token, of what theory counts (operations per token) and of memory, from the last point but one."""
    before, last = points[-2:]
    growth = math.log(last["value"] / before["value"])
    times = [1 / max(point["tokens_per_second"]) for point in (before, last)]
    return {
        "seconds_per_token": math.log(times[1] / times[0]) / growth,
        "operations_per_token": math.log(last["flops_per_token"] / before["flops_per_token"]) / growth,
        "peak_bytes": math.log(last["peak_bytes"] / before["peak_bytes"]) / growth,
    }


def measure(side: str, sizes: Sizes, nanogpt: Path | None = None) -> dict[str, Any]:
    """What the side's own process prints. Raises CalledProcessError when it fails."""
    return run_alone([__file__, side, json.dumps(asdict(sizes)), *([str(nanogpt)] if nanogpt else [])], SIDES[side])


def run_alone(arguments: list[str], environment: dict[str, str]) -> dict[str, Any]:
    """The JSON that a Python process of its own prints last, its environment changed by `environment`."""
    command = [sys.executable, *arguments]
    printed = subprocess.run(
        command, env=os.environ | environment, stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    result: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return result


def our_training(sizes: Sizes, *, compiled: bool, changes: Sequence[str] = ()) -> Training:
    """A training on random tokens, without dropout."""
    shape = [f"model.{name}={getattr(sizes, name)}" for name in ("dim", "layers", "heads", "context", "mode")]
    dropouts = [f"model.{name}dropout=0" for name in ("", "attention_", "embedding_", "input_", "output_")]
    run = [f"train.batch_size={sizes.batch}", "train.steps=1000", "train.ema=null", f"run.seed={SEED}"]
    config = load(None, [*shape, *dropouts, *run, f"train.compile={str(compiled).lower()}", *changes])
    return prepare(config, random_store(sizes.vocab), lambda message: None)


def random_store(vocab: int) -> TokenStore:
    """A store in memory whose training split is random tokens."""
    split = Split(Ids([random_tokens(vocab)]), np.zeros(1, np.int64), TOKENS, TOKENS, TOKENS, (TOKENS,))
    tokenizer: Any = SimpleNamespace(vocab_size=vocab)
    return TokenStore(Path(), {}, tokenizer, (1,), {"train": split})


def random_tokens(vocab: int) -> np.ndarray:
    """As often as words are by rank (Zipf), so that the embedding's rows are read and written as in a corpus."""
    ranks = np.random.default_rng(SEED).zipf(1.1, TOKENS) % vocab
    return ranks.astype(np.uint16 if vocab <= 2**16 else np.uint32)


def timed(step: Callable[[], object], targets: int, device: torch.device) -> dict[str, Any]:
    """Targets per second, block by block, and what the first step took, which may compile."""
    begun = time.perf_counter()
    step()
    synchronize(device)
    first = time.perf_counter() - begun
    for _ in range(WARM_UP - 1):
        step()
    rates = []
    for _ in range(BLOCKS):
        synchronize(device)
        begun = time.perf_counter()
        for _ in range(STEPS):
            step()
        synchronize(device)
        rates.append(STEPS * targets / (time.perf_counter() - begun))
    return {"tokens_per_second": rates, "first_step_seconds": first, "peak_bytes": memory_bytes(device)}


def measure_ours(sizes: Sizes, *, compiled: bool, changes: Sequence[str] = ()) -> dict[str, Any]:
    training = our_training(sizes, compiled=compiled, changes=changes)
    tokens = sizes.batch * sizes.context
    before = peak_flops(training.device, training.precision)  # others may disturb a measurement: the better of two
    found = timed(lambda: train_step(training, 1e-3), tokens, training.device)
    flops = step_flops(training.model, training.config) / tokens
    peak = max(before, peak_flops(training.device, training.precision))
    return found | {"flops_per_token": flops, "peak_flops": peak}


def measure_other(side: str, sizes: Sizes, nanogpt: Path) -> dict[str, Any]:
    """A plain loop: random windows, forward, backward, clipping, AdamW."""
    device = choose_device("auto")
    torch.manual_seed(SEED)
    model, loss_of = (nanogpt_model if side.startswith("nanoGPT") else huggingface_model)(sizes, nanogpt)
    model.to(device).train()
    fused = device.type == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=fused)
    precision = choose_precision("auto", device) if "autocast" in side else "fp32"
    run = torch.compile(model) if "compiled" in side else model
    ids, draw = random_tokens(sizes.vocab), np.random.default_rng(SEED)

    def step() -> None:
        starts = draw.integers(0, len(ids) - sizes.context - 1, sizes.batch)
        rows = np.stack([ids[start : start + sizes.context + 1].astype(np.int64) for start in starts])
        windows = torch.from_numpy(rows).to(device)
        with autocast(device, precision):
            loss = loss_of(run, windows)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return timed(step, sizes.batch * sizes.context, device)


Loss = Callable[[Any, torch.Tensor], torch.Tensor]


def load_source(folder: Path) -> Any:
    """The module `model.py` of a program whose source lies in `folder`."""
    spec = importlib.util.spec_from_file_location("peer_source", folder / "model.py")
    if spec is None or spec.loader is None or not (folder / "model.py").is_file():
        raise SystemExit(f"{folder} holds no model.py: give the folder of the program's source")
    module: Any = importlib.util.module_from_spec(spec)
    sys.modules["peer_source"] = module
    spec.loader.exec_module(module)
    return module


def nanogpt_model(sizes: Sizes, folder: Path) -> tuple[Any, Loss]:
    """nanoGPT's model by its own source in `folder`."""
    module = load_source(folder)
    shape = {"n_layer": sizes.layers, "n_head": sizes.heads, "n_embd": sizes.dim, "block_size": sizes.context}
    model = module.GPT(module.GPTConfig(**shape, vocab_size=sizes.vocab, dropout=0.0, bias=False))
    return model, lambda run, windows: run(windows[:, :-1], windows[:, 1:].contiguous())[1]


def huggingface_model(sizes: Sizes, _folder: Path) -> tuple[Any, Loss]:
    """transformers' GPT-2."""
    transformers: Any = importlib.import_module("transformers")
    shape = {"n_layer": sizes.layers, "n_head": sizes.heads, "n_embd": sizes.dim, "n_positions": sizes.context}
    dropouts: Mapping[str, float] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = transformers.GPT2Config(**shape, **dropouts, vocab_size=sizes.vocab, use_cache=False)
    model = transformers.GPT2LMHeadModel(config)
    return model, lambda run, windows: run(input_ids=windows[:, :-1], labels=windows[:, :-1]).loss


def main() -> None:
    side, sizes, folders = sys.argv[1], Sizes(**json.loads(sys.argv[2])), sys.argv[3:]
    if side.startswith("lmtrain"):
        found = measure_ours(sizes, compiled="not compiled" not in side)
    else:
        found = measure_other(side, sizes, Path(folders[0]))
    print(json.dumps(found))


if __name__ == "__main__":
    main()

"""What each part of a training step takes, and what each thing that makes it fast gives.

Every measurement is a process of its own: python scripts/training_parts.py WHAT SIZES (as JSON).
"""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.nn.functional as F
from training_speed import BASE, HEAP, SEED, Sizes, in_turn, measure_ours, our_training, run_alone, timed

from lmtrain.nn import dot_product, dropout, output_loss
from lmtrain.system.device import autocast, choose_device, choose_precision
from lmtrain.training.loop import train_step

DROPOUT = [f"model.{place}=0.1" for place in ("dropout", "attention_dropout", "input_dropout", "output_dropout")]
LEVERS: dict[str, tuple[dict[str, str], list[str]]] = {
    "all levers": (HEAP, []),
    "heap given back": ({}, []),
    "not compiled": (HEAP, ["train.compile=false"]),
    "fused attention": (HEAP, []),
    "float32": (HEAP, ["train.precision=fp32"]),
    "loss by torch's cross_entropy": (HEAP, []),
    "loss by 512 targets": (HEAP, ["train.loss_chunk=512"]),
    "dropout": (HEAP, DROPOUT),
    "dropout, masks by torch's generator": (HEAP, DROPOUT),
}
"""All as it is by default, and with one thing otherwise: the environment, and overrides of the configuration."""


def levers(sizes: Sizes = BASE) -> dict[str, Any]:
    """What each thing that makes training fast gives by itself: all of them beside all but one."""
    precision = choose_precision("auto", choose_device("auto"))
    names = [name for name in LEVERS if (name, precision) != ("float32", "fp32")]
    found, rates, memory = in_turn(names, lambda name: _measure(name, sizes, LEVERS[name][0]))
    optimizer = _measure("optimizer", sizes)
    everything = rates["all levers"]
    per_step = sizes.batch * sizes.context / everything
    others = "; ".join(
        f"{name} {rate / everything:.2f} ({memory[name] / 2**30:.1f} GiB)"
        for name, rate in rates.items()
        if name != "all levers"
    )
    return {
        "title": f"training in {precision}, {sizes.dim} x {sizes.layers}, V = {sizes.vocab:,}, {sizes.batch} x "
        f"{sizes.context} tokens a step: the speed with one thing otherwise, as a share of the speed as it is",
        "result": f"{everything:,.0f} tokens/s in {memory['all levers'] / 2**30:.1f} GiB; {others}; clipping and AdamW "
        f"take {(optimizer['clip'] + optimizer['fused']) / per_step:.1%} of a step, "
        f"{(optimizer['clip'] + optimizer['plain']) / per_step:.1%} were AdamW not fused",
        "seed": SEED,
        "sizes": asdict(sizes),
        "tokens_per_second": rates,
        "peak_bytes": memory,
        "optimizer_seconds": optimizer,
        "rounds": found,
    }


def head() -> dict[str, Any]:
    """The pooling block's share of a step, and what a prediction costs, causal and windowed."""
    found = {mode: _measure("head", replace(BASE, mode=mode)) for mode in ("causal", "windowed")}
    costs = {mode: 1 / max(one["predictions_per_second"]) for mode, one in found.items()}
    return {
        "title": f"the attention-pooling head, {BASE.dim} x {BASE.layers}, V = {BASE.vocab:,}, "
        f"{BASE.batch} x {BASE.context} tokens a step",
        "result": "; ".join(
            f"{mode}: {one['pool_share']:.1%} of the step, its attention alone {one['attention_share']:.1%}"
            for mode, one in found.items()
        )
        + f"; a windowed prediction costs {costs['windowed'] / costs['causal']:.0f} times a causal one",
        "seed": SEED,
        "modes": found,
    }


def _measure(what: str, sizes: Sizes, environment: dict[str, str] = HEAP) -> dict[str, Any]:
    return run_alone([__file__, what, json.dumps(asdict(sizes))], environment)


def measure_lever(name: str, sizes: Sizes) -> dict[str, Any]:
    """Training with one thing otherwise."""
    if name == "fused attention":
        dot_product._attend_plain = _attend_fused
    if name.endswith("cross_entropy"):
        output_loss.target_nats = _plain_loss
    if name.endswith("generator"):
        dropout.hashed_keep = lambda shape, rate: torch.rand(shape) >= rate
    return measure_ours(sizes, compiled=True, changes=LEVERS[name][1])


def _attend_fused(query: Any, key: Any, value: Any, mask: Any, dropout: float, *, empty: bool) -> torch.Tensor:
    return F.scaled_dot_product_attention(query, key, value, mask, dropout)


def _plain_loss(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor, chunk: Any
) -> torch.Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float() + (0 if bias is None else bias), targets, reduction="none")


def measure_optimizer(sizes: Sizes) -> dict[str, Any]:
    """Seconds that a step clips for, and that AdamW takes, fused and as torch does it by default on this device."""
    training = our_training(sizes, compiled=False)
    parameters = list(training.model.parameters())
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    actions: dict[str, Callable[[], object]] = {
        "clip": lambda: torch.nn.utils.clip_grad_norm_(parameters, 1.0),
        "fused": torch.optim.AdamW(parameters, fused=True).step,
        "plain": torch.optim.AdamW(parameters).step,
    }
    return {name: 1 / max(timed(act, 1, training.device)["tokens_per_second"]) for name, act in actions.items()}


def measure_head(sizes: Sizes) -> dict[str, Any]:
    """Forward and backward of the pooling block beside the whole step, both as they stand without a compiler."""
    training = our_training(sizes, compiled=False)
    pool = training.model.pool
    predictions = sizes.batch * training.samples.targets_per_window
    whole = timed(lambda: train_step(training, 1e-3), predictions, training.device)
    states = torch.randn(sizes.batch, sizes.context, sizes.dim, device=training.device, requires_grad=True)

    def run(pooling: Callable[[torch.Tensor], torch.Tensor]) -> None:
        with autocast(training.device, training.precision):
            pooled = pooling(states)
        pooled.backward(torch.ones_like(pooled))  # type: ignore[no-untyped-call]

    pooling = pool if training.model.causal else pool.window
    block = timed(lambda: run(pooling), predictions, training.device)
    read = states if training.model.causal else states[:, -1:]  # by the feed-forward layer
    rest = timed(lambda: run(lambda _: pool.feed_forward(read)), predictions, training.device)
    seconds = [1 / max(one["tokens_per_second"]) for one in (whole, block, rest)]
    return {
        "predictions_per_second": whole["tokens_per_second"],
        "pool_share": seconds[1] / seconds[0],
        "attention_share": (seconds[1] - seconds[2]) / seconds[0],
    }


def main() -> None:
    what, sizes = sys.argv[1], Sizes(**json.loads(sys.argv[2]))
    if what == "head":
        found = measure_head(sizes)
    elif what == "optimizer":
        found = measure_optimizer(sizes)
    else:
        found = measure_lever(what, sizes)
    print(json.dumps(found))


if __name__ == "__main__":
    main()

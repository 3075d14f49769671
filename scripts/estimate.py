#!/usr/bin/env python3
"""What training a configuration on several GPUs takes, on paper: memory by part, bytes sent, tokens per second.

    python scripts/estimate.py --config configs/wikitext103.yaml --gpus 1,8,64 --vocab-size 65536 model.dim=1536

Memory of weights, gradients and optimizer is a count. All else is an estimate: activations are those that eager mode
keeps, the speed follows from a share of the peak and a bandwidth that are assumed (--share, --peak, --bandwidth), and
lies between two bounds: with all sending hidden behind the computing, and with none.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from record import run_script
from torch import nn

from lmtrain.config.loader import load
from lmtrain.config.schema import Config
from lmtrain.model.language_model import LanguageModel
from lmtrain.system.process_group import ProcessGroup
from lmtrain.training.costs import memory_estimate, step_flops
from lmtrain.training.parallel import share_batch

STATE = ("weights", "gradients", "optimizer", "averaged weights")
SHARDED_AT_ONCE = 2
"""Blocks whose weights are gathered at one time: the one that computes, and the next."""


def estimate(
    config: Config, vocab_size: int, kind: str, gpus: int, *, peak: float, share: float, bandwidth: float
) -> dict[str, Any]:
    """The figures of one process of `gpus`, in bytes, bytes per step and tokens per second.

    `kind` is `ddp` or `fsdp`, `peak` in operations a second, `bandwidth` in bytes a second that a GPU sends.
    Raises LmtrainError where the batch can't be shared by so many.
    """
    shared = share_batch(config, ProcessGroup(0, gpus))
    precision = "fp32" if config.train.precision == "fp32" else "bf16"
    memory = memory_estimate(shared, vocab_size, precision)
    with torch.device("meta"):
        model = LanguageModel(config.model, vocab_size)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    blocks = [linear_parameters(block) for block in model.encoder.blocks]
    gathered = (2 if precision == "bf16" else 4) * sum(blocks) + 4 * (parameters - sum(blocks))
    others = (gpus - 1) / gpus
    if kind == "fsdp":
        memory |= {part: memory[part] / gpus for part in STATE}
        # Of what lies outside the blocks, weights and gradients are whole during a step; of blocks one or two are.
        memory["gathered"] = 8.0 * (parameters - sum(blocks)) + 8.0 * SHARDED_AT_ONCE * max(blocks, default=0)
        micros = config.train.batch_size // (shared.train.micro_batch or config.train.batch_size) // gpus
        sent = others * (2 * micros * gathered + 4 * parameters)  # gathered in both passes, added up once
    else:
        sent = others * 2 * 4 * parameters  # a ring's all-reduce
    again = 4 / 3 if config.train.activation_checkpointing else 1.0
    computing = again * step_flops(model, config) / gpus / (peak * share)
    sending = sent / bandwidth
    targets = config.train.batch_size * (1 if config.model.mode == "windowed" else config.model.context)
    return {
        "kind": kind,
        "gpus": gpus,
        "parameters": parameters,
        "memory_bytes": memory | {"total": sum(memory.values())},
        "sent_bytes_per_step": sent,
        "computing_seconds": computing,
        "sending_seconds": sending,
        "tokens_per_second": [targets / (computing + sending), targets / max(computing, sending)],
    }


def linear_parameters(block: nn.Module) -> int:
    """Parameters of a block that are sharded together: its linear layers'."""
    layers = [module for module in block.modules() if isinstance(module, nn.Linear)]
    return sum(parameter.numel() for layer in layers for parameter in layer.parameters())


def table(rows: list[dict[str, Any]]) -> str:
    """A line for each estimate."""
    lines = [f"{'':12} {'memory':>9} {'state':>9} {'activations':>12} {'sent/step':>10} {'tokens/s':>23}"]
    for row in rows:
        memory = row["memory_bytes"]
        state = sum(memory[part] for part in STATE)
        low, high = row["tokens_per_second"]
        lines.append(
            f"{row['gpus']:4} x {row['kind']:5} {memory['total'] / 1e9:6.2f} GB {state / 1e9:6.2f} GB "
            f"{memory['activations'] / 1e9:9.2f} GB {row['sent_bytes_per_step'] / 1e9:7.2f} GB "
            f"{low:11,.0f} {high:11,.0f}"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    """Print the estimates, and return them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path)
    parser.add_argument("--gpus", default="1,8", help="numbers of GPUs, between commas")
    parser.add_argument("--vocab-size", type=int, default=33_278)
    parser.add_argument("--peak", type=float, default=989.0, help="10^12 operations a second of a GPU (H100, bf16)")
    parser.add_argument("--share", type=float, default=0.4, help="of the peak that the computing reaches")
    parser.add_argument("--bandwidth", type=float, default=100.0, help="10^9 bytes a second that a GPU sends")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("overrides", nargs="*", default=[], metavar="SECTION.FIELD=VALUE")
    given = parser.parse_intermixed_args(arguments)
    config = load(given.config, given.overrides, {})
    speed = {"peak": 1e12 * given.peak, "share": given.share, "bandwidth": 1e9 * given.bandwidth}
    rows = [
        estimate(config, given.vocab_size, kind, gpus, **speed)
        for gpus in map(int, given.gpus.split(","))
        for kind in (("ddp",) if gpus == 1 else ("ddp", "fsdp"))
    ]
    if given.json:
        print(json.dumps(rows))
    else:
        print(f"estimates, for {rows[0]['parameters'] / 1e6:,.1f}M parameters, of each process:")
        print(table(rows))
    return rows


if __name__ == "__main__":
    run_script(main)

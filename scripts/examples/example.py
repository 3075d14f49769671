"""What the examples share: options, training, the picture, and the line of results."""

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parent.parent))
from record import RESULTS, write_record

SEED = 0
"""Of the weights and the data."""

Results = dict[str, Any]


def parse(description: str | None, steps: int = 0) -> argparse.Namespace:
    """Return the options of an example, after seeding torch and setting its threads to one.

    `steps` is the default number of training steps, 0 if nothing is trained.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="write the picture and a record to scripts/results")
    if steps:
        parser.add_argument("--steps", type=int, default=steps, help="training steps (%(default)s)")
    options = parser.parse_args()
    torch.manual_seed(SEED)
    torch.set_num_threads(1)
    return options


def train(loss_of_batch: Callable[[], Tensor], parameters: Iterable[Tensor], steps: int, rate: float) -> Results:
    """Train with Adam on a new batch per step; the learning rate decreases linearly to zero."""
    losses = []
    optimizer = torch.optim.Adam(parameters, lr=rate)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * (1 - step / steps)
        loss = loss_of_batch()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return {"first_loss": losses[0], "last_loss": losses[-1], "steps": steps}


def report(name: str, results: Results, figure: Figure, options: argparse.Namespace) -> None:
    """Save the picture, print the results as one line of JSON, and write the record if --record is given."""
    picture = (RESULTS if options.record else Path("runs/examples")) / f"{name}.png"
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=120, bbox_inches="tight")
    print(json.dumps(results | {"picture": str(picture)}), flush=True)
    if options.record:
        write_record("examples", name, results, seeds=[SEED])

"""What the examples share: their command line, the line of results and the picture."""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Results = dict[str, Any]


def arguments(description: str | None, steps: int) -> argparse.ArgumentParser:
    """A parser with the options that every example has; `steps` is the default number of training steps."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=steps, help="training steps (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the data (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("runs/examples"), help="folder of pictures (%(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of torch (default: %(default)s)")
    return parser


def start(options: argparse.Namespace) -> None:
    """Seed torch and set its threads, as the options of `arguments` say."""
    torch.manual_seed(options.seed)
    torch.set_num_threads(options.threads)


def train(loss_of_batch: Callable[[], Tensor], parameters: list[Tensor], steps: int, rate: float) -> float:
    """Adam on a fresh batch per step, its rate falling in a straight line to zero; the seconds that it took."""
    begin = time.monotonic()
    optimizer = torch.optim.Adam(parameters, lr=rate)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * (1 - step / steps)
        loss = loss_of_batch()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return time.monotonic() - begin


def save(figure: "Figure", path: Path) -> None:
    """Write the picture, and its folder where there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, bbox_inches="tight")


def report(results: Results) -> None:
    """Print the results as one line of JSON."""
    print(json.dumps(results), flush=True)

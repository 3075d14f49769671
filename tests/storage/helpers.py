"""Checkpoints for the tests of crashes and full disks, and what a restart makes of them."""

from pathlib import Path

import torch

from lmtrain.storage import checkpoint, run_checkpoints, run_folder
from tests.helpers import messages, state_hash


def save(run_dir: Path, step: int, seed: int | None = None) -> Path:
    """Save a checkpoint with the tensors of `seed`; by default each step has its own."""
    seed = step if seed is None else seed
    torch.manual_seed(seed)
    tensors = {group: {"w": torch.randn(40), "steps": torch.randint(9, (3,))} for group in ("model", "optimizer")}
    info = {"score": 1.0 / seed, "counters": {"seed": seed, "scaler": {"scale": 65536.0}}, "machine": {"threads": 1}}
    return checkpoint.save(run_dir, step, tensors, info)


def read(folder: Path) -> str:
    """The hash of the state in a checkpoint."""
    return state_hash(checkpoint.load(folder))


def restart(run_dir: Path) -> tuple[str | None, list[str]]:
    """The hash of the state in the checkpoint that a restart finds, and its notes."""
    with messages() as notes, run_folder.lock(run_dir):
        found, damaged = run_checkpoints.last(run_dir)
        run_checkpoints.set_aside(damaged)
        return None if found is None else state_hash(found), notes


def leftovers(run_dir: Path) -> list[str]:
    """The temporary files and folders in a run."""
    return [path.name for path in run_dir.rglob(".tmp-*")]

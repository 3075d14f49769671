"""What torchrun, or another launcher, sets in the environment of each process. Does not import torch, which is slow."""

import os


def is_launched() -> bool:
    """Whether a launcher started this process."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()


def is_distributed() -> bool:
    """Whether the launcher started more than one process."""
    return is_launched() and os.environ["WORLD_SIZE"] != "1"


def is_main_process() -> bool:
    """Whether this process has rank 0, or is the only one."""
    return not is_distributed() or os.environ["RANK"] == "0"

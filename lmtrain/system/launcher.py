"""What torchrun, or another launcher, tells each process it starts. Does not import torch, which is slow to import."""

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

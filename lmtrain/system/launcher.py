"""What torchrun, or another launcher, tells each process that it starts; read without torch, which imports slowly."""

import os

STARTED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables that torchrun sets, or another launcher that wants to be understood."""


def started() -> bool:
    """Whether a launcher has started this process."""
    return all(name in os.environ for name in STARTED)


def several() -> bool:
    """Whether it has started others too."""
    return started() and os.environ["WORLD_SIZE"] != "1"


def leads() -> bool:
    """Whether this process is the first of them, or alone."""
    return not several() or os.environ["RANK"] == "0"

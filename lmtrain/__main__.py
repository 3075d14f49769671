"""`python -m lmtrain` is the `lmtrain` command."""

import os
import sys
from pathlib import Path

from lmtrain.system import signals


def main() -> None:
    """Run the command line. Ctrl-C ends it without a traceback, even while modules are being imported."""
    _open_closed_streams()
    signals.install()
    try:
        from lmtrain.cli.app import main as run

        run()
    finally:
        signals.uninstall()
        if signals.ending():  # an interrupt is not reported as an error, nor is what it caused
            raise SystemExit(signals.INTERRUPTED) from None


def _open_closed_streams() -> None:
    """Open the null device for each closed standard stream; otherwise a file opened later gets its descriptor."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):  # the system gives the lowest free descriptor
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115 -- for good


if __name__ == "__main__":
    main()

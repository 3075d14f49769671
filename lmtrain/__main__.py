"""`python -m lmtrain` is the `lmtrain` command."""

import signal


def main() -> None:
    """Run the command line. Ctrl-C ends it at once, without a traceback; while a run is trained, see `signals.py`."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not ignored, as in a shell's background job
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from lmtrain.cli.app import main as run

    run()


if __name__ == "__main__":
    main()

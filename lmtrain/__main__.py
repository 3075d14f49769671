"""`python -m lmtrain` is the `lmtrain` command."""

from lmtrain.system import signals


def main() -> None:
    """Run the command line. Ctrl-C ends it without a traceback, even while modules are being imported."""
    signals.install()
    try:
        from lmtrain.cli.app import main as run

        run()
    finally:
        signals.uninstall()
        if signals.ending():  # an interrupt is not reported as an error, nor is what it caused
            raise SystemExit(signals.INTERRUPTED) from None


if __name__ == "__main__":
    main()

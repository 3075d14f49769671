"""`python -m lmtrain` is the `lmtrain` command."""

from lmtrain.system import signals


def main() -> None:
    """Run the command line; Ctrl-C ends it without a traceback, even while its modules are imported."""
    signals.install()
    try:
        from lmtrain.cli.app import main as run

        run()
    except Exception:
        if signals.ending():  # for example what an interrupted import raises
            raise SystemExit(signals.INTERRUPTED) from None
        raise
    except KeyboardInterrupt:
        raise SystemExit(signals.INTERRUPTED) from None
    finally:
        signals.uninstall()


if __name__ == "__main__":
    main()

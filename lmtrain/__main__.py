"""`python -m lmtrain` is the `lmtrain` command."""


def main() -> None:
    """Run the command line; Ctrl-C ends it without a traceback, even while its modules are imported."""
    try:
        from lmtrain.cli.app import main as run

        run()
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()

"""The exceptions that a user's mistake or a damaged file raises."""


class LmtrainError(Exception):
    """A failure that one message explains: it names the cause and the remedy, and is printed without a traceback.

    The command line exits with 1. Any other exception that escapes is a bug.
    """


class UnreadableError(LmtrainError):
    """The system denies reading an existing file, which may be undamaged."""


class UsageError(LmtrainError):
    """Options or fields that are unknown, invalid, or contradict each other: the command line exits with 2."""


class AlreadyReported(LmtrainError):  # noqa: N818 -- the error itself was raised elsewhere
    """Another process of the run reports what went wrong."""

"""The exceptions for a user's mistakes and damaged files."""


class LmtrainError(Exception):
    """A failure whose message names the cause and the remedy, and is printed without a traceback.

    The command line exits with 1. Any other exception that reaches it is a bug.
    """


class UnreadableError(LmtrainError):
    """The system denies reading a file, which exists and may be undamaged."""


class UsageError(LmtrainError):
    """Options or fields that are unknown, invalid, or contradict each other: the command line exits with 2."""


class AlreadyReported(LmtrainError):  # noqa: N818 -- the error itself was raised elsewhere
    """Another process of the run reports the error."""

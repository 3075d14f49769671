"""The one exception that a user's mistake or a damaged file raises."""


class LmtrainError(Exception):
    """A failure that one clear sentence explains: it names the thing and the remedy, and reaches stderr as it stands.

    The command line prints it without a traceback and exits with 1. Everything else that escapes is a bug.
    """


class UnreadableError(LmtrainError):
    """The system does not let a file be read that is there: nothing says that it is damaged."""


class UsageError(LmtrainError):
    """Options or fields that are unknown, invalid, or contradict each other: the command line exits with 2."""


class SaidElsewhere(LmtrainError):  # noqa: N818 -- the error is elsewhere
    """Another process of the run says what went wrong."""

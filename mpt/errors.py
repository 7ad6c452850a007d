"""Every mistake a user can make, as one family of exceptions, each with the exit code the shell sees.

A user's mistake is an `MptError`: its message gives the place, the value found, the allowed values and a remedy, and
one place (`mpt.cli`) prints it in one piece without a traceback. A programmer's mistake is an `assert` or a plain
exception.
"""

import signal


def with_article(noun: str) -> str:
    """Return a noun with its indefinite article, for a message."""
    return f"{'an' if noun[0] in 'AEIOUaeiou' else 'a'} {noun}"


class MptError(Exception):
    """A failure that is explained to the user. `exit_code` is the process's exit status."""

    exit_code = 1


class OwnCodeError(MptError):
    """Code of the user's own raised an exception: a model, a data set, a task."""

    exit_code = 1


class ConfigError(MptError):
    """The YAML file, an override or a command-line argument is not allowed."""

    exit_code = 2


class PartError(ConfigError):
    """A part from outside of the package cannot be found, read or imported, or its name is taken."""


class DataError(MptError):
    """A data set is missing, empty, unreadable or does not suit the model."""

    exit_code = 3


class CheckpointError(MptError):
    """A checkpoint was refused: corrupt, hostile, of another architecture, or absent."""

    exit_code = 4


class InputOutputError(MptError):
    """A file could not be written or read: disk full, read-only, permission."""

    exit_code = 5


class NonFiniteError(MptError):
    """Training met NaN or infinity and the configured recoveries did not help."""

    exit_code = 6


class MemoryBudgetError(MptError):
    """Out of memory after every fallback, or a plan that does not fit its budget."""

    exit_code = 7


class GateError(MptError):
    """A gate: a difference that is outside the margin or not decidable, an export that loses too much."""

    exit_code = 8


class RankError(MptError):
    """Another process of the same training was lost, or could not be reached."""

    exit_code = 9


class MayFitError(MptError):
    """`mpt plan --gate`: it may fit, by luck or by emptying the cache in every step."""

    exit_code = 10


class Interrupted(MptError):
    """SIGINT or SIGTERM arrived and the run was saved. `exit_code` is 128 plus the signal's number."""

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal_number


class Terminated(BaseException):
    """SIGTERM or SIGHUP outside of training."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(f"Stopped by {signal.Signals(signal_number).name}.")
        self.exit_code = 128 + signal_number

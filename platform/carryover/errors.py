"""Errors that a user can act on: what was wrong, what was got, what to do.

Every class here is the user's to fix, so the command line prints the message alone and exits
with status 2. Any other exception is ours, and exits with status 1.
"""


class UserError(Exception):
    """Base of all errors caused by input: a file, a flag, a setting, an environment."""


class ConfigError(UserError):
    """A configuration file, key, value or override is wrong."""


class DataError(UserError):
    """A prompts or responses file is missing, malformed, or made for another target."""


class TargetError(UserError):
    """The target model cannot be found, is half-written, or is not what it should be."""


class CheckpointError(UserError):
    """A drafter checkpoint is missing, malformed, or does not fit its target."""


class ServingError(UserError):
    """An endpoint cannot start or answer as configured."""


class EnvironmentProblem(UserError):
    """The machine or installation lacks something that the command needs."""

"""What ends a command early: a mistake in it, or the failure of a run."""


class UsageError(Exception):
    """Its text says what is wrong and what to do about it."""


class RunFailed(Exception):
    """A training process ended without a result."""

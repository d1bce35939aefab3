"""The mistakes a user can make, as opposed to failures of a run."""


class UsageError(Exception):
    """Its text says what is wrong and what to do about it."""

"""The one exception type for a user's mistake. Knows nothing of what went wrong."""


class InputError(ValueError):
    """A mistake in what the user gave: the message is one line with the cause, the numbers and what to change."""

"""What can befall an accepted request. Knows causes as text only."""


class RequestError(RuntimeError):
    """A request ended by no fault of its own: the step that it was in raised. The message names the cause."""


class EngineDeadError(RuntimeError):
    """The engine's loop ended, and no request can be answered any more."""

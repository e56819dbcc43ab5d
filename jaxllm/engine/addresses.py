"""Where the processes of a server meet: sockets in a folder of their own. Knows names; opens nothing."""

from pathlib import Path

MOST_WAITING = 2000  # messages to a front that it has not read, one for each step


def front_address(folder: Path, front: int) -> str:
    """Names the socket at which a front hears of the engine."""
    return f"ipc://{folder}/front-{front}"


def engine_address(folder: Path, generation: int) -> str:
    """Names the socket at which the n-th engine since the server's start takes requests."""
    return f"ipc://{folder}/engine-{generation}"

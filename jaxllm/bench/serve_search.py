"""The highest rate at which enough requests meet their targets. Knows figures and rates; sends nothing itself."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from jaxllm.bench.serve_figures import ServeFigures

_MOST_DOUBLINGS = 16  # of the first rate
_MOST_HALVINGS = 6  # each takes twice as long as the one before


@dataclass(frozen=True, slots=True)
class Found:
    """What a search came to; without a rate even the lowest one tried was too high."""

    rate: float | None
    trials: tuple[ServeFigures, ...]  # in the order in which they ran
    is_limited: bool = True  # False where the targets held however fast requests came: there were too few to tell


async def find_max_rate(
    measure: Callable[[float, int], Awaitable[ServeFigures]], start: float, share: float, tolerance: float
) -> Found:
    """Doubles or halves the rate until it is between one that holds and one that does not, then bisects.

    `measure` runs the requests at a rate; its second argument numbers the trials, so that each has tokens of its own.
    """
    trials: list[ServeFigures] = []

    async def holds(rate: float) -> bool:
        figures = await measure(rate, len(trials))
        trials.append(figures)
        return figures.good_share >= share

    low, high, rate = None, None, start
    while low is None or high is None:
        if await holds(rate):
            low = rate
            if trials[-1].request_throughput < rate / 2:  # all came at once, as far as the server is concerned
                return Found(max(trial.request_throughput for trial in trials), tuple(trials), is_limited=False)
        else:
            high = rate
        if len(trials) > (_MOST_HALVINGS if low is None else _MOST_DOUBLINGS):
            break
        rate = rate / 2 if low is None else rate * 2
    while low is not None and high is not None and high / low > 1 + tolerance:
        rate = (low * high) ** 0.5
        if await holds(rate):
            low = rate
        else:
            high = rate
    return Found(low, tuple(trials))

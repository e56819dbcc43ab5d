"""How many tokens a step may have so that running requests get their next token in time. Knows sizes and seconds.

No clock and no requests: whoever runs the steps tells what they took, and the scheduler asks before it puts one
together. What a step takes is learned by its size, the tokens with padding, since that is what the device computes, and
a share of the context that it reads. Nothing is known at the start, so sizes are tried from the smallest on, the next
one when the one before has been seen to do.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

logger = logging.getLogger(__name__)

_WEIGHT = 0.2  # of a new observation in a mean
_MEMORY = 0.995  # of the share of the context, from step to step
_PATIENCE = 256  # steps after which a size that took too long is tried again: it may have been an accident


@dataclass(slots=True)
class _Seen:
    """What steps of one size took, and how much context they read, in the mean."""

    last: int  # the observation, counted over all sizes
    seconds: float = 0.0
    num_context: float = 0.0
    count: int = 0


class StepTime:
    """What a step takes: a number for each size, and one number for each token of context."""

    def __init__(self) -> None:
        self.num_observed = 0
        self._seen: dict[tuple[int, bool], _Seen] = {}
        self._products = 0.0  # of deviations in context and in time, within a size
        self._squares = 0.0  # of deviations in context

    @property
    def seconds_per_context_token(self) -> float:
        return max(self._products / self._squares, 0.0) if self._squares else 0.0

    def observe(self, num_tokens: int, is_decode: bool, num_context: int, seconds: float) -> None:
        """Takes note of a step. The first of a size does not count, since it may have been compiled meanwhile."""
        self.num_observed += 1
        seen = self._seen.setdefault((num_tokens, is_decode), _Seen(self.num_observed))
        seen.last = self.num_observed
        seen.count += 1
        if seen.count == 2:
            seen.seconds, seen.num_context = seconds, num_context
        elif seen.count > 2:
            more_context = num_context - seen.num_context
            longer = min(seconds - seen.seconds, seen.seconds)  # a hiccup counts as twice the time at most
            self._products = _MEMORY * self._products + more_context * longer
            self._squares = _MEMORY * self._squares + more_context * more_context
            seen.seconds += _WEIGHT * longer
            seen.num_context += _WEIGHT * more_context

    def predict(self, num_tokens: int, is_decode: bool, num_context: int) -> float | None:
        """Gives the seconds that a step of this size will take; None if none has been seen."""
        seen = self._seen.get((num_tokens, is_decode))
        if seen is None or seen.count < 2:
            return None
        return max(seen.seconds + self.seconds_per_context_token * (num_context - seen.num_context), 0.0)

    def age(self, num_tokens: int, is_decode: bool) -> int:
        """Counts the steps since one of this size."""
        return self.num_observed - self._seen[num_tokens, is_decode].last


class Pace:
    """A target for the time between two tokens of a request, and the steps that meet it.

    `sizes_of` gives what a step of so many requests may be padded to, ascending, when it is not one token for each;
    `decode_size` what it is padded to when it is.
    """

    def __init__(
        self, target_seconds: float, sizes_of: Callable[[int], Sequence[int]], decode_size: Callable[[int], int]
    ) -> None:
        self.time = StepTime()
        self._target = target_seconds
        self._sizes_of = sizes_of
        self._decode_size = decode_size
        self._has_warned = False

    def most_tokens(self, num_running: int, num_requests: int, num_context: int) -> int:
        """Gives the most tokens of a step of `num_requests`, which has more than one for each running one, or 0."""
        most = 0
        for size in self._sizes_of(num_requests):
            if size <= num_running:
                continue
            seconds = self.time.predict(size, False, num_context + size)
            if seconds is None:
                return size
            if seconds > self._target:
                if self.time.age(size, False) > _PATIENCE:
                    return size
                break
            most = size
        if not most:
            self._warn(num_running, num_context)
        return most

    def _warn(self, num_running: int, num_context: int) -> None:
        alone = self.time.predict(self._decode_size(num_running), True, num_context + num_running)
        if self._has_warned or alone is None or alone <= self._target:
            return
        self._has_warned = True
        logger.warning(
            "target_tpot_ms %g cannot be met: a step of %d decoding requests takes %.3g ms without any prompt; prompts "
            "wait until fewer decode. Raise the target or lower max_num_seqs",
            self._target * 1e3,
            num_running,
            alone * 1e3,
        )

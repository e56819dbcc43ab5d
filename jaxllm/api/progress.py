"""The progress bar of a call that runs many requests, with its tokens per second. Knows counts only."""

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

from jaxllm.api.driver import Follower
from jaxllm.api.outputs import OutputDelta

type UseTqdm = bool | Callable[..., Any]


class Progress:
    """Counts what comes and shows it whenever a request ends."""

    def __init__(self, bar: Any):
        self._bar = bar
        self._start = time.monotonic()
        self._num_prompt_tokens = 0
        self._num_output_tokens = 0
        self._ended: set[str] = set()

    def take(self, follower: Follower, delta: OutputDelta) -> None:
        """Counts what came new for a request."""
        self._num_output_tokens += len(delta.token_ids)
        if not follower.finished or follower.request_id in self._ended:
            return
        self._ended.add(follower.request_id)
        self._num_prompt_tokens += len(follower.prompt.token_ids)
        seconds = time.monotonic() - self._start or 1e-9
        speeds = self._num_prompt_tokens / seconds, self._num_output_tokens / seconds
        self._bar.set_postfix_str("est. speed input: {:.2f} toks/s, output: {:.2f} toks/s".format(*speeds))
        self._bar.update(1)

    def end_one(self) -> None:
        """Counts one that ended, where no speed is to be told."""
        self._bar.update(1)


@contextmanager
def progress(use_tqdm: UseTqdm, total: int, desc: str) -> Iterator[Progress]:
    """Shows a bar while the body runs: tqdm's on a terminal with True, the caller's own if one is given."""
    if callable(use_tqdm):
        bar = use_tqdm(total=total, desc=desc)
    else:
        bar = tqdm(total=total, desc=desc, unit="req", dynamic_ncols=True, disable=None if use_tqdm else True)
    with contextlib.closing(bar):
        yield Progress(bar)

"""A bar on the terminal while something is measured. Knows counts only."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm


@contextmanager
def progress_bar(what: str, total: int) -> Iterator[Callable[[int], object]]:
    """Shows how many of `total` are done, a few times a second; nothing where stderr is no terminal."""
    with tqdm(total=total, desc=what, disable=None, mininterval=0.5, leave=False) as bar:
        yield bar.update

"""Maps byte ranges of a file and says plainly why it cannot. Knows no file format."""

import mmap
from pathlib import Path

import numpy as np

from jaxllm.config.errors import InputError

_LFS_POINTER = b"version https://git-lfs"


def open_error(path: Path, error: OSError) -> InputError:
    """Words the failure to open a file as one line."""
    return InputError(f"cannot read {path}: {error.strerror or error}")


def file_start(path: Path, length: int) -> tuple[bytes, int]:
    """Reads the first bytes of a file (fewer when it is shorter) and its size."""
    try:
        with path.open("rb") as file:
            return file.read(length), path.stat().st_size
    except OSError as error:
        raise open_error(path, error) from None


def refuse_lfs_pointer(path: Path, start: bytes) -> None:
    """Refuses the text that a git clone leaves in place of a large file."""
    if start.startswith(_LFS_POINTER[: len(start)]) and start:
        raise InputError(f"{path} is a Git LFS pointer, not the file itself: run `git lfs pull` in its folder")


def map_bytes(path: Path, start: int, stop: int) -> np.ndarray:
    """Maps bytes start:stop, read-only. The pages leave memory with the last array that shows them."""
    mapping, shown = _map(path, start, stop)
    if mapping is not None:
        mapping.madvise(mmap.MADV_WILLNEED)
    return shown


def map_columns(path: Path, start: int, num_rows: int, row_bytes: int, first: int, last: int) -> np.ndarray:
    """Maps bytes first:last of each row of a table that begins at byte `start`; the other bytes are not read."""
    stop = start + (num_rows - 1) * row_bytes + last
    mapping, shown = _map(path, start + first, stop)
    offset = (start + first) % mmap.ALLOCATIONGRANULARITY
    if mapping is not None:
        mapping.madvise(mmap.MADV_RANDOM)  # no pages before and behind those that are named
        for row in range(num_rows):
            begin, end = offset + row * row_bytes, offset + row * row_bytes + last - first
            page = begin - begin % mmap.PAGESIZE
            mapping.madvise(mmap.MADV_WILLNEED, page, end - page)
    return np.lib.stride_tricks.as_strided(shown, (num_rows, last - first), (row_bytes, 1), writeable=False)


def _map(path: Path, start: int, stop: int) -> tuple[mmap.mmap | None, np.ndarray]:
    if start == stop:
        return None, np.empty(0, np.uint8)
    # One map per read: pages of a map of the whole file would stay resident until the map is closed.
    page_start = start - start % mmap.ALLOCATIONGRANULARITY
    try:
        with path.open("rb") as file:
            mapping = mmap.mmap(file.fileno(), stop - page_start, access=mmap.ACCESS_READ, offset=page_start)
    except OSError as error:
        raise open_error(path, error) from None
    except ValueError:
        size = path.stat().st_size
        raise InputError(f"{path} shrank to {size} bytes while it was read; {stop} are needed") from None
    return mapping, np.frombuffer(mapping, np.uint8, count=stop - start, offset=start - page_start)

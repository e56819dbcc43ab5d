"""The memory that a rank receives small parts in: sizes and addresses, as the kernel and the engine take them.

An inbox begins with the number of the last exchange of each chunk. Two places for each word of each rank follow, for
odd and for even exchanges, of 64 bits each; a rank's places for itself stay empty.
"""

from collections.abc import Sequence

import numpy as np

CHUNK = 512  # words of a program, always the same ones
MOST_WORDS = 1 << 20  # of a part, between two ranks; more ranks send as much in all


def most_words(num_ranks: int) -> int:
    """The largest part that is exchanged so, in words of 32 bits."""
    return max(CHUNK, MOST_WORDS // max(1, num_ranks - 1) // CHUNK * CHUNK)


def inbox_words(num_ranks: int) -> int:
    """The size of a rank's inbox in words of 32 bits, which have to be zeros at first."""
    words = most_words(num_ranks)
    return words // CHUNK + 2 * num_ranks * words * 2


def num_peer_words(num_ranks: int) -> int:
    """How many words `all_reduce` takes as peers."""
    return 4 + 2 * num_ranks


def ranks_of(num_words: int) -> int:
    """How many ranks so many words of peers tell of."""
    return (num_words - 4) // 2


def peer_words(rank: int, addresses: Sequence[int]) -> np.ndarray:
    """What `all_reduce` takes as peers: of a rank, with the addresses of all ranks' inboxes."""
    words = np.array([rank, addresses[rank], *addresses], np.uint64)
    return words.view(np.int32)  # little-endian: the lower half comes first

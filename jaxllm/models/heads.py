"""Attention heads -> equal shares for tensor ranks. Knows numbers of heads; no arrays, no devices, no model.

Ranks must be equal in shape, and a query head must lie with its own KV head. So heads are laid out in *slots*: each
holds one KV head and has places for `group` of its query heads, and each rank has the same number of slots. Where the
numbers do not divide, three things are allowed: a KV head is repeated in several slots, which share its query heads;
places stay empty; whole slots do. What is empty holds zeros, which add nothing to the output.

With N query heads, K KV heads and R replicas of each KV head, a slot has g = ceil(N / K / R) places, and each of the
ranks has s = ceil(K R / ranks) slots. The waste is the share of places that stay empty: 1 - N / (ranks s g). Of the
layouts whose waste is at most a third, that with the fewest slots on a rank is chosen (they are what KV cache costs),
of several the one with the fewest places (the work), and of these the one with the fewest replicas:

    N   K   ranks   R   slots of a rank   places of a slot   waste
    32  8   4       1   2                 4                  none
    9   3   2       1   2                 3                  1 of 4: a slot of the last rank is empty
    9   3   4       1   1                 3                  1 of 4: the last rank is empty
    14  2   4       2   1                 4                  1 of 8; with R = 1 half of the ranks would be empty
    32  2   8       4   1                 4                  none; with R = 3 a third
    9   3   8       -                                        R = 1: 5 of 8, R = 2: 7 of 16, R = 3: 7 of 16

A larger R with as many places has no fewer slots. So in the layout chosen every replica holds a query head.
"""

from collections.abc import Callable
from dataclasses import dataclass

from jaxllm.config.errors import InputError

_MOST_WASTE = (1, 3)


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """Which slot holds which heads. Slots are numbered over all ranks; rank r has the r-th equal part of them.

    Replica i of KV head k is slot k * replicas + i; the slots behind the last are empty.
    """

    num_q_heads: int
    num_kv_heads: int
    tensor: int
    replicas: int
    group: int
    num_slots: int

    @property
    def places(self) -> int:
        """Places for query heads in all slots."""
        return self.num_slots * self.group

    @property
    def is_plain(self) -> bool:
        """Tells whether nothing is repeated and nothing empty: the slots are the KV heads."""
        return self.num_slots == self.num_kv_heads and self.places == self.num_q_heads

    def kv_head(self, slot: int) -> int | None:
        """Gives the KV head of a slot; None where the slot is empty."""
        head = slot // self.replicas
        return head if head < self.num_kv_heads else None

    def q_heads(self, slot: int) -> range:
        """Gives the query heads of a slot, which take its first places in this order."""
        head = self.kv_head(slot)
        if head is None:
            return range(0)
        each = self.num_q_heads // self.num_kv_heads
        first = slot % self.replicas * self.group
        return range(head * each + first, head * each + min(first + self.group, each))

    def describe(self) -> str:
        """Says what is repeated and what is empty."""
        said = [f"each KV head is held {self.replicas} times"] if self.replicas > 1 else []
        if empty := self.places - self.num_q_heads:
            said.append(f"{empty} of {self.places} places of query heads are empty ({empty / self.places:.0%})")
        heads = f"{self.num_q_heads} query and {self.num_kv_heads} KV heads"
        return f"{heads} on {self.tensor} tensor ranks: {', '.join(said) or 'they divide evenly'}"


def lay_out_heads(
    num_q_heads: int, num_kv_heads: int, tensor: int, fits: Callable[[int], bool] = lambda tensor: True
) -> HeadLayout:
    """Deals the heads to the tensor ranks. `fits` says what else a number of ranks must do to be worth naming.

    Raises:
        InputError: every layout would leave more than a third of the places empty.
    """
    layout = _layout(num_q_heads, num_kv_heads, tensor)
    if layout is None:
        raise InputError(
            f"tensor_parallel_size {tensor}: {num_q_heads} query and {num_kv_heads} KV heads cannot be dealt to "
            f"{tensor} ranks without leaving more than a third of their places empty: "
            f"{_sizes_that_do(num_q_heads, num_kv_heads, fits)} would do"
        )
    return layout


def check_ffn(num_q_heads: int, num_kv_heads: int, d_ff: int, tensor: int) -> None:
    """Refuses a number of ranks to which the feed-forward cannot be dealt evenly.

    Raises:
        InputError: with the sizes that would do for it and for the heads.
    """
    if d_ff % tensor:
        sizes = _sizes_that_do(num_q_heads, num_kv_heads, lambda ranks: d_ff % ranks == 0)
        raise InputError(
            f"tensor_parallel_size {tensor}: d_ff {d_ff:,} (config.json: intermediate_size) is not a multiple of "
            f"{tensor}: {sizes} would do"
        )


def _sizes_that_do(num_q_heads: int, num_kv_heads: int, fits: Callable[[int], bool]) -> str:
    """Lists the numbers of ranks, up to one for each query head, as words."""
    ranks = range(1, num_q_heads + 1)
    sizes = [str(t) for t in ranks if fits(t) and _layout(num_q_heads, num_kv_heads, t) is not None]
    return " or ".join([", ".join(sizes[:-1]), sizes[-1]]) if len(sizes) > 1 else f"only {sizes[0]}"


def _layout(num_q_heads: int, num_kv_heads: int, tensor: int) -> HeadLayout | None:
    each = num_q_heads // num_kv_heads
    part, whole = _MOST_WASTE
    found = []
    for replicas in range(1, each + 1):
        group = -(-each // replicas)
        num_slots = -(-num_kv_heads * replicas // tensor) * tensor
        if whole * (num_slots * group - num_q_heads) <= part * num_slots * group:
            found.append(HeadLayout(num_q_heads, num_kv_heads, tensor, replicas, group, num_slots))
    return min(found, key=lambda layout: (layout.num_slots, layout.places, layout.replicas), default=None)

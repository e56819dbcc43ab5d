"""Bytes -> blocks: how large the KV pool is, and the start-up table that says so. Knows sizes; no scheduler."""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxlib._jax import Device

from jaxllm.config.engine_args import EngineArgs
from jaxllm.config.errors import InputError
from jaxllm.mesh.targets import is_compile_only, memory_of
from jaxllm.models.config import ModelConfig
from jaxllm.scheduler.kv_groups import KVGroups

CPU_POOL_BYTES = 1 << 30  # vLLM asks for a size on a CPU; a first run should not need one
_SMALL_TEMPORARIES = 64 << 20  # scratch of single kernels, which does not grow with the step
_GRID = 64  # the number of blocks is a compiled shape: a coarse one keeps caches of executables warm


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Where the memory of each device goes, in bytes, and what the pool of a data rank holds.

    `device` is 0 where no limit is known.
    """

    device: int
    weights: int
    temporaries: int
    block_bytes: int
    num_blocks: int
    tokens_per_block: float
    max_model_len: int
    blocks_per_request: int  # that a request of max_model_len tokens ever holds at once
    inbox: int = 0  # into which other tensor ranks write

    @property
    def pool(self) -> int:
        return self.num_blocks * self.block_bytes

    @property
    def num_tokens(self) -> int:
        """Tokens that the pool holds, all groups counted; block 0 is reserved."""
        return int((self.num_blocks - 1) * self.tokens_per_block)

    @property
    def bytes_per_token(self) -> float:
        return self.block_bytes / self.tokens_per_block

    def rows(self) -> list[tuple[str, str]]:
        """The start-up table: label and value."""
        rows = [
            ("weights", show_bytes(self.weights)),
            ("KV pool", f"{show_bytes(self.pool)} in {self.num_blocks:,} blocks, {self.num_tokens:,} tokens"),
            ("KV per token", f"{self.bytes_per_token:,.0f} bytes"),
            ("largest temporary", show_bytes(self.temporaries)),
        ]
        if self.inbox:
            rows.append(("inbox of tensor ranks", show_bytes(self.inbox)))
        if self.device:
            taken = self.weights + self.pool + self.temporaries + self.inbox
            rows.append(("left", show_bytes(self.device - taken)))
        full = (self.num_blocks - 1) / self.blocks_per_request
        rows.append(("full-length requests", f"{full:,.1f} of {self.max_model_len:,} tokens fit at once"))
        return rows


def block_bytes(cfg: ModelConfig, block_size: int, itemsize: int, num_shares: int = 1) -> int:
    """Bytes that one physical block, which serves the layers of one group, takes on each of its tensor ranks."""
    return cfg.kv_layout.layers_per_group * 2 * (cfg.num_kv_heads // num_shares) * block_size * cfg.head_dim * itemsize


def temporaries_bound(cfg: ModelConfig, num_tokens: int, num_requests: int, num_shares: int = 1) -> int:
    """Bytes that the largest step takes at most beside weights and pool: its tokens' features in a layer, its logits.

    Compiled programs took 0.7 to 0.8 of the first part (docs/startup.md); a start compares when it has compiled one.
    """
    itemsize = jnp.dtype(cfg.dtype).itemsize
    qkv = (cfg.num_q_heads + 2 * cfg.num_kv_heads) * cfg.head_dim
    layer = (3 * cfg.d_ff + qkv + cfg.num_q_heads * cfg.head_dim) // num_shares + 2 * cfg.d_model
    logits = 3 * num_requests * cfg.vocab_size * 4 // num_shares  # as they are, exchanged, and in order
    return num_tokens * layer * itemsize + logits + _SMALL_TEMPORARIES


def plan_memory(
    args: EngineArgs,
    cfg: ModelConfig,
    devices: Sequence[Device],
    *,
    chunk: int,
    num_shares: int = 1,
    weights: int,
    temporaries: int,
    inbox: int = 0,
    kv_dtype: str | None = None,
    are_there: bool = False,
) -> MemoryPlan:
    """Sizes the pool, and the longest request if the user leaves it open; the weights are not on the device yet.

    `chunk` is the most tokens of one request that a step computes: windows give nothing back within it. `num_shares`
    tensor ranks share the KV heads; weights, temporaries and the `inbox` of other ranks are those of one device.
    `kv_dtype` is the type of the cache, if not the model's. `are_there` says that the caller's program holds the
    weights already, and that they count as its other arrays do.

    Raises:
        InputError: nothing is left for the pool, or not enough for one request of max_model_len.
    """
    per_block = block_bytes(cfg, args.block_size, jnp.dtype(kv_dtype or cfg.dtype).itemsize, num_shares)
    num_groups = len(cfg.kv_layout.windows)
    device = device_memory(devices[0])
    if args.num_gpu_blocks_override is not None:
        num_blocks = args.num_gpu_blocks_override
    else:
        coming = 0 if are_there else weights
        num_blocks = on_grid(pool_bytes(args, devices, device, coming, temporaries + inbox) // per_block)
    tokens_per_block = args.block_size / num_groups
    groups = KVGroups(cfg.kv_layout.windows)

    def blocks_for(num_tokens: int) -> int:
        return groups.num_blocks(num_tokens, args.block_size, chunk)

    wanted = args.max_model_len or cfg.max_position
    fitting = bisect_right(range(wanted + 1), num_blocks - 1, key=blocks_for) - 1
    if fitting < (2 if args.max_model_len is None else wanted):
        needed = blocks_for(wanted) + 1
        if args.num_gpu_blocks_override is not None:
            more = f"num_gpu_blocks_override to {needed:,}"
        else:
            more = f"kv_cache_memory_bytes to {above_on_grid(needed) * per_block:,}"
            more += " or gpu_memory_utilization" if device and args.kv_cache_memory_bytes is None else ""
        raise InputError(
            f"the KV pool of {num_blocks:,} blocks ({show_bytes(num_blocks * per_block)}) holds {max(fitting, 0):,} "
            f"tokens, fewer than max_model_len {wanted:,}: lower max_model_len, or raise {more}"
        )
    return MemoryPlan(
        device=device,
        weights=weights,
        temporaries=temporaries,
        block_bytes=per_block,
        num_blocks=num_blocks,
        tokens_per_block=tokens_per_block,
        max_model_len=min(wanted, fitting),
        blocks_per_request=blocks_for(min(wanted, fitting)),
        inbox=inbox,
    )


def pool_bytes(args: EngineArgs, devices: Sequence[Device], total: int, weights: int, temporaries: int) -> int:
    """The pool's share of a device: what the user says, or what weights and temporaries leave of the GPU's share."""
    if args.kv_cache_memory_bytes is not None:
        return args.kv_cache_memory_bytes
    if devices[0].platform == "cpu":
        return min(CPU_POOL_BYTES, host_memory() // 2) // len(devices)
    used = weights + max(map(memory_in_use, devices))  # whatever else the process holds is left alone
    free = int(total * args.gpu_memory_utilization) - used - temporaries
    if free <= 0:
        raise InputError(
            f"no memory is left for the KV pool: {args.gpu_memory_utilization:.0%} of {show_bytes(total)} less "
            f"{show_bytes(used)} in use ({show_bytes(weights)} of it weights) and {show_bytes(temporaries)} of "
            "temporaries; raise gpu_memory_utilization or lower max_num_batched_tokens"
        )
    return free


def device_memory(device: Device) -> int:
    """Bytes that the process can have on the device; 0 where the platform does not say (a CPU)."""
    if is_compile_only(device):
        return memory_of(device)
    stats = device.memory_stats() if device.platform != "cpu" else None
    return int(stats["bytes_limit"]) if stats else 0


def memory_in_use(device: Device) -> int:
    """Bytes that the process's arrays take on the device now; 0 where the platform does not say."""
    stats = device.memory_stats() if device.platform != "cpu" and not is_compile_only(device) else None
    return int(stats["bytes_in_use"]) if stats else 0


def host_memory() -> int:
    """Bytes of host memory that are available now (Linux), or 8 GiB where it is not known."""
    try:
        with open("/proc/meminfo") as lines:
            return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return 8 << 30


def on_grid(num_blocks: int) -> int:
    """Rounds down to 1/64 of the size, so that a little less free memory does not change a compiled shape."""
    step = _grid_step(num_blocks)
    return num_blocks // step * step


def above_on_grid(num_blocks: int) -> int:
    """Rounds up to the same grid."""
    step = _grid_step(num_blocks)
    return -(-num_blocks // step) * step


def _grid_step(num_blocks: int) -> int:
    return 2 ** max(0, num_blocks.bit_length() - int(math.log2(_GRID)) - 1)


def bytes_per_device(tree: object) -> int:
    """Bytes that the arrays of a pytree take on each device, of which all hold equal parts."""
    leaves = jax.tree.leaves(tree)
    return sum(int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize for leaf in leaves)


def show_bytes(num_bytes: float) -> str:
    """Bytes for people."""
    for unit in ("bytes", "KiB", "MiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "bytes" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.2f} GiB"

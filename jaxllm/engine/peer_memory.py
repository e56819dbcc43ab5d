"""The tensor ranks' inboxes, into which the kernel of small all-reduces writes, and their addresses for the step.

Knows where arrays lie on the devices of this process. Refuses to know what is written there.
"""

import logging
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxllm.engine.step import PEERS
from jaxllm.kernels.all_reduce.inbox import inbox_words, num_peer_words, peer_words
from jaxllm.mesh.peer_access import find_obstacle

logger = logging.getLogger(__name__)


def can_write_to_peers(mesh: Mesh) -> bool:
    """Tells whether the tensor ranks of this process's GPUs reach each other's memory; says so once where not."""
    if mesh.shape["tensor"] == 1:
        return False
    if mesh.devices.flat[0] not in jax.devices():
        return True  # described, to compile for: those that will be there are taken to
    for devices in mesh.devices:
        own = [device.process_index == jax.process_index() for device in devices]
        if any(own) and (obstacle := find_obstacle(devices)):
            logger.info("all-reduce: NCCL adds up small parts too: %s", obstacle)
            return False
    return True


class PeerMemory(NamedTuple):
    """An inbox of each device, which must live as long as steps run, and the words that its program takes."""

    inboxes: jax.Array
    words: jax.Array


def make_peer_memory(mesh: Mesh) -> PeerMemory:
    """Makes empty inboxes. All devices of a data rank have to be this process's."""
    shape = (mesh.shape["data"], mesh.shape["tensor"])
    sharding = NamedSharding(mesh, PEERS.stacked)
    make = jax.jit(lambda: jnp.zeros((*shape, inbox_words(shape[1])), jnp.int32), out_shardings=sharding)
    inboxes = jax.block_until_ready(make())
    addresses = {
        tuple(part.start or 0 for part in shard.index[:2]): shard.data.unsafe_buffer_pointer()
        for shard in inboxes.addressable_shards
    }
    words = np.zeros((*shape, num_peer_words(shape[1])), np.int32)
    for data, tensor in addresses:
        words[data, tensor] = peer_words(tensor, [addresses[data, rank] for rank in range(shape[1])])
    return PeerMemory(inboxes, jax.make_array_from_callback(words.shape, sharding, lambda index: words[index]))

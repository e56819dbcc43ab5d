"""Several processes -> one set of devices: jax.distributed, and how long it waits for a lost one. Knows no models."""

import socket

import jax
from jax.sharding import Mesh
from jaxlib._jax import Device

from jaxllm.mesh.held_line import hold_line

# Longer than the engine's own watch over its processes, which ends them with a line instead of an abort.
HEARTBEAT_TIMEOUT = 60  # seconds
SHUTDOWN_TIMEOUT = 10  # seconds


def join_devices(rank: int, count: int, address: str, port: int, timeout: float) -> bool:
    """Joins the devices of all processes; False where the caller has joined them already.

    Raises:
        ValueError: the caller's processes are others, or devices were in use before.
        OSError: the port is taken.
    """
    if jax.distributed.is_initialized():
        found = (jax.process_index(), jax.process_count())
        if found != (rank, count):
            raise ValueError(
                f"jax.distributed is initialised already, as process {found[0]} of {found[1]}, not {rank} of {count}"
            )
        return False
    if rank == 0:
        socket.create_server(("", port)).close()  # jax would abort the process
        coordinator = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
    else:
        coordinator = f"127.0.0.1:{hold_line(address, port, timeout)}"
    # Its answer to SIGTERM would take the place of the caller's, or of the end that the signal means by itself.
    had_preemption = getattr(jax.config, "jax_enable_preemption_service", None)
    if had_preemption is not None:
        jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            coordinator,
            count,
            rank,
            heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT,
            initialization_timeout=int(timeout),
            shutdown_timeout_seconds=SHUTDOWN_TIMEOUT,
        )
    except RuntimeError as error:
        raise ValueError(f"jax.distributed cannot be initialised: {str(error).strip().splitlines()[0]}") from None
    finally:
        if had_preemption is not None:
            jax.config.update("jax_enable_preemption_service", had_preemption)
    return True


def leave_devices() -> None:
    """Waits for the other processes to leave too, for a while."""
    jax.distributed.shutdown()


def ordered_devices() -> list[Device]:
    """Lists the devices of all processes, those of one process side by side."""
    return sorted(jax.devices(), key=lambda device: (device.process_index, device.id))


def processes_of(mesh: Mesh) -> list[int]:
    """Lists the processes whose devices a mesh has."""
    return sorted({device.process_index for device in mesh.devices.flat})


def local_devices(mesh: Mesh) -> list[Device]:
    """Lists a mesh's devices of this process; all of them where they exist in name only."""
    devices = list(mesh.devices.flat)
    return devices if len(processes_of(mesh)) == 1 else [d for d in devices if d.process_index == jax.process_index()]

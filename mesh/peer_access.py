"""Whether the GPUs of this process can write into each other's memory, and permission to do so. Knows CUDA's driver."""

import ctypes
import logging
from collections.abc import Sequence
from typing import Any

from jaxlib._jax import Device

logger = logging.getLogger(__name__)

_ALREADY = 704  # CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED


def find_obstacle(devices: Sequence[Device]) -> str | None:
    """Says in one line why some of these GPUs cannot reach each other's memory; None where all can, from now on."""
    if len({device.process_index for device in devices}) > 1:
        return "the tensor ranks are in several processes"
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        ordinals = [_ordinal(device) for device in devices]
        contexts = [_context(driver, ordinal) for ordinal in ordinals]
        for own, context in zip(ordinals, contexts, strict=True):
            _check(driver.cuCtxPushCurrent_v2(context), "cuCtxPushCurrent")
            try:
                for other, its_context in zip(ordinals, contexts, strict=True):
                    if own != other and (obstacle := _enable(driver, own, other, its_context)):
                        return obstacle
            finally:
                driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
    except (OSError, RuntimeError) as error:
        return str(error)
    return None


def _ordinal(device: Device) -> int:
    """CUDA's number of a device in this process."""
    if device.local_hardware_id is None:
        raise RuntimeError(f"{device} has no number in CUDA")
    return device.local_hardware_id


def _context(driver: Any, ordinal: int) -> ctypes.c_void_p:
    """The context that XLA uses too. It is never released: XLA's lives as long as the process."""
    context = ctypes.c_void_p()
    _check(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), ordinal), "cuDevicePrimaryCtxRetain")
    return context


def _enable(driver: Any, own: int, other: int, its_context: ctypes.c_void_p) -> str | None:
    can = ctypes.c_int()
    _check(driver.cuDeviceCanAccessPeer(ctypes.byref(can), own, other), "cuDeviceCanAccessPeer")
    if not can.value:
        return f"GPU {own} cannot reach the memory of GPU {other}"
    status = driver.cuCtxEnablePeerAccess(its_context, 0)
    return None if status in (0, _ALREADY) else f"GPU {own} was refused the memory of GPU {other} (CUDA error {status})"


def _check(status: int, name: str) -> None:
    if status:
        raise RuntimeError(f"{name}: CUDA error {status}")

"""The planner as a Python call. Joins a model's numbers, a device's and the traffic's; prints nothing."""

from collections.abc import Mapping
from typing import Any

from jaxllm.config.engine_args import BLOCK_SIZES, NOT_BUILT
from jaxllm.config.errors import InputError
from jaxllm.mesh.planner import USUAL_BUDGET, Limits, Plan, Traffic, make_plan, mesh_shapes
from jaxllm.planning.devices import find_devices
from jaxllm.planning.model_shape import read_model, shape_of


def plan(
    model: str,
    devices: str,
    *,
    input_len: float = 1024,
    output_len: float = 128,
    request_rate: float | None = None,
    ttft_ms: float | None = None,
    tpot_ms: float | None = None,
    max_num_seqs: int | None = None,
    max_num_batched_tokens: int = USUAL_BUDGET,
    block_size: int = 16,
    gpu_memory_utilization: float = 0.9,
    dtype: str = "auto",
    kv_cache_dtype: str = "auto",
    hf_overrides: Mapping[str, Any] | None = None,
    device_file: str | None = None,
) -> Plan:
    """Says which (data, tensor, pipe) to lay devices out as for a model and its traffic.

    `model` is a packaged name, a known shape such as llama-3.1-70b, a folder, a config.json or a hub id; `devices` is
    such as 8xA100-80G. Lengths are means in tokens; without a rate as many requests run as the targets and the KV pool
    allow.

    Raises:
        InputError: the model or the device is not known, or a number is out of range.
    """
    least = {"input_len": 1, "output_len": 1, "max_num_seqs": 1, "max_num_batched_tokens": 16}
    least |= dict.fromkeys(("request_rate", "ttft_ms", "tpot_ms"), 1e-6)
    given = locals()
    for name, limit in least.items():
        if given[name] is not None and not given[name] >= limit:
            raise InputError(f"{name} must be {f'at least {limit}' if limit >= 1 else 'above 0'}, got {given[name]}")
    if block_size not in BLOCK_SIZES:
        raise InputError(f"block_size must be one of {', '.join(map(str, BLOCK_SIZES))}, got {block_size}")
    if not 0 < gpu_memory_utilization <= 1:
        raise InputError(f"gpu_memory_utilization must be in (0, 1], got {gpu_memory_utilization}")
    count, device = find_devices(devices, device_file)
    cfg = read_model(model, dtype, hf_overrides)
    traffic = Traffic(
        input_len=input_len,
        output_len=output_len,
        request_rate=request_rate,
        ttft=None if ttft_ms is None else ttft_ms / 1e3,
        tpot=None if tpot_ms is None else tpot_ms / 1e3,
    )
    if traffic.longest > cfg.max_position:
        raise InputError(
            f"input_len and output_len, {traffic.longest:,} tokens together, are beyond the model's "
            f"{cfg.max_position:,} positions"
        )
    tensors = sorted({mesh.tensor for mesh in mesh_shapes(count)})
    shape = shape_of(cfg, model, tensors, kv_cache_dtype)
    limits = Limits(
        max_num_seqs=max_num_seqs,
        token_budget=max_num_batched_tokens,
        block_size=block_size,
        memory_share=gpu_memory_utilization,
        stages="pipeline_parallel_size" not in NOT_BUILT,
    )
    return make_plan(shape, device, count, traffic, limits)

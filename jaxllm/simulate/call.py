"""The simulator as a Python call. Joins a model's numbers, a device's, settings and traffic; prints nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxllm.config.engine_args import BLOCK_SIZES
from jaxllm.config.errors import InputError
from jaxllm.engine.buckets import make_buckets
from jaxllm.mesh.cost_model import DeviceSpec, ModelShape
from jaxllm.mesh.planner import Limits, MeshShape, Traffic, memory_use
from jaxllm.planning.devices import find_devices
from jaxllm.planning.model_shape import read_model, shape_of
from jaxllm.scheduler.kv_groups import KVGroups
from jaxllm.scheduler.policy import policy_named
from jaxllm.scheduler.scheduler import SchedulerConfig
from jaxllm.simulate.arrivals import Arrival
from jaxllm.simulate.device import ModelledDevice
from jaxllm.simulate.figures import Figures, draw_figures
from jaxllm.simulate.simulator import Setting
from jaxllm.simulate.simulator import simulate as run


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The engine's flags that a simulation knows, with their names and defaults; limits are of each data rank."""

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_model_len: int | None = None
    block_size: int = 16
    num_gpu_blocks_override: int | None = None
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    scheduling_policy: str = "fcfs"
    max_prefill_tokens: int = 0
    long_prefill_token_threshold: int = 0
    target_tpot_ms: float | None = None
    fill_steps: bool = True  # steps end at the sizes that they are padded to; the engine's always do on a GPU

    def __post_init__(self) -> None:
        least = {"max_num_seqs": 1, "max_num_batched_tokens": 16, "max_model_len": 2, "num_gpu_blocks_override": 2}
        least |= {"max_prefill_tokens": 0, "long_prefill_token_threshold": 0}
        for name, limit in least.items():
            value = getattr(self, name)
            if value is not None and value < limit:
                raise InputError(f"{name} must be at least {limit}, got {value}")
        if self.block_size not in BLOCK_SIZES:
            raise InputError(f"block_size must be one of {', '.join(map(str, BLOCK_SIZES))}, got {self.block_size}")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise InputError(f"gpu_memory_utilization must be in (0, 1], got {self.gpu_memory_utilization}")
        if self.target_tpot_ms is not None and not self.target_tpot_ms > 0:
            raise InputError(f"target_tpot_ms must be above 0, got {self.target_tpot_ms}")
        try:
            policy_named(self.scheduling_policy)
        except ValueError as error:
            raise InputError(f"scheduling_policy: {error}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model on devices, for meshes of them."""

    shape: ModelShape
    device: DeviceSpec
    num_devices: int


def find_subject(
    model: str,
    devices: str,
    *,
    dtype: str = "auto",
    kv_cache_dtype: str = "auto",
    hf_overrides: Mapping[str, Any] | None = None,
    device_file: str | None = None,
) -> Subject:
    """Reads a model's configuration and a device's description.

    Raises:
        InputError: one of them is not known.
    """
    count, device = find_devices(devices, device_file)
    tensors = [size for size in range(1, count + 1) if count % size == 0]
    shape = shape_of(read_model(model, dtype, hf_overrides), model, tensors, kv_cache_dtype)
    return Subject(shape=shape, device=device, num_devices=count)


def meshes(subject: Subject) -> list[MeshShape]:
    """Lists the shapes (data, tensor) of all devices."""
    count = subject.num_devices
    return [MeshShape(count // tensor, tensor) for tensor in range(1, count + 1) if count % tensor == 0]


def simulate(
    model: str,
    devices: str,
    requests: Sequence[Arrival],
    *,
    data_parallel_size: int | None = None,
    tensor_parallel_size: int = 1,
    dtype: str = "auto",
    kv_cache_dtype: str = "auto",
    hf_overrides: Mapping[str, Any] | None = None,
    device_file: str | None = None,
    **options: Any,
) -> Figures:
    """Says how an engine would do with these requests: the real scheduler, steps by the cost model.

    `options` are the fields of `Options`, flags of the engine. Without `data_parallel_size` there are as many copies as
    the devices hold.

    Raises:
        InputError: the model or the device is not known, a number is out of range, or a request could never run.
    """
    subject = find_subject(
        model,
        devices,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        hf_overrides=hf_overrides,
        device_file=device_file,
    )
    return simulate_on(
        subject, mesh_of(subject, data_parallel_size, tensor_parallel_size), requests, Options(**options)
    )


def mesh_of(subject: Subject, data: int | None, tensor: int) -> MeshShape:
    """Lays the devices out.

    Raises:
        InputError: they are not as many.
    """
    if tensor < 1 or (data is not None and data < 1):
        raise InputError(f"data_parallel_size and tensor_parallel_size must be at least 1, got {data} and {tensor}")
    mesh = MeshShape(data or max(subject.num_devices // tensor, 1), tensor)
    if mesh.data * mesh.tensor != subject.num_devices:
        raise InputError(
            f"data_parallel_size {mesh.data} x tensor_parallel_size {mesh.tensor} are {mesh.data * mesh.tensor} "
            f"devices, but devices names {subject.num_devices}"
        )
    return mesh


def simulate_on(subject: Subject, mesh: MeshShape, requests: Sequence[Arrival], options: Options) -> Figures:
    """Runs the requests on one shape of the mesh.

    Raises:
        InputError: the model does not fit the shape, or a request could never run.
    """
    setting = setting_of(subject, mesh, options)
    device = ModelledDevice(subject.shape, subject.device, mesh.tensor)
    return draw_figures(run(requests, setting, device), setting)


def setting_of(subject: Subject, mesh: MeshShape, options: Options) -> Setting:
    """Sizes pool and steps as a start of the engine does.

    Raises:
        InputError: the model cannot be split so, or its weights leave no KV.
    """
    shape = subject.shape
    if mesh.tensor not in shape.shards:
        raise InputError(shape.refused.get(mesh.tensor, f"{mesh.tensor} tensor ranks do not divide the devices"))
    num_blocks, most = options.num_gpu_blocks_override or _num_blocks(subject, mesh, options), shape.max_position
    if options.max_model_len is not None and options.max_model_len > most:
        raise InputError(f"max_model_len {options.max_model_len:,} is beyond the model's {most:,} positions")
    groups, size = KVGroups(shape.group_windows), options.block_size
    wanted = options.max_model_len or most
    chunk = options.max_num_batched_tokens
    fits = groups.num_blocks(wanted, size, chunk) < num_blocks
    max_model_len = wanted if fits else min(wanted, (num_blocks - 1) // len(groups) * size)
    if options.max_model_len is not None and not fits:
        raise InputError(
            f"the KV pool of {num_blocks:,} blocks is smaller than max_model_len {wanted:,}: lower max_model_len"
        )
    buckets = make_buckets(options.max_num_seqs, chunk, -(-max_model_len // size), coarse=False)
    config = SchedulerConfig(
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=chunk,
        max_model_len=max_model_len,
        policy=options.scheduling_policy,
        enable_prefix_caching=options.enable_prefix_caching,
        long_prefill_token_threshold=options.long_prefill_token_threshold,
        max_prefill_tokens=options.max_prefill_tokens,
        step_sizes=buckets.fillable if options.fill_steps else (),
    )
    return Setting(
        scheduler=config,
        buckets=buckets,
        num_blocks=num_blocks,
        block_size=size,
        windows=shape.group_windows,
        num_ranks=mesh.data,
        target_tpot=None if options.target_tpot_ms is None else options.target_tpot_ms / 1e3,
    )


def _num_blocks(subject: Subject, mesh: MeshShape, options: Options) -> int:
    limits = Limits(
        max_num_seqs=options.max_num_seqs,
        token_budget=options.max_num_batched_tokens,
        block_size=options.block_size,
        memory_share=options.gpu_memory_utilization,
    )
    memory = memory_use(subject.shape, subject.device, mesh, Traffic(), limits)
    if memory.num_blocks < 2:
        raise InputError(
            f"{mesh}: {memory.weights / 1e9:,.1f} GB of weights and {memory.temporaries / 1e9:,.1f} GB of temporaries "
            f"leave no KV on {subject.device.name}: split over more devices or raise gpu_memory_utilization"
        )
    return memory.num_blocks

"""A padded step -> the seconds that it takes, by the cost model. Knows shapes and counts; no clock, no queue."""

from dataclasses import replace

from jaxllm.engine.buckets import StepShape
from jaxllm.mesh.cost_model import DeviceSpec, ModelShape, StepLoad, attention_seconds, step_time
from jaxllm.scheduler.batch import RankBatch, ScheduledBatch


class ModelledDevice:
    """Devices of a mesh, each with its share of a model. Padding costs what tokens do; the slowest rank counts."""

    def __init__(self, shape: ModelShape, device: DeviceSpec, tensor: int):
        self._shape, self._device, self._tensor = shape, device, tensor
        self._rest: dict[StepShape, float] = {}  # what a step takes without its contexts

    def device_seconds(self, padded: StepShape, batch: ScheduledBatch) -> float:
        """Gives what the devices take for a step."""
        return max([self._rank_seconds(padded, part) for part in batch.ranks])

    def host_seconds(self, num_requests: int) -> float:
        """Gives what the host takes for a step of so many requests, on all ranks together."""
        return (self._device.host_us + self._device.host_request_us * num_requests) * 1e-6

    def _rank_seconds(self, padded: StepShape, part: RankBatch) -> float:
        load = load_of(padded, part)
        rest = self._rest.get(padded)
        if rest is None:
            spent = step_time(self._shape, self._device, replace(load, context=0, prompt_pairs=0), self._tensor)
            rest = self._rest[padded] = spent.total - spent.host  # the simulator has a host of its own
        kv, attention = attention_seconds(self._shape, self._device, load, self._tensor)
        return rest + kv + attention


def load_of(padded: StepShape, part: RankBatch) -> StepLoad:
    """Gives what a data rank computes in a step, padding included."""
    items = part.items
    if padded.program == "decode":
        context = sum([item.start for item in items]) + len(items)
        return StepLoad(padded.num_requests, context)
    prompts = [item for item in items if item.count > 1]
    decoding = [item.start for item in items if item.count == 1]
    num_decoding = len(decoding)
    return StepLoad(
        num_decoding,
        sum(decoding) + num_decoding,
        padded.num_tokens - num_decoding,
        sum([item.count * (item.start + item.count / 2) for item in prompts]),
        padded.num_requests - num_decoding,
    )

from pathlib import Path

import jax
import pytest

from jaxllm.bench.step_profile import Profile, add_trace
from jaxllm.bench.trace import DeviceEvent, HostEvent, read_trace
from jaxllm.config.errors import InputError

# As XLA writes a trace of a GPU: a plane of streams beside lines that are drawn from them, and a plane of threads, with
# the driver's calls among what the threads did. Offsets and durations are picoseconds, behind a line's nanoseconds.
NAMES = ("hlo_op", "hlo_module", "correlation_id")
GPU_TRACE = """
planes {
  name: "/device:GPU:0"
  lines { id: 1 name: "Stream #7(Compute)" timestamp_ns: 1000
    events { metadata_id: 1 offset_ps: 100000 duration_ps: 50000
      stats { metadata_id: 1 str_value: "fusion.2" } stats { metadata_id: 2 str_value: "jit_decode_T1_B1_M64_greedy" }
      stats { metadata_id: 3 uint64_value: 77 } } }
  lines { id: 2 name: "Stream #9(MemcpyD2H)" timestamp_ns: 1000
    events { metadata_id: 2 offset_ps: 160000 duration_ps: 2000 stats { metadata_id: 3 uint64_value: 78 } } }
  lines { id: 3 name: "XLA Modules" timestamp_ns: 1000 events { metadata_id: 1 offset_ps: 100000 duration_ps: 50000 } }
  event_metadata { key: 1 value { id: 1 name: "loop_fusion_2" } }
  event_metadata { key: 2 value { id: 2 name: "MemcpyD2H" } }
  STATS
}
planes { name: "/device:GPU:1" lines { id: 1 name: "Stream #7(Compute)"
  events { metadata_id: 1 duration_ps: 9000 } } event_metadata { key: 1 value { id: 1 name: "theirs" } } STATS }
planes {
  name: "/host:CPU"
  lines { id: 5 name: "python" timestamp_ns: 1000
    events { metadata_id: 1 offset_ps: 10000 duration_ps: 60000 }
    events { metadata_id: 2 offset_ps: 20000 duration_ps: 30000 stats { metadata_id: 3 uint64_value: 77 } } }
  event_metadata { key: 1 value { id: 1 name: "jaxllm:execute decode T=1 B=1 M=64 greedy" } }
  event_metadata { key: 2 value { id: 2 name: "cuGraphLaunch" } }
  STATS
}
""".replace(
    "STATS", "".join(f'stat_metadata {{ key: {i} value {{ id: {i} name: "{n}" }} }} ' for i, n in enumerate(NAMES, 1))
)


@pytest.fixture
def gpu_trace(tmp_path: Path) -> Path:
    file = tmp_path / "plugins" / "profile" / "now" / "host.xplane.pb"
    file.parent.mkdir(parents=True)
    file.write_bytes(jax.profiler.ProfileData.text_proto_to_serialized_xspace(GPU_TRACE))
    return tmp_path


def test_a_gpus_streams_and_the_calls_that_started_their_work_are_read(gpu_trace: Path):
    trace = read_trace(gpu_trace)
    assert trace.device == "GPU:0"
    kernel = DeviceEvent("loop_fusion_2", 1100, 1150, "fusion.2", "jit_decode_T1_B1_M64_greedy", launch=77)
    assert trace.device_events == (kernel, DeviceEvent("MemcpyD2H", 1160, 1162, launch=78))
    assert not kernel.is_transfer
    assert trace.device_events[1].is_transfer
    step, launch = trace.host_events
    assert (step.name, step.start, step.end) == ("jaxllm:execute decode T=1 B=1 M=64 greedy", 1010, 1070)
    assert launch == HostEvent("cuGraphLaunch", step.thread, 1020, 1050, launch=77)


def test_a_gpus_trace_becomes_a_profile(gpu_trace: Path):
    profile = Profile()
    add_trace(profile, read_trace(gpu_trace), {})
    assert (profile.num_kernels, profile.num_in_graphs, profile.num_unplaced) == (1, 1, 0)
    kind = profile.kinds["decode T=1 B=1"]
    assert (kind.num_steps, kind.busy, kind.calls["cuGraphLaunch"].total) == (1, 50, 30)


def test_a_folder_without_a_trace_is_told(tmp_path: Path):
    with pytest.raises(InputError, match="there is no trace below"):
        read_trace(tmp_path)

import pytest

from jaxllm.bench.profile_report import about, as_json, profile_lines
from jaxllm.bench.step_profile import OUTSIDE, Profile, add_trace, kind_of
from jaxllm.bench.trace import DeviceEvent, HostEvent, Trace

SHAPE = "decode T=4 B=4 M=32 greedy"
PROGRAM = "jit_decode_T4_B4_M32_greedy"


def host(name: str, start: float, end: float, launch: int | None = None, thread: str = "python") -> HostEvent:
    return HostEvent(name, thread, start, end, launch)


def kernel(name: str, start: float, end: float, launch: int | None = None, run: int | None = None) -> DeviceEvent:
    return DeviceEvent(name, start, end, program=PROGRAM, launch=launch, run=run)


def profiled(host_events: list[HostEvent], device_events: list[DeviceEvent], frames: dict | None = None) -> Profile:
    profile = Profile()
    by_start = tuple(sorted(host_events, key=lambda event: (event.start, -event.end)))
    add_trace(profile, Trace("GPU:0", by_start, tuple(device_events)), frames or {})
    return profile


@pytest.fixture
def two_steps() -> Profile:
    """Two decode steps, each one graph: a product, an attention that begins before it has ended, a gap, a norm."""
    events = [
        host("jaxllm:schedule", 0, 10),
        host("jaxllm:build", 10, 30),
        host(f"jaxllm:execute {SHAPE}", 30, 100),
        host("PjitFunction(step)", 40, 90),
        host("cuGraphLaunch", 50, 80, launch=1),
        host("jaxllm:schedule", 110, 120),
        host("jaxllm:build", 120, 130),
        host(f"jaxllm:execute {SHAPE}", 130, 200),
        host("cuGraphLaunch", 140, 190, launch=2),
        host("jaxllm:wait", 200, 600),
        host("jaxllm:update", 600, 610),
        host("Poll", 30, 60, thread="other"),
    ]
    device = [
        DeviceEvent("MemcpyH2D", 55, 60, launch=1),
        kernel("nvjet_hsh_128", 100, 200, launch=1),
        kernel("decode_chunks", 180, 240, launch=1),
        kernel("fusion_7", 260, 300, launch=1),
        kernel("nvjet_hsh_128", 350, 450, launch=2),
        kernel("decode_chunks", 450, 500, launch=2),
        kernel("fusion_9", 500, 540, launch=2),
    ]
    frames = {PROGRAM: dict.fromkeys(("fusion_7", "fusion_9"), ("kernels/rms_norm/reference.py:rms_norm",))}
    return profiled(events, device, frames)


def test_groups_and_gaps_add_up_to_the_steps_time_and_nothing_is_counted_twice(two_steps: Profile):
    kind = two_steps.kinds["decode T=4 B=4"]
    assert kind.num_steps == 2
    busy = {name: tally.busy for name, tally in kind.groups.items()}
    assert busy == {"GEMM": 200, "attention, decode": 40 + 50, "norm + residual": 80}
    assert kind.groups["attention, decode"].total == 60 + 50  # 20 of them beside the product
    assert kind.gap_inside == 260 - 240
    assert kind.gap_before == 350 - 300
    assert kind.wall == 540 - 100


def test_a_kernel_inside_another_ones_time_adds_nothing():
    (kind,) = profiled(
        [host(f"jaxllm:execute {SHAPE}", 0, 10), host("cuLaunchKernel", 1, 2, 1), host("cuLaunchKernel", 2, 3, 2)],
        [kernel("long", 10, 50, 1), kernel("short", 20, 30, 2), kernel("long", 50, 60, 2)],
    ).kinds.values()
    assert kind.kernels["other", "short"].busy == 0
    assert kind.kernels["other", "short"].total == 10
    assert (kind.busy, kind.gap_inside) == (50, 0)


def test_transfers_are_listed_beside_the_steps_time(two_steps: Profile):
    kind = two_steps.kinds["decode T=4 B=4"]
    assert kind.kernels["transfers", "MemcpyH2D"].total == 5
    assert "transfers" not in kind.groups


def test_the_hosts_time_is_that_of_phases_and_of_calls_without_those_within(two_steps: Profile):
    kind = two_steps.kinds["decode T=4 B=4"]
    phases = {name: (tally.count, tally.total) for name, tally in kind.phases.items()}
    assert phases == {"schedule": (2, 20), "build": (2, 30), "execute": (2, 140), "wait": (1, 400), "update": (1, 10)}
    assert (kind.calls["PjitFunction(step)"].busy, kind.calls["PjitFunction(step)"].total) == (20, 50)
    assert (kind.calls["cuGraphLaunch"].busy, kind.calls["cuGraphLaunch"].count) == (80, 2)
    assert kind.phases["execute"].busy == 140 - 50 - 50
    assert kind.others["Poll"].total == 30


def test_it_is_told_whether_kernels_came_out_of_graphs(two_steps: Profile):
    assert (two_steps.num_kernels, two_steps.num_in_graphs, two_steps.num_unplaced) == (6, 6, 0)
    assert "command buffers ON: 100% of 6 kernels" in about(two_steps)
    single = profiled(
        [host(f"jaxllm:execute {SHAPE}", 0, 10), host("cuLaunchKernel", 1, 2, 1)], [kernel("fusion", 5, 6, 1)]
    )
    assert "command buffers OFF: 0% of 1 kernels" in about(single)


def test_a_launch_on_another_thread_after_the_next_steps_begin_goes_to_the_step_of_its_shape():
    events = [
        host(f"jaxllm:execute {SHAPE}", 0, 10),
        host("jaxllm:execute mixed T=64 B=4 M=32 greedy", 20, 30),
        host("cuGraphLaunch", 22, 24, launch=1, thread="launcher"),
    ]
    profile = profiled(events, [kernel("fusion", 30, 40, launch=1)])
    assert profile.kinds["decode T=4 B=4"].busy == 10
    assert profile.kinds["mixed T=64 B=4"].busy == 0


def test_without_launches_the_runs_of_a_program_are_counted_off_against_its_steps():
    events = [host(f"jaxllm:execute {SHAPE}", 0, 10), host(f"jaxllm:execute {SHAPE}", 20, 30)]
    device = [kernel("dot", 5, 15, run=7), kernel("dot", 15, 18, run=7), kernel("dot", 25, 40, run=9)]
    profile = profiled(events, device)
    kind = profile.kinds["decode T=4 B=4"]
    assert (kind.groups["GEMM"].count, kind.gap_inside, kind.gap_before) == (3, 0, 7)
    assert profile.num_unplaced == 0


def test_what_belongs_to_no_step_is_kept_apart_or_goes_by_its_program():
    unknown = DeviceEvent("mystery", 0, 5)
    profile = profiled([], [unknown, kernel("dot", 5, 9)])
    assert profile.kinds[OUTSIDE].busy == 5
    assert profile.kinds["decode T=4 B=4"].busy == 4
    assert profile.num_unplaced == 2


def test_the_tables_are_per_step_and_per_layer(two_steps: Profile):
    lines = profile_lines("W1", two_steps, num_layers=1)
    assert any(line.startswith("| GEMM ") and " 45.5% |" in line for line in lines)
    assert any(line.startswith("| step ") and line.endswith("|     3.0 |       3.0 |") for line in lines)
    assert "host, us a step: schedule 0, build 0, execute 0, wait 0, update 0" in lines
    kind = as_json(two_steps, 1)["kinds"]["decode T=4 B=4"]
    assert kind["wall_us"] == pytest.approx(0.220)
    assert kind["groups"]["GEMM"] == {"count": 1.0, "busy_us": 0.1, "total_us": 0.1}
    assert kind["kernels"][0]["name"] == "nvjet_hsh"


@pytest.mark.parametrize("shape", ["decode T=4 B=4 M=32 greedy", "decode_T4_B4_M32_greedy"])
def test_steps_that_differ_in_the_tables_width_are_of_one_kind(shape: str):
    assert kind_of(shape) == "decode T=4 B=4"

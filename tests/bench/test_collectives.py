"""Collectives in the text of compiled programs: what is counted how often, over which axis, of which size."""

import pytest

from jaxllm.bench.collectives import Collective, collectives

MESH = {"data": 2, "tensor": 4}
PROGRAM = """\
HloModule jit_step, is_scheduled=true

%add (x: f32[], y: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%x, %y)
}

%layer (carry: (s32[], bf16[4,64])) -> (s32[], bf16[4,64]) {
  %psum.1 = bf16[4,64]{1,0} all-reduce(%a), channel_id=1, replica_groups=GROUPS, to_apply=%add
  %pair = (bf16[4,64]{1,0}, f32[4]{0}) all-reduce(%b, %c), channel_id=2, replica_groups=GROUPS, to_apply=%add
}

%more (carry: (s32[])) -> pred[] {
  ROOT %less = pred[] compare(%i, %n), direction=LT
}

%async_computation (p: f32[8,160]) -> f32[8,160] {
  ROOT %exchange = f32[8,160]{1,0} all-to-all(%p), replica_groups=GROUPS, dimensions={0}
}

%small (p: f32[]) -> f32[] {
  ROOT %one = f32[] copy(%p)
}

%large (p: f32[2]) -> f32[2] {
  ROOT %permuted = f32[2]{0} collective-permute(%p), source_target_pairs={{0,4},{4,0}}
}

ENTRY %main (p: bf16[4,64]) -> s32[4,2,4] {
  %loop = (s32[]) while(%t), condition=%more, body=%layer, backend_config={"known_trip_count":{"n":"3"}}
  %start = (s32[2,4]{1,0}, s32[4,2,4]{2,1,0}) all-gather-start(%w), replica_groups=GROUPS, dimensions={0}
  %summed = ((bf16[2]{0}), bf16[2]{0}) all-reduce-start(%v), replica_groups=GROUPS, to_apply=%add
  %likewise = f32[3]{0} all-reduce-start(%u), replica_groups=GROUPS, to_apply=%add
  %done = s32[4,2,4]{2,1,0} all-gather-done(%start)
  %begun = ((f32[8,160]{1,0}), f32[8,160]{1,0}, u32[]) async-start(%l), calls=%async_computation
  %scattered = f32[1,64]{1,0} reduce-scatter(%q), replica_groups=GROUPS, dimensions={0}, to_apply=%add
  %either = f32[2]{0} conditional(%c, %x, %y), branch_computations={%small, %large}
  %alone = f32[9]{0} all-reduce(%z), replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}, to_apply=%add
  ROOT %all = pred[16]{0} all-reduce(%f), replica_groups={}, to_apply=%add
}
"""


@pytest.mark.parametrize(
    "groups",
    [
        "{{0,1,2,3},{4,5,6,7}}",
        "[2,4]<=[8]",
        "[2,4]<=[4,2]T(1,0)",  # of a mesh whose devices are numbered along its first axis
        "mesh['data'=2,'tensor'=4] {'tensor'}",
    ],
)
def test_collectives_are_counted_by_kind_axis_and_size(groups: str):
    mesh = {"tensor": 4, "data": 2} if "T" in groups else MESH
    found = {each[:3]: each.number for each in collectives(PROGRAM.replace("GROUPS", groups), mesh)}
    if "T" not in groups:
        assert found.pop(("collective-permute", ("data",), 8)) == 1
    else:
        assert found.pop(("collective-permute", ("tensor",), 8)) == 1
    everything = tuple(mesh)
    assert found == {
        ("all-reduce", ("tensor",), 4 * 64 * 2): 3,
        ("all-reduce", ("tensor",), 4 * 64 * 2 + 4 * 4): 3,
        ("all-gather", ("tensor",), 4 * 2 * 4 * 4): 1,
        ("all-reduce", ("tensor",), 2 * 2): 1,
        ("all-reduce", ("tensor",), 3 * 4): 1,
        ("all-to-all", ("tensor",), 8 * 160 * 4): 1,
        ("reduce-scatter", ("tensor",), 4 * 64 * 4): 1,
        ("all-reduce", everything, 16): 1,
    }


def test_groups_along_the_other_axis_are_told_apart():
    line = "ENTRY %main (p: f32[2]) -> f32[2] {\n  ROOT %r = f32[2]{0} all-reduce(%p), replica_groups="
    for groups in ("{{0,4},{1,5},{2,6},{3,7}}", "[4,2]<=[2,4]T(1,0)", "mesh['data'=2,'tensor'=4] {'data'}"):
        assert collectives(f"{line}{groups}, to_apply=%add\n}}", MESH) == [Collective("all-reduce", ("data",), 8, 1)]


def test_a_loop_of_unknown_length_is_an_error_only_where_it_communicates():
    unknown = PROGRAM.replace(', backend_config={"known_trip_count":{"n":"3"}}', "").replace("GROUPS", "[2,4]<=[8]")
    with pytest.raises(ValueError, match="a loop of unknown length communicates: %loop"):
        collectives(unknown, MESH)
    assert len(collectives(unknown.replace("body=%layer", "body=%small"), MESH)) == 7


def test_what_is_no_program_is_refused():
    with pytest.raises(ValueError, match="no entry computation"):
        collectives("nothing", MESH)

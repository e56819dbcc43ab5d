import pytest

from jaxllm.bench.kernel_groups import OTHER, frames_for, frames_of, group_of, titles


@pytest.mark.parametrize(
    ("kernel", "group"),
    [
        ("nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_NNT", "GEMM"),
        ("void cutlass::device_kernel<flash::FlashAttnFwdSm90>", "attention, prefill"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32", "GEMM"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int>", "GEMM"),
        ("multiply_few_rows", "GEMM"),
        ("multiply_fused", "GEMM"),
        ("exchange_words", "collectives"),
        ("mosaic_prefill_tiles", "attention, prefill"),
        ("prefill_tiles", "attention, prefill"),
        ("decode_chunks", "attention, decode"),
        ("decode_e4m3_chunks", "attention, decode"),
        ("turn_rows", "rope + KV write"),
        ("write_rows", "rope + KV write"),
        ("draw_tokens", "sampling"),
        ("scan_logits", "sampling"),
        ("MemcpyD2D", "copies"),
        ("MemcpyH2D", "transfers"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "collectives"),
        ("loop_multiply_fusion_3", OTHER),
    ],
)
def test_a_kernels_name_tells_its_group(kernel: str, group: str):
    assert group_of(kernel) == group


@pytest.mark.parametrize(
    ("frames", "group"),
    [
        (("kernels/rms_norm/reference.py:rms_norm", "models/norms.py:Norm.__call__"), "norm + residual"),
        (("models/decoder.py:GatedMLP.__call__", "models/decoder.py:DecoderLayer.__call__"), "activation"),
        (("models/decoder.py:DecoderLayer.__call__",), "norm + residual"),
        (("jax/triton_lib.py:triton_call", "kernels/paged_attention/work_list.py:list_chunks"), "attention, work list"),
        (("kernels/sampling/reference.py:greedy", "engine/step.py:step"), "sampling"),
        (("models/forward.py:rope_tables", "engine/step.py:_hidden"), "rope + KV write"),
        (("engine/packing.py:unpack",), "inputs, embedding"),
        ((), OTHER),
    ],
)
def test_a_fusion_belongs_to_the_innermost_function_that_the_table_knows(frames: tuple[str, ...], group: str):
    assert group_of("loop_add_fusion_2", frames) == group
    assert group in titles()


HLO = """HloModule jit_step, is_scheduled=true

FileNames
1 "/x/jaxllm/engine/step.py"
2 "/x/jaxllm/kernels/rms_norm/reference.py"

FunctionNames
1 "make_step.<locals>.step"
2 "rms_norm"

FileLocations
1 {file_name_id=1 function_name_id=1 line=80 end_line=80 column=24 end_column=95}
2 {file_name_id=2 function_name_id=2 line=11 end_line=11 column=26 end_column=73}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}

%fused (p: f32[4]) -> f32[4] {
  ROOT %multiply.1 = f32[4]{0} multiply(%p, %p), metadata={op_name="jit(step)/mul" stack_frame_id=2}
}

ENTRY %main (p: f32[4]) -> f32[4] {
  %loop_fusion.3 = f32[4]{0} fusion(%p), kind=kLoop, calls=%fused
  ROOT %add.2 = f32[4]{0} add(%loop_fusion.3, %p), metadata={op_name="jit(step)/add" stack_frame_id=1}
}
"""


def test_a_programs_text_tells_where_each_kernel_comes_from():
    step, norm = "/x/jaxllm/engine/step.py:make_step.<locals>.step", "/x/jaxllm/kernels/rms_norm/reference.py:rms_norm"
    frames = frames_of(HLO)
    assert frames["add_2"] == (step,)
    assert frames["loop_fusion_3"] == frames["multiply_1"] == (norm, step)
    assert frames_for("loop_fusion_3_1", "", frames) == (norm, step)  # a counter behind it, of a second kernel
    assert frames_for("kernel of another name", "loop_fusion.3", frames) == (norm, step)
    assert frames_for("unknown", "", frames) == ()


def test_a_real_programs_text_is_understood():
    import jax
    import jax.numpy as jnp

    from jaxllm.kernels.rms_norm.reference import rms_norm

    def step(x, scale):
        return rms_norm(x, scale, eps=1e-6) @ jnp.ones((4, 4))

    text = jax.jit(step).lower(jnp.ones((2, 4)), jnp.ones(4)).compile().as_text()
    assert text is not None
    found = frames_of(text).values()
    assert any(frames and group_of("fusion", frames) == "norm + residual" for frames in found)

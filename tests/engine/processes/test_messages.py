"""What one process says is what another reads."""

import msgspec
import numpy as np
import pytest

from jaxllm.engine.buckets import StepShape
from jaxllm.engine.input_builder import PackedStep, PromptScoring
from jaxllm.engine.processes.messages import Answer, Step, decode, encode, to_packed, to_step
from jaxllm.engine.sampler_builder import CountReset, PackedSampling
from jaxllm.engine.sampler_inputs import SamplerLayout, SamplerShape


def test_a_step_arrives_as_it_was_packed():
    processors = {}
    layout = SamplerLayout(SamplerShape(4, filters=True, num_best=8), 100, processors)
    step = PackedStep(
        StepShape(8, 4, 2, "hidden"),
        np.arange(20, dtype=np.int32).reshape(2, 10),
        copies=(((1, 2), (3, 4)), ()),
        sampling=PackedSampling(layout, np.ones((2, 3), np.int32), (CountReset(1, [5, 6], [7], 1),)),
        prompt=PromptScoring(np.full((2, 2, 3), 9, np.int32), 8, ()),
    )
    read = decode(encode(to_step(step, 7)))
    assert isinstance(read, Step)
    found = to_packed(read, SamplerLayout(SamplerShape(1), 100, processors))
    assert read.number == 7
    assert found.shape == step.shape
    assert found.copies == step.copies
    assert found.sampling is not None
    assert found.prompt is not None
    assert found.sampling.layout == layout
    assert found.sampling.count_resets == (CountReset(1, [5, 6], [7], 1),)
    assert found.prompt.num_best == 8
    np.testing.assert_array_equal(found.packed, step.packed)
    np.testing.assert_array_equal(found.sampling.packed, np.ones((2, 3), np.int32))
    np.testing.assert_array_equal(found.prompt.index_and_token, np.full((2, 2, 3), 9, np.int32))


@pytest.mark.parametrize("array", [np.zeros((2, 0), np.float32), np.asarray([[1.5, -np.inf]], np.float32).T])
def test_an_array_keeps_its_shape_type_and_numbers(array):
    read = decode(encode(Answer(1, [array])))
    assert isinstance(read, Answer)
    assert read.leaves[0].dtype == array.dtype
    np.testing.assert_array_equal(read.leaves[0], array)


def test_objects_do_not_travel():
    with pytest.raises(ValueError, match="no type of an array"):
        decode(msgspec.msgpack.encode(["answer", 1, [("|O", (1,), b"12345678")]]))

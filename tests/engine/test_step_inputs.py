import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.engine.buckets import StepShape
from jaxllm.engine.step_inputs import field_shapes, host_views, packed_size, unpack

SHAPES = [(StepShape(1, 1, 1, "greedy"), 1), (StepShape(7, 3, 5, "hidden"), 3)]


def filled(shape, num_groups):
    """A packed step with telling bits in every field, and what was written."""
    packed = np.zeros(packed_size(shape, num_groups), np.int32)
    views = host_views(packed, shape, num_groups)
    rng = np.random.default_rng(0)
    written = []
    for view in views:
        values = rng.integers(-1, 2**31, view.shape, dtype=np.int64).astype(np.int32)
        values.flat[0] = -1
        view[...] = values
        written.append(values)
    return packed, written


@pytest.mark.parametrize(("shape", "num_groups"), SHAPES)
def test_the_step_reads_what_the_host_wrote(shape, num_groups):
    packed, written = filled(shape, num_groups)
    fields = jax.jit(unpack, static_argnums=(1, 2))(jnp.asarray(packed), shape, num_groups)
    specs = field_shapes(shape, num_groups)
    for name, field, values, (dims, dtype) in zip(fields._fields, fields, written, specs, strict=True):
        assert field.shape == dims, name
        assert field.dtype == dtype, name
        assert np.asarray(field).tobytes() == values.tobytes(), name


@pytest.mark.parametrize(("shape", "num_groups"), SHAPES)
def test_fields_do_not_overlap_and_begin_where_a_kernel_may_load_them(shape, num_groups):
    packed = np.zeros(packed_size(shape, num_groups), np.int32)
    for view in host_views(packed, shape, num_groups):
        assert view.base is not None, "the host must write through"
        assert not view.any(), "another field has been here"
        view[...] = 1
        assert (view.ctypes.data - packed.ctypes.data) % 16 == 0
    assert (packed == 0).sum() <= 3 * len(host_views(packed, shape, num_groups))  # padding between fields only

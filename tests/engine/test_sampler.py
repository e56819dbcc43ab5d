from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.engine.buckets import StepShape
from jaxllm.engine.sampler import choose_tokens
from jaxllm.engine.step_inputs import host_views, packed_size, unpack

B, V = 8, 50
LOGITS = np.random.default_rng(1).normal(scale=2, size=(B, V)).astype(np.float32)
choose = jax.jit(choose_tokens, static_argnums=0)


def inputs(order: Sequence[int] = range(B), **fields):
    """A decode step of B requests; `order` deals them to other places in the batch."""
    shape = StepShape(B, B, 1, "full")
    packed = np.zeros(packed_size(shape, 1), np.int32)
    views = host_views(packed, shape, 1)
    views.temperature[:] = fields.get("temperature", 1.0)
    views.top_k[:] = fields.get("top_k", 0)
    views.top_p[:] = fields.get("top_p", 1.0)
    views.seed[:] = fields.get("seed", np.arange(2 * B, dtype=np.uint32).reshape(B, 2))
    views.context_len[:] = fields.get("context_len", 10 + np.arange(B))
    for name in ("temperature", "top_k", "top_p", "seed", "context_len"):
        getattr(views, name)[:] = getattr(views, name)[list(order)]
    return unpack(jnp.asarray(packed), shape, 1)


def test_greedy_ignores_all_sampling_numbers():
    assert choose("greedy", LOGITS, inputs(temperature=9.0, top_k=1)).tolist() == LOGITS.argmax(-1).tolist()


def test_every_variant_is_greedy_at_temperature_zero():
    for variant in ("sampled", "full"):
        assert choose(variant, LOGITS, inputs(temperature=0.0, top_k=5)).tolist() == LOGITS.argmax(-1).tolist()


def test_the_full_variant_draws_what_the_sampled_one_does_when_nothing_is_filtered():
    drawn = choose("sampled", LOGITS, inputs())
    assert drawn.tolist() == choose("full", LOGITS, inputs()).tolist()
    assert drawn.tolist() != LOGITS.argmax(-1).tolist()


def test_only_kept_tokens_are_drawn():
    best = np.argsort(-LOGITS, axis=-1)[:, :3]
    seen = set()
    for position in range(40):
        tokens = choose("full", LOGITS, inputs(temperature=50.0, top_k=3, context_len=position)).tolist()
        assert all(token in best[row] for row, token in enumerate(tokens))
        seen.update(enumerate(tokens))
    assert len(seen) == 3 * B  # at this temperature each of the three comes up


def test_a_token_depends_on_its_request_and_not_on_its_place_in_the_batch():
    order = [3, 1, 7, 0, 2, 6, 5, 4]
    for variant in ("sampled", "full"):
        fields = {"top_k": [0, 5, 0, 9, 2, 0, 0, 7], "temperature": [1, 0, 2, 1, 3, 1, 0.5, 1]}
        straight = choose(variant, LOGITS, inputs(**fields))
        mixed = choose(variant, LOGITS[order], inputs(order, **fields))
        assert mixed.tolist() == straight[np.array(order)].tolist()


def test_the_noise_changes_from_token_to_token():
    rows = [tuple(choose("sampled", LOGITS, inputs(context_len=n + np.arange(B))).tolist()) for n in range(6)]
    assert len(set(rows)) == 6

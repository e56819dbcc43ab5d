"""The engine generates, the trainer differentiates the same model, and the engine goes on with the new weights."""

import jax
import numpy as np
import pytest

from jaxllm import LLM
from jaxllm.models.dense import stack_layers


def test_the_reward_is_a_share_of_letters(example):
    script = example("policy_gradient")
    assert script.reward("Aloe, 12!") == 0.75
    assert script.reward("...") == 0.0


@pytest.mark.slow
def test_a_step_makes_rewarded_samples_likelier_in_the_engine(example):
    script = example("policy_gradient")
    with LLM("smollm2", dtype="float32", max_model_len=128, max_num_seqs=16, enforce_eager=True) as llm:
        rollouts = script.generate(llm, script.PROMPTS[:2], num_samples=4, max_tokens=6, seed=3)
        assert rollouts.is_output.sum(axis=1).max() == 6
        grouped = rollouts.reward.reshape(2, 4)
        advantage = (grouped - grouped.mean(axis=1, keepdims=True)).ravel()
        assert np.abs(advantage).max() > 0.05

        def told_by_engine() -> np.ndarray:
            pairs = [
                (tokens[~is_output][: is_output.argmax()].tolist(), tokens[is_output].tolist())
                for tokens, is_output in zip(rollouts.tokens, rollouts.is_output, strict=True)
            ]
            prompts, continuations = ([pair[i] for pair in pairs] for i in (0, 1))
            return np.asarray([score.total for score in llm.score(prompts, continuations)])

        before = told_by_engine()
        np.testing.assert_allclose(before, rollouts.logprobs.sum(axis=1), atol=2e-3)
        weights = llm.apply_model(stack_layers)
        update = script.make_update(llm.make_logits(), learning_rate=0.3)
        weights, logprobs = update(weights, rollouts.tokens, rollouts.is_output, advantage)
        np.testing.assert_allclose(logprobs, rollouts.logprobs, atol=1e-3)  # two programs, one model
        llm.update_weights(weights)
        after = told_by_engine()
        assert (advantage * (after - before)).sum() > 0.05
        again, _ = update(weights, rollouts.tokens, rollouts.is_output, 0 * advantage)
        assert jax.tree.structure(again) == jax.tree.structure(weights)

"""Rollouts inside a jax training loop: the engine generates, the trainer scores and updates, and both share weights.

python examples/policy_gradient.py --steps 4

A toy of REINFORCE with a group baseline, on SmolLM2: each prompt gets several samples, an answer earns more the more
of its characters are vowels, and one step of gradient ascent follows. The trainer differentiates the engine's own
model (`LLM.make_logits`) and hands the new weights back (`LLM.update_weights`). No torch, no second copy of the model's
code, no checkpoint on the way.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm import LLM, SamplingParams
from jaxllm.models.dense import stack_layers

PROMPTS = ("My favourite word is", "The sound of the sea is", "She sang:", "A good name for a cat is")


@dataclass(frozen=True, slots=True)
class Rollouts:
    """Samples padded to one length: tokens [B, S], which of them were generated [B, S], what each sample earned [B],
    and the engine's own log-probability of each generated token [B, S].
    """

    tokens: np.ndarray
    is_output: np.ndarray
    reward: np.ndarray
    logprobs: np.ndarray


def reward(text: str) -> float:
    """The share of vowels among the letters."""
    letters = [char for char in text.lower() if char.isalpha()]
    return sum(char in "aeiou" for char in letters) / max(len(letters), 1)


def generate(llm: LLM, prompts: tuple[str, ...], num_samples: int, max_tokens: int, seed: int) -> Rollouts:
    """Samples answers to every prompt, and what the engine thought of each token."""
    params = SamplingParams(n=num_samples, temperature=1.0, seed=seed, max_tokens=max_tokens, logprobs=0)
    results = llm.generate(list(prompts), params, use_tqdm=False)
    longest = max(len(r.prompt_token_ids) for r in results) + max_tokens  # one shape, one compilation
    rows = [(result.prompt_token_ids, output) for result in results for output in result.outputs]
    tokens, is_output = np.zeros((len(rows), longest), np.int32), np.zeros((len(rows), longest), bool)
    logprobs = np.zeros((len(rows), longest), np.float32)
    for row, (prompt_ids, output) in enumerate(rows):
        start, stop = len(prompt_ids), len(prompt_ids) + len(output.token_ids)
        tokens[row, :stop] = [*prompt_ids, *output.token_ids]
        is_output[row, start:stop] = True
        told = output.logprobs or []
        logprobs[row, start:stop] = [e[t].logprob for e, t in zip(told, output.token_ids, strict=True)]
    return Rollouts(tokens, is_output, np.asarray([reward(output.text) for _, output in rows], np.float32), logprobs)


def make_update(logits: Callable, learning_rate: float) -> Callable:
    """Gives update(weights, rollouts' arrays) -> (weights, the trainer's log-probabilities [B, S])."""

    def loss(weights: Any, tokens: jax.Array, is_output: jax.Array, advantage: jax.Array):
        scores = jax.nn.log_softmax(logits(weights, tokens)[:, :-1])
        logprobs = jnp.take_along_axis(scores, tokens[:, 1:, None], axis=-1)[..., 0]
        logprobs = jnp.where(is_output[:, 1:], logprobs, 0.0)
        return -(advantage[:, None] * logprobs).sum() / is_output.sum(), jnp.pad(logprobs, ((0, 0), (1, 0)))

    @jax.jit
    def update(weights: Any, tokens: jax.Array, is_output: jax.Array, advantage: jax.Array):
        (_, logprobs), gradient = jax.value_and_grad(loss, has_aux=True)(weights, tokens, is_output, advantage)
        norm = jnp.sqrt(sum(jnp.vdot(g, g) for g in jax.tree.leaves(gradient)))
        return jax.tree.map(lambda w, g: w - learning_rate / norm * g, weights, gradient), logprobs

    return update


def train(llm: LLM, num_steps: int, num_samples: int, max_tokens: int, learning_rate: float) -> list[float]:
    """Runs the loop; gives the mean reward of each step's rollouts."""
    weights = llm.apply_model(stack_layers)
    update = make_update(llm.make_logits(), learning_rate)
    rewards = []
    for step in range(num_steps):
        start = time.perf_counter()
        rollouts = generate(llm, PROMPTS, num_samples, max_tokens, seed=1000 * step)
        generated = time.perf_counter()
        grouped = rollouts.reward.reshape(-1, num_samples)
        advantage = (grouped - grouped.mean(axis=1, keepdims=True)).ravel()
        weights, logprobs = update(weights, rollouts.tokens, rollouts.is_output, advantage)
        llm.update_weights(weights)
        rewards.append(float(rollouts.reward.mean()))
        print(
            f"step {step}: reward {rewards[-1]:.3f}, engine and trainer differ by at most "
            f"{np.abs(np.asarray(logprobs) - rollouts.logprobs).max():.1e} in a log-probability, "
            f"{generated - start:.1f} s to generate, {time.perf_counter() - generated:.1f} s to train",
            flush=True,
        )
    return rewards


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--samples", type=int, default=8, help="answers to each prompt")
    parser.add_argument("--max-tokens", type=int, default=12)
    parser.add_argument("--learning-rate", type=float, default=0.5, help="length of a step in the space of weights")
    args = parser.parse_args()
    with LLM(args.model, dtype="float32", max_model_len=256) as llm:
        train(llm, args.steps, args.samples, args.max_tokens, args.learning_rate)


if __name__ == "__main__":
    main()

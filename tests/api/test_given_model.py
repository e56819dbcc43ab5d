"""LLM and AsyncLLM on arrays that the caller's program holds: the same buffers, new weights, mistakes."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from flax import nnx
from jax.sharding import Mesh

from jaxllm import LLM, AsyncLLM, AxisRules, SamplingParams
from jaxllm.api.errors import RequestError
from jaxllm.config.errors import InputError
from jaxllm.models.config import LayerKind, ModelConfig
from jaxllm.models.decoder import Decoder
from jaxllm.models.rope import RopeConfig

CFG = ModelConfig(
    architecture="Tiny",
    vocab_size=96,
    d_model=32,
    d_ff=48,
    num_q_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position=64,
    layer_kinds=(LayerKind(), LayerKind()),
    ropes=(RopeConfig(theta=1e4, dim=8),),
    norm_eps=1e-6,
    attention_scale=8**-0.5,
)
OPTIONS: dict[str, Any] = {"max_num_seqs": 2, "num_gpu_blocks_override": 16, "enforce_eager": True}
PROMPT = [5, 40, 7, 90]


def make_decoder(seed: int) -> Decoder:
    made, rng = nnx.eval_shape(lambda: Decoder(CFG, nnx.Rngs(0))), np.random.default_rng(seed)
    tree = nnx.to_pure_dict(nnx.state(made))
    nnx.update(made, jax.tree.map(lambda w: jnp.asarray(rng.normal(size=w.shape) * 0.4, jnp.float32), tree))
    return made


def pointers(tree: Any) -> set[int]:
    return {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree)}


def held(decoder: Decoder) -> Any:
    return nnx.to_pure_dict(nnx.state(decoder))


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens)


def generate(llm: LLM, prompt: list[int], num_tokens: int) -> Any:
    (result,) = llm.generate([prompt], greedy(num_tokens), use_tqdm=False)
    return result.outputs[0]


@pytest.fixture(scope="module")
def first() -> Decoder:
    return make_decoder(0)


@pytest.fixture(scope="module")
def llm(first: Decoder) -> Iterator[LLM]:
    with LLM(first, skip_tokenizer_init=True, **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def reference(llm: LLM) -> Callable[[Decoder, list[int], int], list[int]]:
    """The best tokens by logits of whole sequences, which need no cache."""
    logits = jax.jit(llm.make_logits())

    def best(decoder: Decoder, prompt: list[int], num_tokens: int) -> list[int]:
        tree = held(decoder)
        weights = tree | {"layers": tuple(tree["layers"][l] for l in range(CFG.num_layers))}
        tokens = list(prompt)
        for _ in range(num_tokens):
            padded = np.zeros((1, 16), np.int32)
            padded[0, : len(tokens)] = tokens
            tokens.append(int(np.asarray(logits(weights, padded))[0, len(tokens) - 1].argmax()))
        return tokens[len(prompt) :]

    return best


def test_a_decoder_runs_in_its_own_buffers_and_new_weights_are_stamped(llm: LLM, first: Decoder, reference: Any):
    assert pointers(llm.apply_model(lambda weights: weights)) == pointers(held(first))
    assert dict(llm.report())["weights held"].endswith("KiB used in place, 0 bytes copied")
    told = generate(llm, PROMPT, 6)
    assert told.token_ids == reference(first, PROMPT, 6)
    assert (told.weight_version, told.weight_versions) == (0, [(0, 0)])

    second = make_decoder(1)
    llm.update_params(second)
    assert pointers(llm.apply_model(lambda weights: weights)) == pointers(held(second))
    result = generate(llm, PROMPT, 6)
    assert result.token_ids == reference(second, PROMPT, 6) != told.token_ids
    assert (llm.get_weight_version(), result.weight_versions) == (1, [(1, 0)])
    llm.update_params(nnx.state(first), version="step-2")
    assert (generate(llm, PROMPT, 6).token_ids, llm.get_weight_version()) == (told.token_ids, "step-2")
    llm.update_weight_version("best")
    assert llm.generate([PROMPT], greedy(1), use_tqdm=False)[0].weight_version == "best"


def test_what_is_enqueued_knows_which_tokens_are_of_which_weights(llm: LLM, first: Decoder):
    llm.update_params(first, version=0)
    before = generate(llm, PROMPT, 9).token_ids
    llm.enqueue([PROMPT], greedy(9))
    generate(llm, [1, 2, 3], 2)  # takes the other one along for some steps
    llm.update_params(make_decoder(1), kv="recompute")
    (result,) = llm.wait_for_completion(use_tqdm=False)
    output = result.outputs[0]
    (old, start), (new, num_old) = output.weight_versions
    assert (old, start, new, output.weight_version, result.weight_version) == (0, 0, 1, 1, 1)
    assert 0 < num_old < 9
    assert output.token_ids[:num_old] == before[:num_old]
    assert output.token_ids[num_old:] == generate(llm, PROMPT + before[:num_old], 9 - num_old).token_ids
    llm.enqueue([PROMPT], greedy(9))
    generate(llm, [1, 2, 3], 2)
    llm.enqueue([PROMPT], greedy(9))
    llm.update_params(first, kv="drop")
    dropped = [each.outputs[0] for each in llm.wait_for_completion(use_tqdm=False)]
    assert [each.finish_reason for each in dropped] == ["abort", "length"]  # the other had not begun
    assert [each.weight_versions for each in dropped] == [[(1, 0)], [(2, 0)]]
    assert dropped[1].token_ids == before


def test_weights_that_were_given_away_are_told_from_a_failure(llm: LLM, first: Decoder, reference: Any):
    copies = jax.tree.map(lambda w: w + 0, held(first))
    llm.update_params(copies)
    jax.jit(lambda tree: jax.tree.map(lambda w: w * 2, tree), donate_argnums=0)(copies)
    with pytest.raises(RequestError, match="the weights were donated or deleted by the program that holds them"):
        generate(llm, PROMPT, 2)
    with pytest.raises(InputError, match=r"weights: embedding\.tokens was donated or deleted"):
        llm.update_params(copies)
    llm.update_params(first)
    assert generate(llm, PROMPT, 6).token_ids == reference(first, PROMPT, 6)


def test_the_engines_type_may_be_another_one(first: Decoder, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "jaxllm")
    with LLM(first, skip_tokenizer_init=True, dtype="bfloat16", **OPTIONS) as llm:
        assert {leaf.dtype.name for leaf in jax.tree.leaves(llm.apply_model(lambda tree: tree))} == {"bfloat16"}
    assert [line for line in caplog.messages if line.startswith("weights: 0 bytes used in place, ")] != []


def test_asyncllm_goes_over_to_new_weights_while_it_runs(first: Decoder):
    second = make_decoder(1)

    async def main() -> Any:
        llm = AsyncLLM(first, skip_tokenizer_init=True, **OPTIONS)
        versions, tokens = [], []
        async for delta in llm.stream(PROMPT, greedy(40)):
            if delta.token_ids:
                versions.append(delta.weight_version)
                tokens += delta.token_ids
            if len(tokens) == 3:
                await llm.update_params(second, kv="keep", version="second")
        assert await llm.get_weight_version() == "second"
        await llm.update_weight_version(9)
        with pytest.raises(InputError, match=r"layers\.0\.attention\.o_proj is missing"):
            await llm.update_params({"embedding": held(second)["embedding"]})
        last = None
        async for last in llm.generate(PROMPT, greedy(6)):
            pass
        llm.shutdown()
        return versions, last

    versions, last = asyncio.run(main())
    assert versions[:3] == [0] * 3
    assert sorted(set(versions), key=versions.index) == [0, "second"]
    assert (last.weight_version, last.outputs[0].weight_versions) == (9, [(9, 0)])


class Fast:
    """What a fast tokenizer of transformers looks like."""

    def __init__(self, backend: tokenizers.Tokenizer):
        self.backend_tokenizer = backend
        self.special_tokens_map = {"eos_token": "b"}
        self.chat_template = "{{ messages[0].content }}"


def words() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 5, "b": 6, "c": 7}, unk_token="c"))


def test_a_tokenizer_may_be_an_object(first: Decoder, bytes_tokenizer: Any):
    for given, eos in ((bytes_tokenizer, 0), (words(), None), (Fast(words()), 6)):
        with LLM(first, tokenizer=given, **OPTIONS) as llm:
            found = llm.get_tokenizer()
            assert found is not None
            assert found.eos_token_id == eos
    with LLM(first, tokenizer=bytes_tokenizer, chat_template="{{ 1 }}", **OPTIONS) as llm:
        assert llm.get_tokenizer().chat_template == "{{ 1 }}" != bytes_tokenizer.chat_template  # pyright: ignore[reportOptionalMemberAccess]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "a model that is handed over has no tokenizer: give tokenizer=, or set skip_tokenizer_init"),
        ({"tokenizer": 3}, "tokenizer must be a folder, a .gguf file, or a tokenizer of .*, got int"),
        ({"skip_tokenizer_init": True, "hf_overrides": {}}, "hf_overrides: a model that is handed over has no"),
        (
            {"skip_tokenizer_init": True, "load_format": "dummy"},
            "load_format=dummy: a model that is handed over is not",
        ),
        ({"skip_tokenizer_init": True, "axis_rules": AxisRules()}, "axis_rules name the axes of a mesh: give mesh="),
        ({"skip_tokenizer_init": True, "mesh": 1}, r"mesh must be a jax\.sharding\.Mesh, got int"),
        (
            {"skip_tokenizer_init": True, "mesh": "own", "tensor_parallel_size": 2},
            "tensor_parallel_size=2: the sizes are those of mesh=; leave it out",
        ),
    ],
)
def test_a_mistake_is_one_line(first: Decoder, options: dict[str, Any], message: str):
    if options.get("mesh") == "own":
        options = options | {"mesh": Mesh(np.asarray(jax.devices()[:1]).reshape(1, 1), ("data", "tensor"))}
    with pytest.raises(InputError, match=message) as caught:
        LLM(first, **OPTIONS, **options)
    assert "\n" not in str(caught.value)

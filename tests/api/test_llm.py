"""LLM as a JAX program uses it."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm import LLM, RequestOutput, SamplingParams
from jaxllm.api.errors import RequestError
from jaxllm.config.errors import InputError

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


def one_line(error: pytest.ExceptionInfo) -> str:
    message = str(error.value)
    assert "\n" not in message
    return message


def test_generate_takes_text_token_ids_and_mappings_and_keeps_their_order(smollm2):
    tokenizer = smollm2.get_tokenizer()
    text = "The capital of France is"
    ids = tokenizer.encode(text)
    forms = [text, ids, {"prompt": text}, {"prompt_token_ids": ids}, np.asarray(ids)]
    outputs = smollm2.generate([*forms, "One, two, three,"], GREEDY, use_tqdm=False)
    assert all(isinstance(output, RequestOutput) for output in outputs)
    assert all(output.outputs[0].text == outputs[0].outputs[0].text for output in outputs[:5])
    assert outputs[0].prompt == text
    assert outputs[1].prompt is None
    assert all(output.prompt_token_ids == ids for output in outputs[:5])
    assert "four" in outputs[5].outputs[0].text
    assert outputs[0].outputs[0].text == tokenizer.decode(outputs[0].outputs[0].token_ids)


def test_one_prompt_need_not_be_in_a_list(smollm2):
    [from_text] = smollm2.generate("Once upon a time", GREEDY, use_tqdm=False)
    [from_ids] = smollm2.generate(smollm2.get_tokenizer().encode("Once upon a time"), GREEDY, use_tqdm=False)
    assert from_text.outputs == from_ids.outputs


def test_each_prompt_can_have_its_own_sampling_params(smollm2):
    params = [GREEDY, SamplingParams(temperature=0.0, max_tokens=3), SamplingParams(seed=1, max_tokens=5)]
    outputs = smollm2.generate(["Hello"] * 3, params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [12, 3, 5]
    with pytest.raises(InputError, match="2 prompts and 3 sampling_params"):
        smollm2.generate(["a", "b"], params)


def test_a_seed_repeats_and_another_one_does_not(smollm2):
    first, again, other = (
        smollm2.generate("A story:", SamplingParams(seed=seed, max_tokens=16), use_tqdm=False)[0].outputs[0].token_ids
        for seed in (2**63 + 5, 2**63 + 5, 2**62 + 5)
    )
    assert first == again
    assert first != other


def test_stop_strings_end_the_text_before_them_and_nothing_past_them_is_counted(smollm2):
    [plain] = smollm2.generate("One, two, three,", SamplingParams(temperature=0.0, max_tokens=24), use_tqdm=False)
    text = plain.outputs[0].text
    stop = text[10:14]
    [stopped] = smollm2.generate(
        "One, two, three,", SamplingParams(temperature=0.0, max_tokens=24, stop=["never there", stop]), use_tqdm=False
    )
    output = stopped.outputs[0]
    assert output.text == text[: text.index(stop)]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    assert output.token_ids == plain.outputs[0].token_ids[: len(output.token_ids)]
    assert len(output.token_ids) < 24
    [kept] = smollm2.generate(
        "One, two, three,",
        SamplingParams(temperature=0.0, max_tokens=24, stop=stop, include_stop_str_in_output=True),
        use_tqdm=False,
    )
    assert kept.outputs[0].text == text[: text.index(stop)] + stop


def test_stop_token_ids_end_the_output_and_ignore_eos_goes_on(smollm2):
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    [full] = smollm2.chat(messages, SamplingParams(temperature=0.0, max_tokens=20), use_tqdm=False)
    assert full.outputs[0].finish_reason == "stop"
    assert full.outputs[0].stop_reason is None
    ids = full.outputs[0].token_ids
    [cut] = smollm2.chat(messages, SamplingParams(temperature=0.0, stop_token_ids=[ids[4]]), use_tqdm=False)
    assert cut.outputs[0].token_ids == ids[:5]
    assert cut.outputs[0].stop_reason == ids[4]
    assert cut.outputs[0].text == smollm2.get_tokenizer().decode(ids[:4])
    [on] = smollm2.chat(messages, SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True), use_tqdm=False)
    assert len(on.outputs[0].token_ids) == 20


def test_metrics_are_in_order(smollm2):
    [output] = smollm2.generate("Hello", GREEDY, use_tqdm=False)
    metrics = output.metrics
    assert metrics.arrival_time <= metrics.first_token_time <= metrics.last_token_time
    assert metrics.time_to_first_token == metrics.first_token_time - metrics.arrival_time


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ("", "the prompt is empty"),
        ([[]], "the prompt is empty"),
        ([[5, 49152]], "token id 49152 at position 1 is outside the vocabulary of 49,152"),
        ([[5, -1]], "token id -1"),
        ([[1.5]], "token ids must be a list of integers"),
        ([{"text": "x"}], "'prompt' or 'prompt_token_ids'"),
        ([[1] * 600], "has 600 tokens, but max_model_len 512"),
        (["fine", ""], "prompt 1: the prompt is empty"),
        (7, "prompts must be text, token ids"),
    ],
)
def test_a_bad_prompt_is_one_line_and_nothing_runs(smollm2, prompts, message):
    with pytest.raises(InputError, match=message) as caught:
        smollm2.generate(prompts, GREEDY)
    one_line(caught)
    assert smollm2.generate("still fine", GREEDY, use_tqdm=False)[0].finished


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, "temperature must be at least 0, got -0.1"),
        ({"top_p": 1.5}, r"top_p must be in \(0, 1\], got 1.5"),
        ({"top_p": 0.0}, "top_p must be"),
        ({"top_k": -2}, "top_k must be -1 or 0"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"temperature": "hot"}, "temperature must be a number"),
        ({"seed": 2**70}, "seed must fit in 64 bits"),
        ({"stop": [""]}, "stop must be non-empty strings"),
        ({"n": 2, "temperature": 0}, "n must be 1 with temperature 0"),
        ({"logprobs": -2}, "logprobs must be -1"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs=.* is not supported yet"),
    ],
)
def test_a_bad_sampling_param_is_one_line(options, message):
    with pytest.raises(InputError, match=message) as caught:
        SamplingParams(**options)
    one_line(caught)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_modle_len": 5}, "unknown option 'max_modle_len'; did you mean 'max_model_len'"),
        ({"dtype": "float31"}, "dtype='float31' is not known; choose one of auto, float32"),
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype='int8' is not known; choose one of auto, float32"),
        ({"calculate_kv_scales": True}, "calculate_kv_scales=True is not supported yet"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size=2 is not supported yet"),
        ({"tensor_parallel_size": 2}, "needs 2 devices, found 1: lower data_parallel_size or"),
        ({"gpu_memory_utilization": 1.5}, r"gpu_memory_utilization must be in \(0, 1\]"),
        ({"block_size": 12}, "block_size must be one of 8, 16, 32, 64, 128, got 12"),
        ({"scheduling_policy": "lifo"}, "lifo"),
        ({"attention_backend": "flash"}, "no version 'flash' on cpu; choose one of auto, reference"),
        ({"model": "no/such/folder"}, "no/such/folder"),
        ({"max_model_len": 100_000}, "max_model_len 100,000 is beyond the model's 8,192 positions"),
        ({"kv_cache_memory_bytes": 1 << 20, "max_model_len": 4096}, "lower max_model_len, or raise kv_cache_memory"),
    ],
)
def test_a_bad_option_is_one_line(options, message):
    with pytest.raises(ValueError, match=message) as caught:
        LLM(**{"enforce_eager": True, **options})
    one_line(caught)


def test_max_tokens_beyond_the_context_ends_with_length(smollm2):
    prompt = smollm2.get_tokenizer().encode("word " * 600)[:500]
    [output] = smollm2.generate([prompt], SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True), False)
    assert len(prompt) + len(output.outputs[0].token_ids) == 512
    assert output.outputs[0].finish_reason == "length"


def test_the_callers_arrays_and_configuration_are_left_alone_and_memory_comes_back(pytestconfig):
    golden = pytestconfig.rootpath / "tests" / "golden" / "llama"
    mine = jnp.arange(1000.0) + 1
    settings = dict(jax.config.values)
    before = {id(array) for array in jax.live_arrays()}
    with LLM(str(golden), skip_tokenizer_init=True, num_gpu_blocks_override=64, enforce_eager=True) as llm:
        llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)
        assert any(array.ndim == 6 and id(array) not in before for array in jax.live_arrays())
    del llm
    gc.collect()
    assert settings == dict(jax.config.values)
    np.testing.assert_array_equal(mine, np.arange(1000.0) + 1)
    left = [array for array in jax.live_arrays() if id(array) not in before and array.nbytes > 10_000]
    assert not left, "weights or cache are still there"


def test_without_a_tokenizer_ids_go_in_and_out_and_text_is_refused(pytestconfig):
    golden = pytestconfig.rootpath / "tests" / "golden" / "llama_tied"
    with LLM(str(golden), skip_tokenizer_init=True, num_gpu_blocks_override=64, enforce_eager=True) as llm:
        [output] = llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)
        assert output.outputs[0].text == ""
        assert output.outputs[0].token_ids
        with pytest.raises(InputError, match="needs a tokenizer"):
            llm.generate("text")
        with pytest.raises(InputError, match="needs a tokenizer"):
            llm.chat([{"role": "user", "content": "hi"}])


def test_a_step_that_raises_reaches_the_caller_and_the_next_call_works(smollm2, monkeypatch):
    runner = smollm2._built.runner
    execute = runner.execute
    monkeypatch.setattr(runner, "execute", lambda step: (_ for _ in ()).throw(RuntimeError("out of luck")))
    with pytest.raises(RequestError, match=r"step .* failed: RuntimeError: out of luck"):
        smollm2.generate("Hello", GREEDY, use_tqdm=False)
    monkeypatch.setattr(runner, "execute", execute)
    assert smollm2.generate("Hello", GREEDY, use_tqdm=False)[0].finished


def test_an_interrupt_leaves_nothing_running(smollm2, monkeypatch):
    calls = iter([None, None, KeyboardInterrupt()])
    step = smollm2._engine.step

    def interrupted_step():
        error = next(calls, None)
        if error is not None:
            raise error
        return step()

    monkeypatch.setattr(smollm2._engine, "step", interrupted_step)
    with pytest.raises(KeyboardInterrupt):
        smollm2.generate(["Hello"] * 3, SamplingParams(max_tokens=50), use_tqdm=False)
    assert not smollm2._engine.has_work
    assert smollm2._engine.scheduler.stats.kv_usage == 0.0


def test_what_a_model_says_about_sampling_holds_where_a_request_does_not(golden):
    options = {"skip_tokenizer_init": True, "enforce_eager": True, "max_num_seqs": 2, "num_gpu_blocks_override": 32}
    own = {"temperature": 0.0, "max_new_tokens": 5}
    with LLM(str(golden / "llama"), override_generation_config=own, **options) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0.0, top_p=0.9, top_k=20, max_tokens=5)
        [default] = llm.generate([5, 6, 7], use_tqdm=False)
        [asked] = llm.generate([5, 6, 7], llm.get_default_sampling_params(), use_tqdm=False)
    assert len(default.outputs[0].token_ids) == 5
    assert default.outputs == asked.outputs


def test_overrides_change_what_the_model_computes(golden):
    options = {"skip_tokenizer_init": True, "enforce_eager": True, "max_num_seqs": 2, "num_gpu_blocks_override": 32}
    greedy, prompt = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True), list(range(3, 40))
    found = []
    for overrides in ({}, {"rope_scaling": {"factor": 1.0}}, {"max_position_embeddings": 256}):
        with LLM(str(golden / "llama"), hf_overrides=overrides, **options) as llm:
            found.append(llm.generate(prompt, greedy, use_tqdm=False)[0].outputs[0].token_ids)
            assert llm._built.model.max_position == overrides.get("max_position_embeddings", 512)
    assert found[1] != found[0]
    assert found[2] == found[0]
    with pytest.raises(InputError, match="hf_overrides: LlamaForCausalLM does not read 'rope_thetas'; did you mean"):
        LLM(str(golden / "llama"), hf_overrides={"rope_thetas": 1.0}, **options)

"""A vocabulary split over tensor ranks: requests of every kind get the answers of one device."""

import json

import pytest

ANSWERS = """
import json, sys
from jaxllm import LLM, SamplingParams

prompts = json.loads(sys.argv[2])
V, common = 320, {"max_tokens": 6, "ignore_eos": True}
penalties = {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2}
edits = {"logit_bias": {7: 3.0, 300: 2.5}, "min_tokens": 3, "stop_token_ids": [9]}
together = [  # in one batch: greedy, plain, filtered, penalised, edited, masked, scored
    {"temperature": 0},
    {"seed": 1},
    {"seed": 2, "top_k": 40, "top_p": 0.95, "min_p": 0.01},
    {"seed": 3, **penalties, **edits},
    {"seed": 4, "allowed_token_ids": [*range(0, V, 3)]},
    {"seed": 5, "temperature": 1.5, "logprobs": 4, "logprob_token_ids": [0, 159, 160, 319]},
]
plain = [{"temperature": 0}, *({"seed": seed, "temperature": seed / 8} for seed in range(6, 11))]
whole = [{"seed": 11, "logprobs": -1, "prompt_logprobs": 3}, {"temperature": 0, "prompt_logprobs": -1}, *plain[:4]]
batches = [[{"temperature": 0}] * 6, plain, together, whole]

def told(entries):
    return [each and {token: (s.logprob, s.rank) for token, s in each.items()} for each in entries or ()]

for data, tensor in json.loads(sys.argv[3]):
    with LLM(
        sys.argv[1],
        data_parallel_size=data,
        tensor_parallel_size=tensor,
        skip_tokenizer_init=True,
        enforce_eager=True,
        num_gpu_blocks_override=64,
        max_num_seqs=8,
        max_logprobs=-1,
    ) as llm:
        answers = []
        for batch in batches:
            params = [SamplingParams(**common | each) for each in batch]
            outputs = llm.generate(prompts[: len(batch)], params, use_tqdm=False)
            for output in outputs:
                (sample,) = output.outputs
                answers.append([sample.token_ids, told(sample.logprobs), told(output.prompt_logprobs)])
        print(json.dumps(answers))
"""


@pytest.mark.slow
def test_requests_of_every_kind_are_answered_alike(golden, run_program):
    prompts = [[5, 17, 300, 42], [1, 160, 161], [319, 0, 3], [8] * 7, [250, 40, 99], [77]]
    meshes = [(1, 1), (1, 4)]  # data, tensor
    told = run_program(
        ANSWERS, golden / "llama_linear", json.dumps(prompts), json.dumps(meshes), num_devices=4, timeout=300
    )
    alone, *split = [json.loads(line) for line in told.splitlines()]
    assert len({tuple(tokens) for tokens, *_ in alone}) > 6
    for answers in split:
        for (tokens, scores, prompt_scores), (expected, *expected_scores) in zip(answers, alone, strict=True):
            assert tokens == expected
            assert_equal((scores, prompt_scores), expected_scores)


def assert_equal(told, expected):
    for entries, wanted in zip(told, expected, strict=True):
        assert len(entries) == len(wanted)
        for entry, want in zip(entries, wanted, strict=True):
            assert (entry is None) == (want is None)
            for token in want or ():
                assert entry.keys() == want.keys()
                assert entry[token][1] == want[token][1]
                assert abs(entry[token][0] - want[token][0]) < 1e-4

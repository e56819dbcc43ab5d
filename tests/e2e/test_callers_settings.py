"""A JAX program's own settings change no token: the engine runs inside programs that chose them for other reasons."""

import json

from jaxllm import LLM, SamplingParams

SETTINGS = {
    "jax_enable_x64": True,
    "jax_numpy_rank_promotion": "raise",
    "jax_numpy_dtype_promotion": "strict",
    "jax_default_matmul_precision": "bfloat16",
    "jax_debug_nans": True,
}
OPTIONS = {"skip_tokenizer_init": True, "num_gpu_blocks_override": 128, "max_num_seqs": 4, "enforce_eager": True}
PARAMS = [
    {"temperature": 0.0, "max_tokens": 32, "ignore_eos": True},
    {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "seed": 2**63 + 1, "max_tokens": 12, "ignore_eos": True},
]

PROGRAM = """
import json, sys
import jax
folder, settings, options, prompt, params = map(json.loads, sys.argv[1:])
for name, value in settings.items():
    jax.config.update(name, value)
from jaxllm import LLM, SamplingParams
with LLM(folder, **options) as llm:
    outputs = llm.generate([prompt] * 2, [SamplingParams(**each) for each in params], use_tqdm=False)
print(json.dumps([output.outputs[0].token_ids for output in outputs]))
"""


def test_the_callers_settings_change_no_token(golden, golden_cases, run_program):
    case = golden_cases("gemma3_text")[3]
    folder = str(golden / "gemma3_text")
    given = (folder, SETTINGS, OPTIONS, case["prompt_ids"], PARAMS)
    greedy, sampled = json.loads(run_program(PROGRAM, *map(json.dumps, given)))
    assert greedy == case["output_ids"]
    with LLM(folder, **OPTIONS) as llm:
        [output] = llm.generate([case["prompt_ids"]], SamplingParams(**PARAMS[1]), use_tqdm=False)
    assert sampled == output.outputs[0].token_ids

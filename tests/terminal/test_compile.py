import pytest

from jaxllm.config.engine_args import engine_args
from jaxllm.config.errors import InputError
from jaxllm.mesh.targets import target_names
from jaxllm.terminal.compile import compile_ahead, run


def test_a_folder_is_filled_once_and_a_start_takes_its_programs_from_there(golden, tmp_path, no_compile_cache, capsys):
    options = {
        "model": str(golden / "llama"),
        "executables": str(tmp_path / "kept"),
        "skip_tokenizer_init": True,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 32,
        "max_model_len": 96,
    }
    compile_ahead(engine_args(options), None)
    first = capsys.readouterr().out
    assert first.startswith(f"2 programs of {golden / 'llama'} for cpu and ")
    assert "0 were there, 2 compiled in" in first
    assert first.endswith(f"start with --executables {tmp_path / 'kept'}\n")
    compile_ahead(engine_args(options), None)
    assert "2 were there, 0 compiled" in capsys.readouterr().out

    from jaxllm import LLM, SamplingParams

    with LLM(**options) as llm:
        assert llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2, temperature=0.0), use_tqdm=False)
        assert dict(llm.report())["programs"].endswith("2 of them loaded")


def test_a_mistake_is_one_line(golden, tmp_path):
    with pytest.raises(InputError, match="output is missing"):
        run({"model": str(golden / "llama")})
    with pytest.raises(InputError, match=f"no description of 'tpu'; there are: {', '.join(target_names())}"):
        compile_ahead(engine_args({"model": str(golden / "llama"), "executables": str(tmp_path)}), "tpu")

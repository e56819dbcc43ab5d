import json

import pytest

from jaxllm.calibrate.call import calibrate
from jaxllm.cli import main
from jaxllm.planning.devices import find_devices


@pytest.mark.slow
def test_steps_of_a_tiny_model_are_timed_and_describe_a_device(golden, tmp_path, capsys):
    seen = []
    made = calibrate(
        str(golden / "llama"), 64, 2, seen.append, max_num_seqs=2, max_num_batched_tokens=32, num_gpu_blocks_override=40
    )
    assert len(seen) == len(made.fitted) + len(made.tested) == len(list(made.rows()))
    assert all(0 < step.seconds < 10 for step in seen)
    assert {step.shape.program for step in made.tested} == {"decode", "mixed"}
    assert 0 <= made.error_of_tested < 1
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(made.device.as_json()))
    assert find_devices("1", str(file)) == (1, made.device)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--max-context", "3"], "--max-context=3 must be at least 64"),
        (["--repeats", "0"], "--repeats=0 must be at least 1"),
        (["--output", "/nowhere/x.json"], "cannot be written: there is no folder /nowhere"),
    ],
)
def test_a_mistake_is_one_line(capsys, arguments, said):
    with pytest.raises(SystemExit) as ended:
        main(["calibrate", "llama-tiny", *arguments])
    err = capsys.readouterr().err
    assert (ended.value.code, err.count("\n")) == (2, 1)
    assert said in err

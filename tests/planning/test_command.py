import importlib.util
import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

import jaxllm
from jaxllm.cli import main
from jaxllm.config.errors import InputError
from jaxllm.mesh.planner import MeshShape
from jaxllm.planning.devices import device_names, find_devices

ROOT = Path(__file__).parents[2]


def called(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        main(["plan", *map(str, arguments)])
    printed = capsys.readouterr()
    return ended.value.code, printed.out, printed.err


def test_the_command_prints_a_table_and_writes_json_and_a_picture(capsys, tmp_path):
    files = tmp_path / "plan.json", tmp_path / "plan.svg"
    code, out, _ = called(
        capsys,
        *("llama-3.1-70b", "--devices", "8xA100-80G", "--input-len", "512", "--output-len", "256"),
        *("--tpot-ms", "50", "--json", files[0], "--plot", files[1]),
    )
    assert code == 0
    assert "not measured" in out
    assert "141.1 GB of weights" in out
    assert "--data-parallel-size 1 --tensor-parallel-size 8 --max-num-seqs " in out
    plan = json.loads(files[0].read_text())
    shapes = {tuple(s["mesh"].values()): s for s in plan["shapes"]}
    assert len(shapes) == 10
    operating = shapes[1, 8, 1]["operating"]
    assert sum(operating["step_parts"].values()) == pytest.approx(operating["step"])
    assert operating["tpot"] <= 0.05
    assert plan["for_throughput"] == {"data": 1, "tensor": 8, "pipe": 1}
    picture = ElementTree.parse(files[1]).getroot()
    curves = [node for node in picture.iter() if node.tag.endswith("polyline")]
    assert len(curves) == sum("curve" in s for s in plan["shapes"])


def test_the_python_call_gives_what_the_command_prints():
    plan = jaxllm.plan("smollm2", "2xH200", input_len=100, output_len=50)
    assert plan.for_throughput is not None
    assert {c.mesh for c in plan.candidates} == {MeshShape(2, 1), MeshShape(1, 2), MeshShape(1, 1, 2)}


def test_a_trace_gives_lengths_and_rate(capsys, tmp_path):
    trace = tmp_path / "trace.jsonl"
    lines = [{"timestamp": 500 * i, "input_length": 100 + i, "output_length": 30, "hash_ids": []} for i in range(11)]
    trace.write_text("\n".join(map(json.dumps, lines)))
    code, out, _ = called(capsys, "llama-3.1-8b", "--devices", "1xH200", "--trace", trace)
    assert code == 0
    assert "105 tokens in, 30 out, 2 requests/s" in out
    trace.write_text('{"input_length": 3}')
    code, _, err = called(capsys, "--devices", "1xH200", "--trace", trace)
    assert (code, err.count("\n")) == (2, 1)
    assert "line 1: 'output_length' is missing" in err


def test_a_described_device_is_planned_for(capsys, tmp_path):
    _, device = find_devices("H200")
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(device.as_json() | {"name": "mine", "memory_bytes": 20_000_000_000}))
    code, out, _ = called(capsys, "llama-3.1-8b", "--devices", "2", "--device-file", file)
    assert code == 0
    assert "2 x mine" in out
    file.write_text("{}")
    code, _, err = called(capsys, "llama-3.1-8b", "--device-file", file)
    assert code == 2
    assert "describes no device: missing field" in err


def test_a_shape_that_does_not_fit_is_exit_code_1(capsys):
    code, out, _ = called(capsys, "llama-3.1-70b", "--devices", "1xH100")
    assert code == 1
    assert "no shape fits: each device would hold 141.1 GB of weights at least" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["smollm2"], "devices is missing"),
        (["smollm2", "--devices", "8xTPU"], "'TPU' is not described; there are A100-80G, H100, H200, L40S"),
        (["smollm2", "--devices", "0xH200"], "is not understood"),
        (["smollm2", "--devices", "H200", "--plot", "plan.pdf"], "is neither .svg nor .html nor .png"),
        (["smollm2", "--devices", "H200", "--plot", "plan.png"], "install it, or name the file .svg or .html"),
        (["smollm2", "--devices", "H200", "--tpot-ms", "0"], "--tpot-ms must be above 0"),
        (["smollm2", "--devices", "H200", "--block-size", "5"], "--block-size must be one of"),
        (["smollm2", "--devices", "H200", "--input-len", "9000"], "beyond the model's 8,192 positions"),
        (["nosuch", "--devices", "H200"], "is neither a folder nor a file here"),
    ],
)
def test_a_mistake_is_one_line(capsys, monkeypatch, arguments, said):
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "matplotlib" else find(name))
    code, _, err = called(capsys, *arguments)
    assert code == 2
    assert err.count("\n") == 1
    assert said in err


def test_devices_are_named_with_and_without_a_number():
    assert find_devices("8xA100")[1] == find_devices("A100-80G")[1]
    assert find_devices("4 x h100")[0] == 4
    assert device_names() == ["a100-80g", "h100", "h200", "l40s"]
    with pytest.raises(InputError, match="cannot be read"):
        find_devices("2", "/nowhere.json")


def test_the_script_is_the_command():
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "plan_mesh.py", "--help"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0
    assert "--tpot-ms" in done.stdout

import json
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

from jaxllm.config.errors import InputError
from jaxllm.models.checkpoint.safetensors_folder import SafetensorsFolder

GOLDEN = Path(__file__).parents[2] / "golden"
FOLDERS = ["llama", "llama_tied", "llama_fp16_sharded", "gemma3_text", "qwen3_bf16_sharded"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of a sharded checkpoint, to damage."""
    return Path(shutil.copytree(GOLDEN / "qwen3_bf16_sharded", tmp_path / "model"))


def one_line(folder: Path) -> str:
    with pytest.raises(InputError) as raised:
        SafetensorsFolder(folder)
    message = str(raised.value)
    assert "\n" not in message
    assert str(folder) in message
    return message


@pytest.mark.parametrize("name", FOLDERS)
def test_every_tensor_has_the_bytes_that_the_safetensors_package_sees(name):
    checkpoint = SafetensorsFolder(GOLDEN / name)
    seen = set()
    for file in (GOLDEN / name).glob("*.safetensors"):
        # Bytes of each tensor in order of offset; the package gives no numpy bfloat16, so only it is asked for shapes.
        raw = file.read_bytes()
        (length,) = struct.unpack_from("<Q", raw)
        offsets = {
            key: entry["data_offsets"] for key, entry in json.loads(raw[8 : 8 + length]).items() if key[0] != "_"
        }
        with safe_open(file, framework="numpy") as opened:
            for tensor in opened.keys():  # noqa: SIM118, not a mapping
                begin, end = offsets[tensor]
                shape = tuple(opened.get_slice(tensor).get_shape())
                whole = checkpoint.read(tensor, 0, shape[0])
                assert whole.shape == checkpoint.shape(tensor) == shape
                assert whole.dtype == checkpoint.dtype(tensor)
                assert whole.tobytes() == raw[8 + length + begin : 8 + length + end]
                middle = shape[0] // 3
                assert checkpoint.read(tensor, middle, shape[0]).tobytes() == whole[middle:].tobytes()
                if len(shape) == 2:
                    some = checkpoint.read(tensor, middle, shape[0], (3, shape[1] - 1))
                    assert some.tobytes() == whole[middle:, 3:-1].tobytes()
                seen.add(tensor)
    assert set(checkpoint.names()) == seen
    assert checkpoint.tokenizer_fields() is None
    assert checkpoint.config == json.loads((GOLDEN / name / "config.json").read_text())


def test_values_and_dtypes_are_those_that_were_saved():
    shards = SafetensorsFolder(GOLDEN / "llama_fp16_sharded")
    single = SafetensorsFolder(GOLDEN / "llama")
    name = "model.layers.3.mlp.up_proj.weight"
    assert (shards.dtype(name), single.dtype(name)) == (np.float16, np.float32)
    np.testing.assert_array_equal(shards.read(name, 5, 40), single.read(name, 5, 40).astype(np.float16))
    brains = SafetensorsFolder(GOLDEN / "qwen3_bf16_sharded")
    assert brains.dtype(name) == ml_dtypes.bfloat16
    assert 0.001 < brains.read(name, 5, 40).astype(np.float32).std() < 1


def test_generation_config_is_optional():
    assert SafetensorsFolder(GOLDEN / "llama").generation_config["eos_token_id"] == [2, 5]
    assert SafetensorsFolder(GOLDEN / "llama_tied").generation_config == {}


def test_all_numeric_types_scalars_and_odd_offsets_are_read(tmp_path, write_safetensors):
    (tmp_path / "config.json").write_text("{}")
    arrays = {
        "F64": np.array([[0.5], [1.5]]),
        "I64": np.array([-(1 << 60), 1]),
        "I32": np.array([-5, 6], np.int32),
        "I16": np.array([-5, 6], np.int16),
        "I8": np.array([-5, 6], np.int8),
        "U8": np.array([250], np.uint8),
        "BOOL": np.array([True, False]),
        "F32": np.array([0.25, 3.0], np.float32),
    }
    header, data = {}, b""
    for kind, array in arrays.items():
        header[kind] = {
            "dtype": kind,
            "shape": list(array.shape),
            "data_offsets": [len(data), len(data) + array.nbytes],
        }
        data += array.tobytes()
    header["scalar"] = {"dtype": "F32", "shape": [], "data_offsets": [len(data), len(data) + 4]}
    header["empty"] = {"dtype": "F32", "shape": [0, 4], "data_offsets": [0, 0]}
    data += np.float32(7.5).tobytes()
    text = json.dumps(header).encode()
    for padding in range(4):  # old writers did not align the data
        write_safetensors(tmp_path / "any.safetensors", text + b" " * padding, data)
        checkpoint = SafetensorsFolder(tmp_path)
        for kind, array in arrays.items():
            rows = checkpoint.read(kind, 0, len(array))
            assert rows.flags.aligned
            assert rows.dtype == array.dtype
            np.testing.assert_array_equal(rows, array)
        assert checkpoint.shape("scalar") == ()
        assert checkpoint.read("scalar", 0, 1).tolist() == [7.5]
        assert checkpoint.read("empty", 0, 0).shape == (0, 4)


def test_rows_outside_the_tensor_and_unknown_names_are_refused():
    checkpoint = SafetensorsFolder(GOLDEN / "llama")
    with pytest.raises(IndexError, match=r"rows 0:321 of lm_head.weight, which has 320"):
        checkpoint.read("lm_head.weight", 0, 321)
    with pytest.raises(InputError, match=r"no tensor lm_heat.weight among its 39"):
        checkpoint.read("lm_heat.weight", 0, 1)


def test_a_type_that_numpy_lacks_is_refused_when_its_tensor_is_asked_for(tmp_path, write_safetensors):
    (tmp_path / "config.json").write_text("{}")
    header = {"w": {"dtype": "F8_E5M2", "shape": [2], "data_offsets": [0, 2]}}
    write_safetensors(tmp_path / "model.safetensors", header, b"ab")
    with pytest.raises(InputError, match="w has type F8_E5M2, readable are F64, F32, F16, BF16"):
        SafetensorsFolder(tmp_path).dtype("w")


def test_a_damaged_folder_is_refused_in_one_line(folder):
    index, config = folder / "model.safetensors.index.json", folder / "config.json"
    whole = index.read_text()
    assert "is not a folder" in one_line(folder / "absent")

    index.write_text("{")
    assert f"{index} is not JSON: " in one_line(folder)
    index.write_text('{"metadata": {}}')
    assert "has no weight_map" in one_line(folder)
    index.write_text(whole.replace("model.embed_tokens.weight", "model.embed_tokens.wait"))
    assert "places model.embed_tokens.wait in model-00001-of-00002.safetensors, which lacks it" in one_line(folder)
    index.write_text(whole.replace("00002-of", "00003-of"))
    assert "names 2 shards, 1 of them missing (model-00003-of-00002.safetensors)" in one_line(folder)
    index.write_text(whole.replace("model-00002-of", "../model/model-00002-of"))
    assert "1 of them missing (../model/model-00002-of" in one_line(folder)

    for text, message in (
        ("[1]", "holds a JSON list, not an object"),
        ("{'a': 1}", "is not JSON: "),
        ("", "is not JSON: "),
    ):
        config.write_text(text)
        assert f"{config} {message}" in one_line(folder)
    config.unlink()
    assert "has no config.json" in one_line(folder)
    config.mkdir()
    assert f"cannot read {config}: Is a directory" in one_line(folder)


def test_any_safetensors_are_taken_when_nothing_names_them(folder):
    expected = set(SafetensorsFolder(folder).names())
    (folder / "model.safetensors.index.json").unlink()
    assert set(SafetensorsFolder(folder).names()) == expected
    shutil.copy(folder / "model-00001-of-00002.safetensors", folder / "again.safetensors")
    assert "both again.safetensors and model-00001-of-00002.safetensors hold lm_head.weight" in one_line(folder)


def test_a_folder_without_safetensors_says_what_it_has_instead(folder):
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    assert one_line(folder).endswith("no *.safetensors: finish the download")
    (folder / "pytorch_model.bin").touch()
    assert "pytorch_model.bin is a pickle, convert it to safetensors" in one_line(folder)
    (folder / "model.gguf").touch()
    assert f"to load the GGUF file, name it ({folder / 'model.gguf'})" in one_line(folder)


CHUNKED_READ = """
import sys
from pathlib import Path
from jaxllm.models.checkpoint.safetensors_folder import SafetensorsFolder

def peak_mb():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024

folder = SafetensorsFolder(Path(sys.argv[1]))
before, total = peak_mb(), 0.0
for start in range(0, 16384, 2048):
    total += float(folder.read("w", start, start + 2048).sum())
print(peak_mb() - before, total)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_reading_in_chunks_keeps_one_chunk_resident(tmp_path, write_safetensors):
    (tmp_path / "config.json").write_text("{}")
    data = np.ones((16384, 1024), np.float32)
    header = {"w": {"dtype": "F32", "shape": [16384, 1024], "data_offsets": [0, data.nbytes]}}
    write_safetensors(tmp_path / "model.safetensors", header, data.tobytes())
    done = subprocess.run(
        [sys.executable, "-c", CHUNKED_READ, str(tmp_path)], capture_output=True, text=True, check=True, timeout=60
    )
    growth, total = (float(word) for word in done.stdout.split())
    assert total == 16384 * 1024
    assert growth < 20  # MB, of 64 read in chunks of 8

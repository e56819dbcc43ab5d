import jax
import jax.numpy as jnp
import pytest

from jaxllm.engine.executable_store import ExecutableStore
from jaxllm.engine.step import RowState

FACTS = {"model": "a", "jax": "1", "blocks": "64"}


@pytest.fixture
def program(no_compile_cache) -> jax.stages.Compiled:
    def step(weights, kv, rows):
        return kv.at[0].add(weights["w"].sum()), RowState(rows.last_token + 1)

    abstract = {"w": jnp.ones(8)}, jnp.zeros(5), RowState(jnp.zeros(4, jnp.int32))
    return jax.jit(step, donate_argnums=(1, 2)).lower(*abstract).compile()


def open_store(tmp_path, **changes) -> ExecutableStore:
    return ExecutableStore(tmp_path / "store", FACTS | changes, jax.devices()[:1])


def test_what_was_saved_is_loaded_by_another_store_and_runs_with_its_donations(tmp_path, program):
    open_store(tmp_path).save("step", program)
    store = open_store(tmp_path)
    loaded = store.load("step")
    assert loaded is not None
    kv, rows = jnp.zeros(5), RowState(jnp.zeros(4, jnp.int32))
    new_kv, new_rows = loaded({"w": jnp.ones(8)}, kv, rows)
    assert new_kv.tolist() == [8, 0, 0, 0, 0]
    assert new_rows.last_token.tolist() == [1, 1, 1, 1]
    assert kv.is_deleted()
    assert rows.last_token.is_deleted()
    assert store.load("another") is None
    assert (store.num_loaded, store.num_saved) == (1, 0)
    assert not list((tmp_path / "store").glob("*/.*"))


def test_another_engine_gets_none_of_it_and_one_line_says_why(tmp_path, program, caplog):
    open_store(tmp_path).save("step", program)
    assert not caplog.messages
    store = open_store(tmp_path, jax="2")
    assert store.load("step") is None
    (line,) = caplog.messages
    assert line == f"{tmp_path / 'store'}: executables are for jax 1 (here 2), so programs are compiled anew"
    caplog.clear()
    store.save("step", program)
    assert open_store(tmp_path, jax="2").load("step") is not None
    assert open_store(tmp_path).load("step") is not None
    assert not caplog.messages


@pytest.mark.parametrize("damage", [lambda content: content[:-10], lambda content: b"", lambda content: content + b"x"])
def test_a_damaged_file_is_one_line_and_is_written_anew(tmp_path, program, damage, caplog):
    store = open_store(tmp_path)
    store.save("step", program)
    (path,) = (tmp_path / "store").glob("*/*.executable")
    path.write_bytes(damage(path.read_bytes()))
    assert store.load("step") is None
    (line,) = caplog.messages
    assert "(step) cannot be used, so it is compiled anew: its content is not what was written" in line
    store.save("step", program)
    assert store.load("step") is not None


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path, program, caplog):
    (tmp_path / "store").write_text("a file")
    store = open_store(tmp_path)
    store.save("step", program)
    store.save("other", program)
    (line,) = caplog.messages
    assert "nothing can be stored there" in line
    assert store.load("step") is None


def test_what_jax_cannot_serialize_is_left_out(tmp_path, caplog):
    store = open_store(tmp_path)
    store.save("step", "no program")  # pyright: ignore[reportArgumentType]
    assert "step cannot be stored" in caplog.text
    assert store.num_saved == 0


def test_what_comes_from_jaxs_own_cache_is_not_stored(tmp_path, caplog):
    # Compiled twice, the second time from the cache that all tests share.
    def compile_program() -> jax.stages.Compiled:
        return jax.jit(lambda x: jnp.cos(x) * 3.25).lower(jnp.ones(7)).compile()

    compile_program()
    store = open_store(tmp_path)
    store.save("step", store.compile("step", compile_program))
    assert store.num_saved == 0
    assert "jax's own cache has step, so it cannot be stored" in caplog.text

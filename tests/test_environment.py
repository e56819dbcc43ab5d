from pathlib import Path

from jaxllm.environment import prepare_environment


def test_what_the_user_set_is_left_alone():
    theirs = {
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5",
        "JAX_COMPILATION_CACHE_DIR": "/cache",
        "TF_CPP_MIN_LOG_LEVEL": "0",
        "XDG_CACHE_HOME": "/xdg",
    }
    environment = dict(theirs)
    prepare_environment(environment)
    assert {name: environment[name] for name in theirs} == theirs
    assert environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] == "0"


def test_compiled_programs_are_kept_in_the_users_cache():
    environment = {"XDG_CACHE_HOME": "/xdg"}
    prepare_environment(environment)
    assert environment["JAX_COMPILATION_CACHE_DIR"] == "/xdg/jaxllm/xla"
    environment = {}
    prepare_environment(environment)
    assert environment["JAX_COMPILATION_CACHE_DIR"] == str(Path.home() / ".cache" / "jaxllm" / "xla")
    assert environment["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.95"


def test_jaxs_own_cache_stays_off_beside_an_executable_store():
    environment = {}
    prepare_environment(environment, has_store=True)
    assert "JAX_COMPILATION_CACHE_DIR" not in environment

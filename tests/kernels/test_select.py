import ast
import importlib.util
import inspect
import logging
from pathlib import Path

import pytest

from jaxllm.kernels import select as select_module
from jaxllm.kernels.select import VERSIONS, Version, select


def test_every_operation_has_a_version_for_any_platform_with_a_callable_of_its_name():
    for operation in VERSIONS:
        for platform in ("cpu", "gpu"):
            function = select(operation, platform=platform)
            assert callable(function)
            assert function.__name__ == operation


def test_all_versions_of_an_operation_take_the_arguments_of_the_reference():
    for operation, versions in VERSIONS.items():
        reference = inspect.signature(select(operation, platform="cpu", preferred="reference"))
        for version in versions:
            # Read, not imported: what a version requires is not installed everywhere.
            spec = importlib.util.find_spec(version.module)
            assert spec is not None
            assert spec.origin is not None
            tree = ast.parse(Path(spec.origin).read_text())
            found = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == operation).args
            names = [argument.arg for argument in (*found.posonlyargs, *found.args, *found.kwonlyargs)]
            assert names == list(reference.parameters), version
            kinds = [p.kind is inspect.Parameter.KEYWORD_ONLY for p in reference.parameters.values()]
            assert len(found.kwonlyargs) == sum(kinds), version


def test_the_choice_is_logged(caplog):
    with caplog.at_level(logging.INFO):
        select("rms_norm", platform="cpu")
    assert "rms_norm: reference" in caplog.text


def test_the_first_version_that_runs_on_the_platform_is_taken(monkeypatch):
    fast = Version("fast", "math", ("gpu",))
    slow = Version("slow", "cmath")
    monkeypatch.setitem(select_module.VERSIONS, "sqrt", (fast, slow))
    assert select("sqrt", platform="gpu").__module__ == "math"
    assert select("sqrt", platform="cpu").__module__ == "cmath"
    assert select("sqrt", platform="gpu", preferred="slow").__module__ == "cmath"


def test_a_version_that_does_not_run_here_is_refused_with_those_that_do(monkeypatch):
    monkeypatch.setitem(select_module.VERSIONS, "sqrt", (Version("fast", "math", ("gpu",)), Version("slow", "cmath")))
    with pytest.raises(ValueError, match="sqrt: no version 'fast' on cpu; choose one of auto, slow"):
        select("sqrt", platform="cpu", preferred="fast")
    with pytest.raises(ValueError, match="sqrt: no version 'flash' on gpu; choose one of auto, fast, slow"):
        select("sqrt", platform="gpu", preferred="flash")


def test_a_version_whose_packages_are_missing_is_passed_over_with_one_line(monkeypatch, caplog):
    fast = Version("fast", "math", ("gpu",), requires=("no_such_package_here",))
    monkeypatch.setitem(select_module.VERSIONS, "sqrt", (fast, Version("slow", "cmath")))
    assert select("sqrt", platform="gpu").__module__ == "cmath"
    (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert warning.getMessage() == (
        "sqrt: fast cannot be used, the next best will be: import no_such_package_here fails: "
        "No module named 'no_such_package_here'"
    )
    with pytest.raises(ValueError, match="sqrt: version 'fast' cannot be used: import no_such_package_here fails"):
        select("sqrt", platform="gpu", preferred="fast")


def test_a_version_that_needs_a_newer_card_is_passed_over_with_one_line(monkeypatch, caplog):
    monkeypatch.setattr(select_module, "capability", lambda: 75)
    fast = Version("fast", "math", ("gpu",), least_capability=80)
    monkeypatch.setitem(select_module.VERSIONS, "sqrt", (fast, Version("slow", "cmath")))
    assert select("sqrt", platform="gpu").__module__ == "cmath"
    assert "sqrt: fast cannot be used" in caplog.text
    assert "needs compute capability 8.0, the GPU has 7.5" in caplog.text
    monkeypatch.setattr(select_module, "capability", lambda: 89)
    assert select("sqrt", platform="gpu").__module__ == "math"


def test_a_version_made_for_one_kind_of_card_is_passed_over_on_newer_ones(monkeypatch, caplog):
    monkeypatch.setattr(select_module, "capability", lambda: 100)
    fast = Version("fast", "math", ("gpu",), least_capability=90, most_capability=90)
    monkeypatch.setitem(select_module.VERSIONS, "sqrt", (fast, Version("slow", "cmath")))
    assert select("sqrt", platform="gpu").__module__ == "cmath"
    assert "is made for compute capability 9.0, the GPU has 10.0" in caplog.text
    monkeypatch.setattr(select_module, "capability", lambda: 90)
    assert select("sqrt", platform="gpu").__module__ == "math"

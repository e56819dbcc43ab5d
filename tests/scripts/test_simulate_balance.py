"""Requests that come at random are spread evenly over data ranks."""

import importlib.util
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    spec = importlib.util.spec_from_file_location("simulate_balance", SCRIPTS / "simulate_balance.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def test_at_four_fifths_of_what_four_ranks_can_serve_the_busiest_has_few_tokens_more_than_the_mean(script):
    args = Namespace(workload="W2", ranks=4, load=0.8, max_num_seqs=128, max_num_batched_tokens=2048)
    simulation = script.Simulation(Namespace(**vars(args), num_blocks=20_000, warm_up=600, steps=300))
    capacity = simulation.capacity()
    balanced, round_robin = (script.imbalance(list(simulation.run(ours, 0.8 * capacity))) for ours in (True, False))
    assert 1.0 <= balanced <= 1.1
    assert balanced < round_robin

import json
from itertools import pairwise

import pytest

from jaxllm.bench.workloads import workload_lengths
from jaxllm.config.errors import InputError
from jaxllm.planning.traffic import read_trace
from jaxllm.simulate.arrivals import Arrival, from_trace, lengths_of, synthetic


def traced(tmp_path, *lines: dict) -> list[Arrival]:
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(json.dumps({"input_length": 5, "output_length": 2} | line) for line in lines))
    return from_trace(read_trace(str(file)), str(file))


def test_a_traces_arrivals_count_from_its_first_in_order(tmp_path):
    found = traced(tmp_path, {"timestamp": 9000}, {"timestamp": 8000, "input_length": 7})
    assert found == [Arrival(7, 2, 0.0), Arrival(5, 2, 1.0)]
    assert traced(tmp_path, {"step": 4}, {"step": 2}) == [Arrival(5, 2, step=2), Arrival(5, 2, step=4)]
    assert traced(tmp_path, {}, {}) == [Arrival(5, 2)] * 2


def test_a_trace_has_times_or_steps_in_every_line(tmp_path):
    for lines in ([{"timestamp": 1}, {}], [{"step": 1}, {"timestamp": 1}], [{"step": 1, "timestamp": 1}]):
        with pytest.raises(InputError, match="every line must have a timestamp, or every line a step"):
            traced(tmp_path, *lines)


def test_processes_keep_their_rate():
    lengths = lengths_of("W2", 0, 0, 2500)
    assert lengths[:1000] == lengths[1000:2000] == workload_lengths("W2")
    gaps = [b.time - a.time for a, b in pairwise(synthetic(lengths, "poisson", 50.0))]
    assert sum(gaps) / len(gaps) == pytest.approx(1 / 50, rel=0.06)
    assert sum(gap > 2 / 50 for gap in gaps) / len(gaps) == pytest.approx(0.135, abs=0.03)
    assert {round(b.time - a.time, 9) for a, b in pairwise(synthetic(lengths, "constant", 50.0))} == {0.02}
    assert {arrival.time for arrival in synthetic(lengths, "at-once", None)} == {0.0}
    assert lengths_of(None, 3, 4, 2) == [(3, 4)] * 2

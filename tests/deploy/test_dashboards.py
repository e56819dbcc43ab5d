"""The Grafana dashboard and the Prometheus rules ask for series and labels that a server really has."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from jaxllm.api.metrics import RequestBooks
from jaxllm.engine.messages import EngineStats
from jaxllm.server.metrics import make_registry

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana" / "jaxllm.json").read_text())
RULES = yaml.safe_load((DEPLOY / "prometheus" / "jaxllm-alerts.yml").read_text())["groups"][0]["rules"]
_OF_PROMETHEUS = {"instance", "job"}  # labels that it adds to everything
_SERIES = re.compile(r"(?:vllm|jaxllm):\w+")


def labels_by_series() -> dict[str, set[str]]:
    """What a server exposes: each series with its labels."""
    text = generate_latest(make_registry(lambda: RequestBooks(4096).read("m", EngineStats()))).decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {sample.name: set(sample.labels) for sample in samples}


def panels() -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def asked() -> list[str]:
    """Every expression of the dashboard and of the rules, as Prometheus gets it from a server with vLLM's prefix."""
    found = [target["expr"] for panel in panels() for target in panel["targets"]]
    found += [variable["definition"] for variable in DASHBOARD["templating"]["list"] if "definition" in variable]
    return [expression.replace("${prefix}", "vllm:") for expression in [*found, *(rule["expr"] for rule in RULES)]]


def test_every_series_that_is_asked_for_exists_and_has_the_labels_that_are_told_apart():
    exposed, num_series = labels_by_series(), 0
    for expression in asked():
        series = _SERIES.findall(expression)
        grouped = {label for group in re.findall(r"by \(([^)]*)\)", expression) for label in group.split(", ")}
        matched = {label for group in re.findall(r"{([^}]*)}", expression) for label in re.findall(r"(\w+)=", group)}
        for name in series:
            assert name in exposed, f"{expression}: no server has {name}"
            assert grouped | matched <= exposed[name] | _OF_PROMETHEUS, expression
        num_series += len(series)
    assert num_series > 50


def test_a_legend_names_labels_that_its_expression_leaves():
    exposed = labels_by_series()
    for panel in panels():
        for target in panel["targets"]:
            expression = target["expr"].replace("${prefix}", "vllm:")
            shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            kept = {label for group in re.findall(r"by \(([^)]*)\)", expression) for label in group.split(", ")}
            if not re.search(r"\b(sum|avg|max)\b", expression):
                kept = exposed[_SERIES.findall(expression)[0]] | _OF_PROMETHEUS
            assert shown <= kept, panel["title"]


def test_panels_have_names_of_their_own_and_do_not_overlap():
    places = set()
    for panel in DASHBOARD["panels"]:
        grid = panel["gridPos"]
        own = {(x, y) for x in range(grid["x"], grid["x"] + grid["w"]) for y in range(grid["y"], grid["y"] + grid["h"])}
        assert not own & places
        assert grid["x"] + grid["w"] <= 24
        places |= own
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    assert len({panel["title"] for panel in panels()}) == len(panels()) >= 20


def test_every_alert_says_how_bad_it_is_and_what_to_do():
    for rule in RULES:
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert set(rule["annotations"]) == {"summary", "description"}
    assert len({rule["alert"] for rule in RULES}) == len(RULES) == 8


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)")
def test_promtool_accepts_the_rules_and_they_fire_when_they_should():
    for words in (["check", "config", "prometheus.yml"], ["test", "rules", "jaxllm-alerts-test.yml"]):
        done = subprocess.run(
            ["promtool", *words], cwd=DEPLOY / "prometheus", capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr

"""What a suite measured -> one JSON and one table, beside the floor and beside others on the same device.

Knows which figure counts for which workload; measures nothing.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxllm.bench.report import print_facts, table_lines, write_json
from jaxllm.bench.suite_plan import Part

PEERS = Path(__file__).resolve().parents[2] / "docs" / "benchmarks"  # of a checkout; elsewhere there are none


class Figure(NamedTuple):
    """What is told of a workload: a name, a unit, and whether less is better."""

    name: str
    unit: str
    less_is_better: bool = False

    def value(self, result: Mapping[str, Any]) -> float | None:
        """Reads it from a measurement as JSON; None where it could not be told."""
        if self.name not in ("TTFT", "TPOT"):
            return result[_SPEEDS[self.name]]
        spread = result["latencies_ms"][self.name.lower()]
        return None if spread is None else spread["p50"]

    def floor(self, result: Mapping[str, Any]) -> float | None:
        """What the device would allow."""
        floor = result.get("floor")
        if floor is None:
            return None
        if self.name in ("TTFT", "TPOT"):
            return 1e3 * floor[self.name.lower()]
        tokens = result["num_output_tokens" if self.name == "output" else "total_num_tokens"]
        return tokens / floor["total"]


_SPEEDS = {"output": "output_tokens_per_second", "total": "tokens_per_second"}
TTFT, TPOT = Figure("TTFT", "ms", less_is_better=True), Figure("TPOT", "ms", less_is_better=True)
OUTPUT, TOTAL = Figure("output", "tok/s"), Figure("total", "tok/s")
FIGURES = {"L1": (TTFT, TPOT), "L8": (TPOT,), "W1": (OUTPUT,), "W2": (OUTPUT,), "W3": (TOTAL,), "H1": (OUTPUT,)}
START = "start"


class Suite:
    """The rows of a run, in order: each a workload on an engine, measured or with the reason why not."""

    def __init__(self, facts: dict[str, Any]):
        self.facts = facts
        self.rows: list[dict[str, Any]] = []
        self.ceilings: tuple[float, float] | None = None
        self._seen: set[tuple[str, int, str, str]] = set()

    @property
    def has_failed(self) -> bool:
        return any(row["status"].startswith("failed") for row in self.rows)

    def add(self, part: Part, content: Mapping[str, Any]) -> None:
        """Adds what a part wrote."""
        if "ceilings" in content:
            self.ceilings = (content["ceilings"]["copy"], content["ceilings"]["matmul"])
            self.facts["ceilings"] = content["ceilings"]
        facts = content.get("facts", content)
        for name in ("device", "versions", "dtype"):
            if name in facts:
                self.facts.setdefault(name, facts[name])
        results = content.get("results", {})
        found = [(r["workload"], r) for r in results] if isinstance(results, list) else list(results.items())
        start = {"start_up_seconds": facts.get("start_up_seconds"), "engine_facts": facts.get("engine")}
        for number, (workload, result) in enumerate(found, 1):
            self._append(part, workload, result["engine"], "measured", result | (start if number == len(found) else {}))
        self.add_missing(part, content.get("error", "not run: it was not reached"))

    def add_missing(self, part: Part, reason: str = "not run: the suite was ended before") -> None:
        """Adds the workloads of a part of which nothing is known, with the reason."""
        for workload in part.workloads:
            if not any(
                key[:3] == (part.model, part.num_seqs, workload) and key[3].startswith(part.engine)
                for key in self._seen
            ):
                self._append(part, workload, part.engine, reason, None)

    def write(self, path: str | None) -> None:
        """Writes all of it, if the user named a file."""
        write_json(path, self.as_json())

    def as_json(self) -> dict[str, Any]:
        return {**self.facts, "rows": self.rows}

    def _append(self, part: Part, workload: str, engine: str, status: str, result: Mapping[str, Any] | None) -> None:
        if result is not None and "floor" not in result:  # it is the device's, whichever engine runs there
            same = (r["result"] for r in self.rows if (r["model"], r["workload"]) == (part.model, workload))
            result = {**result, "floor": next((r["floor"] for r in same if r is not None), None)}
        self._seen.add((part.model, part.num_seqs, workload, engine))
        row = {"model": part.model, "max_num_seqs": part.num_seqs, "workload": workload, "engine": engine}
        self.rows.append(row | {"status": status, "result": result})


class Peer(NamedTuple):
    """Another engine's figures on some device, by (model, sequences at once, workload, name of the figure)."""

    engine: str
    device: str
    figures: dict[tuple[str, int, str, str], float]


def read_peers(folder: Path, device: str) -> list[Peer]:
    """Reads what other engines reached on the same kind of device."""
    peers = []
    for file in sorted(folder.glob("*.json")):
        content = json.loads(file.read_text())
        if "figures" in content and content["device"] in device:
            figures = {
                (f["model"], f["max_num_seqs"], f["workload"], f["figure"]): f["value"] for f in content["figures"]
            }
            peers.append(Peer(content["engine"], content["device"], figures))
    return peers


def print_suite(suite: Suite) -> None:
    """Prints the facts and the table."""
    print_facts(suite.facts)
    print()
    peers = read_peers(PEERS, suite.facts.get("device", ""))
    print("\n".join(suite_lines(suite.as_json(), peers)), flush=True)


def suite_lines(report: Mapping[str, Any], peers: Sequence[Peer]) -> list[str]:
    """Gives the table: each figure, its floor, and what others reached."""
    header = ["model", "seqs", "workload", "engine", "figure", "measured", "floor", "of floor"]
    header += [peer.engine for peer in peers] + ["padding", "host ms", "wait ms"]
    rows = []
    for row in report["rows"]:
        about = [row["model"], str(row["max_num_seqs"]), row["workload"], row["engine"]]
        if row["result"] is None:
            rows.append([*about, row["status"], *[""] * (len(header) - 5)])
            continue
        steps = row["result"].get("steps")
        host = (
            [f"{steps['padding_share']:.1%}", f"{steps['host_ms']:.3f}", f"{steps['wait_ms']:.3f}"]
            if steps
            else [""] * 3
        )
        for figure, value, floor in figures_of(row):
            beside = [
                peer.figures.get((row["model"], row["max_num_seqs"], row["workload"], figure.name)) for peer in peers
            ]
            if row["engine"] != "jaxllm":
                beside = [None] * len(peers)
            rows.append([
                *about, f"{figure.name} {figure.unit}", show(value), show(floor), show_share(figure, value, floor),
                *map(show, beside), *host,
            ])  # fmt: skip
        if row["result"].get("start_up_seconds"):
            beside = [show(peer.figures.get((row["model"], row["max_num_seqs"], "", START))) for peer in peers]
            seconds = show(row["result"]["start_up_seconds"])
            rows.append([*about[:2], "", row["engine"], f"{START} s", seconds, "", "", *beside, "", "", ""])
    return table_lines(header, rows, left=5)


def figures_of(row: Mapping[str, Any]) -> Iterator[tuple[Figure, float, float | None]]:
    """Gives what counts of a measured row, each with its floor."""
    for figure in FIGURES[row["workload"]]:
        value = figure.value(row["result"])
        if value is not None:
            yield figure, value, figure.floor(row["result"])


def show(value: float | None) -> str:
    """A figure with as many digits as mean something."""
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def show_share(figure: Figure, value: float, floor: float | None) -> str:
    """How much of what the device allows was reached."""
    if floor is None:
        return ""
    return f"{floor / value if figure.less_is_better else value / floor:.0%}"


_WORDS = {
    "L1": "L1, one request",
    "L8": "L8, eight requests",
    "W1": "W1, decode-heavy",
    "W2": "W2, mixed",
    "W3": "W3, prefill-heavy",
    "H1": "H1, 200 requests",
    "TTFT": "time to first token",
    "TPOT": "time per token",
    "output": "output tokens a second",
    "total": "tokens a second, prompts included",
}


def readme_lines(report: Mapping[str, Any], peers: Sequence[Peer], file: str) -> list[str]:
    """Gives what README shows of a suite's file: what it was measured on, and our engine's rows beside the peers'."""
    measured = [row for row in report["rows"] if row["result"] is not None and row["engine"] == "jaxllm"]
    models = list(dict.fromkeys(row["model"] for row in measured))
    has_floors = any(floor is not None for row in measured for _, _, floor in figures_of(row))
    columns = ["model", "what", "jaxllm", *(["of the floor"] if has_floors else []), *(peer.engine for peer in peers)]
    lines = ["| " + " | ".join(cells) + " |" for cells in (columns, ["---"] * len(columns))]
    fewest = min(row["max_num_seqs"] for row in measured)
    for row in measured:
        model, seqs = row["model"], row["max_num_seqs"]
        many = "" if seqs == fewest else f", {seqs} sequences at once"
        told = [
            (f"{_WORDS[row['workload']]}{many}: {_WORDS[f.name]}", f, value, floor, row["workload"])
            for f, value, floor in figures_of(row)
        ]
        # With stored executables it is another start than the peers'.
        if row["result"].get("start_up_seconds") and not many and "--executables" not in report["command"]:
            start = Figure(START, "s", less_is_better=True)
            told.append(("start, until it answers", start, row["result"]["start_up_seconds"], None, ""))
        for words, figure, value, floor, workload in told:
            unit = f" {figure.unit}" if figure.unit in ("ms", "s") else ""
            cells = [model, words, f"{show(value)}{unit}"]
            cells += [show_share(figure, value, floor)] if has_floors else []
            for peer in peers:
                other = peer.figures.get((model, seqs, workload, figure.name))
                cells.append("" if other is None else f"{show(other)}{unit}")
            lines.append("| " + " | ".join(cells) + " |")
    return [
        f"The shapes of {' and '.join(models)} with random weights, {report['dtype']}, {report['device']}, jax "
        f"{report['versions']['jax']}, {fewest} sequences at most",
        f"unless a row says otherwise, at commit {report['commit']} ([JSON]({file})).",
        *([report["parts_note"]] if "parts_note" in report else []),
        "",
        *lines,
        "",
        "```bash",
        report["command"],
        "```",
    ]

"""Writes the tables of docs/flags.md from the dataclasses of flags, README's from docs/benchmarks. Starts no engine.

Run it after a flag or a figure has changed: `make docs`. With --check it writes nothing, and its exit status says
whether the pages are up to date.
"""

import dataclasses
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from jaxllm.bench.args import LatencyArgs, MeshArgs, SuiteArgs, ThroughputArgs
from jaxllm.bench.serve_args import ServeBenchArgs
from jaxllm.bench.suite_report import read_peers, readme_lines
from jaxllm.calibrate.command import CalibrateArgs
from jaxllm.config.engine_args import NOT_BUILT, EngineArgs
from jaxllm.config.flags_without_effect import FLAGS_WITHOUT_EFFECT
from jaxllm.config.server_args import NOT_BUILT_IN_SERVER, ServerArgs
from jaxllm.diagnose.command import DiagnoseArgs
from jaxllm.planning.command import PlanArgs
from jaxllm.server.run_batch import RunBatchArgs
from jaxllm.simulate.command import SimulateArgs
from jaxllm.terminal.args import ChatArgs, CompleteArgs
from jaxllm.terminal.compile import CompileArgs
from jaxllm.terminal.convert import ConvertArgs

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "docs" / "benchmarks"
DEVICE = "NVIDIA H200"  # README's figures are of one


def spelled(name: str, default: object) -> str:
    """The spelling on the command line; a switch has two."""
    dashed = name.replace("_", "-")
    return f"`--{dashed}` / `--no-{dashed}`" if isinstance(default, bool) else f"`--{dashed}`"


def shown(value: object) -> str:
    """A default as one would type it; nothing where there is none."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        value = " ".join(map(str, value))
    return "" if value in (None, "") else f"`{value}`"


def flag_table(args: type) -> str:
    """One row for each field of a dataclass of flags."""
    rows = ["| flag | default | meaning |", "| --- | --- | --- |"]
    for field in dataclasses.fields(args):
        meaning = field.metadata["help"].replace("|", "\\|")
        rows.append(f"| {spelled(field.name, field.default)} | {shown(field.default)} | {meaning} |")
    return "\n".join(rows)


def refused_table(not_built: Mapping[str, object]) -> str:
    """One row for each flag whose feature does not exist yet, with the one value that it may have."""
    rows = ["| flag | accepted value |", "| --- | --- |"]
    rows += [f"| `--{name.replace('_', '-')}` | {shown(value) or 'none'} |" for name, value in not_built.items()]
    return "\n".join(rows)


def without_effect_table() -> str:
    """One row for each flag that means nothing here, with the reason."""
    rows = ["| flag | why |", "| --- | --- |"]
    rows += [f"| `--{name.replace('_', '-')}` | {each.why} |" for name, each in FLAGS_WITHOUT_EFFECT.items()]
    return "\n".join(rows)


def fill(page: str, tables: Mapping[str, str]) -> str:
    """Puts each table between its two markers.

    Raises:
        ValueError: the page lacks the markers of a table.
    """
    for name, table in tables.items():
        marked = rf"(<!-- begin {name} -->\n).*?(<!-- end {name} -->)"
        page, count = re.subn(marked, lambda m, table=table: f"{m[1]}{table}\n{m[2]}", page, flags=re.DOTALL)
        if count != 1:
            raise ValueError(f"a page has the markers of {name!r} {count} times, not once")
    return page


def figures() -> str:
    """README's figures, of the newest run of `jaxllm bench suite`."""
    read = {file: json.loads(file.read_text()) for file in sorted(BENCHMARKS.glob("*.json"))}
    suites = {file: report for file, report in read.items() if "date" in report and DEVICE in report["device"]}
    newest = max(suites, key=lambda file: suites[file]["date"])
    peers = read_peers(BENCHMARKS, DEVICE)
    return "\n".join(readme_lines(suites[newest], peers, newest.relative_to(ROOT).as_posix()))


def pages() -> dict[Path, dict[str, str]]:
    """The tables of each page."""
    flags = {
        "engine flags": flag_table(EngineArgs),
        "server flags": flag_table(ServerArgs),
        "run-batch flags": flag_table(RunBatchArgs),
        "bench throughput flags": flag_table(ThroughputArgs),
        "bench latency flags": flag_table(LatencyArgs),
        "bench serve flags": flag_table(ServeBenchArgs),
        "bench suite flags": flag_table(SuiteArgs),
        "bench mesh flags": flag_table(MeshArgs),
        "chat flags": flag_table(ChatArgs),
        "complete flags": flag_table(CompleteArgs),
        "compile flags": flag_table(CompileArgs),
        "convert flags": flag_table(ConvertArgs),
        "plan flags": flag_table(PlanArgs),
        "calibrate flags": flag_table(CalibrateArgs),
        "simulate flags": flag_table(SimulateArgs),
        "diagnose flags": flag_table(DiagnoseArgs),
        "refused engine flags": refused_table(NOT_BUILT),
        "refused server flags": refused_table(NOT_BUILT_IN_SERVER),
        "flags without effect": without_effect_table(),
    }
    return {ROOT / "docs" / "flags.md": flags, ROOT / "README.md": {"figures": figures()}}


def main() -> int:
    """Writes the pages, or checks them; gives the exit status."""
    status = 0
    for page, tables in pages().items():
        old = page.read_text()
        new = fill(old, tables)
        if "--check" not in sys.argv[1:]:
            page.write_text(new)
        elif new != old:
            print(f"{page.relative_to(ROOT)} is out of date: run `make docs`", file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())

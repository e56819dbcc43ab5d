"""Which group of work a kernel belongs to: one table. Knows names of kernels and of our functions; no times."""

import re
from collections.abc import Mapping
from typing import NamedTuple

Frames = tuple[str, ...]  # "file.py:function" of an operation, the innermost first


class Group(NamedTuple):
    """A group, the kernels' names that belong to it, and the functions whose operations do."""

    title: str
    kernels: str
    functions: str


# A kernel's own name decides first, in this order. XLA's fusions are named after what is in them, not what they are
# for: for those the innermost function that some row names decides.
GROUPS = (
    Group("transfers", r"^Memcpy(HtoD|DtoH|H2D|D2H)", "$^"),
    Group("copies", r"^(Memcpy|Memset|copy)|_copy_fusion|^wrapped_copy", "$^"),
    Group("collectives", r"nccl|all_?reduce|all_?gather|all_?to_?all|exchange_words", r"^lax/parallel"),
    Group("attention, work list", r"$^", r"work_list\.py"),
    Group("attention, prefill", r"prefill_tiles|fmha|flash", r"(mosaic|triton)_prefill\.py"),
    Group("attention, decode", r"decode_(e4m3_)?chunks", r"paged_attention/"),
    Group("rope + KV write", r"turn_rows|write_rows", r"rope_kv_write/|kv_write/|/rope/|:rope_tables|/rope\.py"),
    Group("sampling", r"draw_tokens|scan_logits|score_tokens", r"kernels/sampling/|engine/(sampler|vocab_ranks)\.py"),
    Group(
        "GEMM",
        r"gemm|nvjet|cutlass|xmma|cublas|splitk|multiply_(few_rows|layer|fused)|wgmma|mosaic|^dot(_|\.|$)",
        r"kernels/matmul/|models/parameters\.py",
    ),
    Group("norm + residual", r"$^", r"rms_norm/|layer_norm/|models/norms\.py|Layer\.__call__"),
    Group("activation", r"$^", r"MLP\.__call__|models/activations"),
    Group("inputs, embedding", r"$^", r"step_inputs\.py|packing\.py|Embedding\.|engine/step\.py|models/forward\.py"),
)
OTHER = "other"
_NAMES = [(group.title, re.compile(group.kernels, re.IGNORECASE)) for group in GROUPS]
_FUNCTIONS = [(group.title, re.compile(group.functions)) for group in GROUPS]


def group_of(kernel: str, frames: Frames = ()) -> str:
    """Gives the title of a kernel's group."""
    for title, pattern in _NAMES:
        if pattern.search(kernel):
            return title
    for frame in frames:
        for title, pattern in _FUNCTIONS:
            if pattern.search(frame):
                return title
    return OTHER


def titles() -> list[str]:
    """Lists the groups in the order of the table."""
    return [*(group.title for group in GROUPS), OTHER]


_ROW = re.compile(r"^(\d+) (.*)$", re.MULTILINE)
_COMPUTATION = re.compile(r"(?:ENTRY )?%?([\w.-]+) \(.*\{$")
_OPERATION = re.compile(r"\s+(?:ROOT )?%?([\w.-]+) = ")
_FRAME, _CALLED = re.compile(r"\bstack_frame_id=(\d+)"), re.compile(r"\bcalls=%?([\w.-]+)")


def frames_of(hlo: str) -> dict[str, Frames]:
    """Reads from a compiled program's text where in our source each operation comes from, by its kernel's name."""
    tables = {name: dict(_ROW.findall(_section(hlo, name))) for name in _SECTIONS}
    frames = {id: _numbers(row) for id, row in tables["StackFrames"].items()}
    # The first frame has no caller: what is written there tells whether ids of callers begin at 0 or at 1.
    none = frames.get("1", {}).get("parent_frame_id", 0)
    stacks: dict[int, Frames] = {}

    def stack(id: int) -> Frames:
        if id not in stacks:
            row = frames.get(str(id))
            if row is None:
                return ()
            place = _numbers(tables["FileLocations"].get(str(row["file_location_id"]), ""))
            file = tables["FileNames"].get(str(place.get("file_name_id")), "").strip('"')
            function = tables["FunctionNames"].get(str(place.get("function_name_id")), "").strip('"')
            caller = row.get("parent_frame_id", 0) - none
            stacks[id] = (f"{file}:{function}", *(stack(caller) if 0 < caller < id else ()))
        return stacks[id]

    return {kernel_name(name): stack(int(id)) for name, id in _innermost(hlo).items()}


def _innermost(hlo: str) -> dict[str, str]:
    """The frame of each operation; of a fusion that has none, the last one within it."""
    own, within, called, computation = {}, {}, {}, ""
    for line in hlo.splitlines():
        if header := _COMPUTATION.match(line):
            computation = header[1]
        elif operation := _OPERATION.match(line):
            if frame := _FRAME.search(line):
                own[operation[1]] = within[computation] = frame[1]
            elif calls := _CALLED.search(line):
                called[operation[1]] = calls[1]
    return own | {name: within[inner] for name, inner in called.items() if inner in within}


def kernel_name(operation: str) -> str:
    """What XLA calls the kernel of an operation."""
    return operation.replace(".", "_").replace("-", "_")


def frames_for(kernel: str, operation: str, frames: Mapping[str, Frames]) -> Frames:
    """Finds where a kernel comes from, by its own name, by that name without a counter, or by its operation's."""
    for name in (kernel_name(kernel), re.sub(r"_\d+$", "", kernel_name(kernel)), kernel_name(operation)):
        if frames.get(name):
            return frames[name]
    return ()


_SECTIONS = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")


def _section(hlo: str, name: str) -> str:
    found = re.search(rf"^{name}\n(.*?)\n\n", hlo, re.DOTALL | re.MULTILINE)
    return found[1] if found else ""


def _numbers(row: str) -> dict[str, int]:
    return {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", row)}

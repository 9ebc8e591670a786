"""Compiles every kernel for GPUs that need not be there, and prints what came out as JSON.

    python tests/support/compile_kernels.py cuda:80 cuda:90 cuda:100 hip:gfx942
        every kernel, once (--all: every variant; --gather, --select: only these)
    python tests/support/compile_kernels.py --launches
        as DeviceCandidates launches them

A program of its own, since Triton either compiles or interprets, whichever TRITON_INTERPRET said at import.
"""

from __future__ import annotations

import importlib
import itertools
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from geartrain.device.kernels.gather_order import AMD, NVIDIA, warps_of

MODULES = ("weighted_draw", "distinct_draw", "top_rows", "scatter_update", "gather_kernels", "philox")

# What pointers point to, by the names of arguments.
POINTERS = {
    "sums": "*i64", "running": "*i64", "numbers": "*u32", "tile_of": "*i32", "rest_of": "*i64", "rows": "*i64",
    "probability": "*fp64", "selectable": "*u8", "priorities": "*u32", "old": "*u32", "won": "*u8", "age_of": "*i32",
    "best": "*i64", "keys": "*i64", "bits": "*i64", "groups": "*i64", "top": "*i64", "shares": "*i64",
    "tiles": "*i64", "values": "*u32", "segment": "*u8", "arena": "*u8", "generations": "*u32", "ends": "*i32",
    "places": "*u32", "cu_seqlens": "*i32", "fields": "*i64", "slots": "*i32", "factors": "*fp32", "counts": "*i32",
    "lengths": "*i32", "contents": "*i64", "targets": "*i64",
}  # fmt: skip

# Constants that kernels are launched with, the sizes those on a GPU.
SIZES = {
    "tile_sums_kernel": {"TILE": 256, "TILES": 8},
    "find_tiles_kernel": {"DRAWS": 256},
    "find_rows_kernel": {"PART": 16, "DRAWS": 16},
    "any_row_kernel": {"DRAWS": 256},
    "bits_kernel": {"BLOCK": 256},
    "take_rows_kernel": {"TOP": 8, "GROUP": 1024, "TILE": 256},
    "best_keys_kernel": {"TILE": 256, "TILES": 8},
    "tile_keys_kernel": {"TILE": 256, "TILES": 8},
    "take_kernel": {"BLOCK": 256},
    "bid_kernel": {"BLOCK": 256},
    "settle_kernel": {"BLOCK": 256},
    "write_kernel": {"TILE": 256, "BLOCK": 256},
    "gather_rows_kernel": {"STATUS_STRIDE": 48, "CHUNK": 2048, "MASK_BLOCK": 256},
    "count_steps_kernel": {"BLOCK": 128},
    "look_up_rows_kernel": {"STATUS_STRIDE": 48, "BLOCK": 128, "ORDER": 1},
    "mark_torn_kernel": {"STATUS_STRIDE": 48, "BLOCK": 128, "ORDER": 1},
}
CHOICES: dict[str, tuple[Any, ...]] = {
    "HAS_SELECTABLE": (False, True), "HAS_NUMBERS": (False, True), "STRATIFIED": (False, True),
    "HAS_AGES": (False, True), "ORDER": (0, 1, 2), "WINDOWED": (False, True), "ENDS": (0, 1, 2), "NUMBERED": (True,),
    "PACKED": (True, False), "PAD_LEFT": (True,), "PLACED": (True,), "KEYED": (False, True), "CONTENTS": (False, True),
    "TARGETED": (True, False),
}  # fmt: skip


# Fields as (dtype, bytes of an element, bytes of a step, converted to): steps that are multiples of 16 bytes, of 4 (11
# floats) and of 1, and pixels on their way to bfloat16; one by one, and all in one launch.
FIELDS: dict[str, tuple[str, int, int, str | None]] = {
    "aligned": ("float32", 4, 64, None), "odd": ("float32", 4, 44, None), "bytes": ("uint8", 1, 75, None),
    "halves": ("float16", 2, 6, None), "doubles": ("float64", 8, 24, None), "pixels": ("uint8", 1, 84, "bfloat16"),
    "aligned pixels": ("uint8", 1, 7056, "bfloat16"), "rounded": ("float32", 4, 44, "float16"),
}  # fmt: skip


def gather_kinds(names: list[str]) -> dict[str, Any]:
    """What `GatherPlan` compiles the gather with for these fields."""
    from geartrain.device.kernels.gather import GatherPlan
    from geartrain.device.kernels.gather_layout import GatherField, SegmentLayout

    fields = []
    for name in names:
        dtype, itemsize, step, into = FIELDS[name]
        fields.append(GatherField(name, dtype, itemsize, 0, 64 * step, 64 * step, step, True, into))
    plan = GatherPlan(SegmentLayout(0, 0, 48, 10, 64), fields, 20, True)
    return {"KINDS": plan.kinds, "CHUNK": plan.chunk}


def kernels() -> dict[str, JITFunction[Any]]:
    found = {}
    for module in MODULES:
        for name, value in vars(importlib.import_module(f"geartrain.device.kernels.{module}")).items():
            if isinstance(value, JITFunction) and name.endswith("_kernel"):
                found[name] = value
    return found


def variants(kernel: JITFunction[Any], name: str, all_of_them: bool) -> list[dict[str, Any]]:
    """The constants a kernel is compiled with: every choice, or all switched on."""
    free = [p.name for p in kernel.params if p.is_constexpr and p.name not in (*SIZES[name], "KINDS")]
    choices = [CHOICES[p] if all_of_them else CHOICES[p][-1:] for p in free]
    made = [SIZES[name] | dict(zip(free, chosen, strict=True)) for chosen in itertools.product(*choices)]
    if name != "gather_rows_kernel":
        return made
    each = [gather_kinds([field]) for field in FIELDS] if all_of_them else [gather_kinds(["aligned"])]
    return [made[-1] | kinds for kinds in each] + [one | gather_kinds(list(FIELDS)) for one in made]


def source(kernel: JITFunction[Any], constants: dict[str, Any], value: str = "*u32") -> ASTSource:
    signature, attributes = {}, {}
    for i, p in enumerate(kernel.params):
        if p.is_constexpr:
            signature[p.name] = "constexpr"
        elif p.annotation_type:
            signature[p.name] = p.annotation_type
        else:
            signature[p.name] = value if p.name == "values" else POINTERS[p.name]
            attributes[(i,)] = [["tt.divisibility", 16]]  # as every tensor that torch allocates
    return ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)


def nvidia_report(cubin: bytes) -> dict[str, int]:
    """Registers of a thread, and bytes of memory it spills into."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100).stdout
    found = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    return {"registers": found["REG"], "spilled": found["STACK"] + found["LOCAL"]}


def reads_in_order(ptx: str) -> list[str]:
    """The reads of host memory, the fences between them and the stores to the batch, as they follow one another."""
    names = {
        "ld.acquire.sys.global.b64": "acquire", "ld.volatile.global.v4.b32": "wide load",
        "ld.volatile.global.v2.b64": "wide load", "fence.acq_rel.sys": "fence",
        "ld.volatile.global.b64": "word", "ld.volatile.global.b32": "length", "st.global": "store",
    }  # fmt: skip
    found = re.findall("|".join(re.escape(name) for name in names), ptx)
    return [name for i, name in enumerate(names[word] for word in found) if i == 0 or name != names[found[i - 1]]]


GATHER = ("gather_rows_kernel", "count_steps_kernel", "look_up_rows_kernel", "mark_torn_kernel")


def compile_for(target: str, all_of_them: bool, parts: list[str]) -> list[dict[str, Any]]:
    kind, arch = target.split(":")
    gpu = GPUTarget("cuda", int(arch), 32) if kind == "cuda" else GPUTarget("hip", arch, 64)
    results = []
    for name, kernel in sorted(kernels().items()):
        if parts and ("--gather" if name in GATHER else "--select") not in parts:
            continue
        for chosen in variants(kernel, name, all_of_them):
            constants = chosen
            options = {}
            order = NVIDIA if kind == "cuda" else AMD
            if name in ("look_up_rows_kernel", "mark_torn_kernel"):
                constants = constants | {"ORDER": order}
            if name == "gather_rows_kernel":
                options = {"num_warps": warps_of(constants["CHUNK"], order), "enable_fp_fusion": False}
            code = triton.compile(source(kernel, constants), target=gpu, options=options).asm
            result: dict[str, Any] = {"kernel": name, "target": target, "constants": constants}
            if name == "gather_rows_kernel":
                result["constants"] = {**constants, "KINDS": len(constants["KINDS"])}
                result["wide_stores"] = len(
                    re.findall(r"st\.global\S*\.(?:v4\.[bu]32|v2\.[bu]64)", code.get("ptx", ""))
                )
            if name in GATHER:
                result["order"] = reads_in_order(code["ptx"]) if kind == "cuda" else []
            if kind == "cuda":
                result |= nvidia_report(code["cubin"])
                result["wide_loads"] = len(
                    re.findall(r"ld\.(?:volatile\.)?global\S*\.(?:v4\.[bu]32|v2\.[bu]64)", code["ptx"])
                )
            else:
                # Scalar registers that do not fit go to lanes of vector registers, which is no memory.
                spills = re.findall(r"\.(?:vgpr_spill_count|private_segment_fixed_size):\s*(\d+)", code["amdgcn"])
                result["spilled"] = sum(int(n) for n in spills)
                result["registers"] = int(re.search(r"\.vgpr_count:\s*(\d+)", code["amdgcn"])[1])  # type: ignore[index]
                result["wide_loads"] = len(re.findall(r"(?:global|buffer)_load_dwordx4", code["amdgcn"]))
            results.append(result)
    return results


class NoDriver:
    """Stands in for a GPU's driver, for as long as nothing is launched."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_device(self) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self.target


def launches(target: GPUTarget) -> dict[str, int]:
    """Every launch of `DeviceCandidates`, compiled with the very arguments that are passed, and not executed.

    Returns how many times each kernel had to be compiled: once for each set of constants, whatever the seeds.
    torch.empty is made to give ones, so that what the kernels did not write is something to go on with.
    """
    import torch
    from triton.runtime import driver

    import geartrain.device.kernels.candidates as candidates
    import geartrain.device.kernels.checks as door

    seen: set[tuple[str, ...]] = set()

    def run(self: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        _, _, _, backend, binder = self.create_binder()
        bound, specialization, options = binder(*args, **named)
        options, signature, constants, attributes = self._pack_args(backend, named, bound, specialization, options)
        code = triton.compile(
            ASTSource(self, signature, constants, attributes), target=target, options=options.__dict__
        )
        assert code.asm["ptx"]
        assert all(size > 0 for size in grid)
        seen.add((self.__name__, str(signature), str(constants), str(attributes)))

    driver.set_active(NoDriver(target))
    JITFunction.run = run
    torch.empty = torch.ones
    for module in MODULES[:-1]:
        importlib.import_module(f"geartrain.device.kernels.{module}").check = lambda *args, **named: None
    candidates.check = lambda *args, **named: None
    assert not door.interpreting()
    bits, order = torch.ones(5000, dtype=torch.bool), torch.arange(5000).flip(0).contiguous()
    for arrays in ((), (bits, order)):
        rows = candidates.DeviceCandidates(torch.ones(5000, dtype=torch.int32).view(torch.uint32), *arrays)
        for by_priority in (True, False):
            for strata in (0, 70):
                for seed in (0, 1, 2**40, 2**64 - 1):
                    rows.draw(by_priority, seed, seed, 0, 70, strata)
            rows.draw(by_priority, 1, 1, 1, torch.ones(70, dtype=torch.int32).view(torch.uint32), 0)
            rows.draw_distinct(by_priority, 1, 1, 0, 5)
        for kind in range(3):
            rows.first(kind, 5, 3)
        rows.update(torch.arange(5), torch.ones(5, dtype=torch.int32).view(torch.uint32))
    return Counter(name for name, *_ in seen)


if __name__ == "__main__":
    if sys.argv[1:] == ["--launches"]:
        print(json.dumps(launches(GPUTarget("cuda", 90, 32))))
        raise SystemExit
    chosen = [argument for argument in sys.argv[1:] if not argument.startswith("--")]
    only = [argument for argument in sys.argv[1:] if argument in ("--gather", "--select")]
    print(json.dumps([result for target in chosen for result in compile_for(target, "--all" in sys.argv, only)]))

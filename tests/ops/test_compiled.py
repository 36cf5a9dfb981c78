"""Kernels that are interpreted in other tests, compiled for GPUs that need not be here: what the
interpreter takes and the compiler does not, and which instructions come of it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import pytest

COMPILER = importlib.util.find_spec("triton.backends.nvidia.compiler")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs Triton's compiler for NVIDIA GPUs")

# (module, kernel, compute capability, types by argument, constants, warps)
INTS = ("num_rows", "num_out", "size", "num_chunks", "chunks", "num_tiles")
POINTERS = {"bias": "*bf16", "out": "*bf16", "parts": "*fp32", "counters": "*i32"}
CUT = {"HAS_BIAS": True, "TILES": {"out": 64, "rows": 16, "split": 4}}
GROUPS = {**POINTERS, "x": "*bf16", "codes": "*i16", "scales": "*bf16", "others": "*i32"}
FOUR_BITS = {"bits": 4, "is_float": False, "plane": 64, "groups": 2, "even": True, "asm": True}
WITH_ZERO = {"PACKING": {**FOUR_BITS, "zero": 8}}
WITH_ZEROS = {"PACKING": {**FOUR_BITS, "zero": -1}}
BYTES = {**FOUR_BITS, "bits": 8, "plane": 16, "groups": 4, "zero": 32, "span": 4}
LEVELS = {**FOUR_BITS, "plane": 32, "groups": 4, "zero": 0, "has_minimums": True, "span": 2}
DOUBLED = {**FOUR_BITS, "plane": 32, "groups": 4, "zero": 0, "is_e2m1": True}
IN_LEVELS = {**GROUPS, "scales": "*i32", "others": "*fp16"}
EXPERTS = {
    **dict.fromkeys(("x", "bias", "out", "scales"), "*bf16"),
    **dict.fromkeys(("order", "ends", "others", "inputs"), "*i32"),
    **dict.fromkeys(("num", "top_k", "hidden", "inner", "blocks", "size"), "i32"),
    **dict.fromkeys(("alpha", "limit"), "fp32"),
    "codes": "*i16",
    "factors": "*fp32",
}
OF_EXPERTS = {
    **dict.fromkeys(("CLAMPED", "GELU", "MX", "ORDERED", "BIAS"), False),
    "BLOCK_E": 128,
    "TILES": {"out": 64, "rows": 16},
}
FLOATS = {"bits": 8, "is_float": True, "plane": 64, "groups": 1, "zero": 0, "even": True}
CHANNELS = {**POINTERS, "row_scales": "*fp32", "scales": "*fp32"}
NORM = {
    **dict.fromkeys(("hidden", "delta", "weight", "plain"), "*bf16"),
    "scales": "*fp32",
    "eps": "fp32",
}
ROPE = {
    **dict.fromkeys(("qkv", "q_norm", "k_norm", "q_out", "k_pages", "v_pages"), "*bf16"),
    **dict.fromkeys(("num_rows", "num_queries", "num_q_heads", "num_kv_heads", "half"), "i32"),
    **dict.fromkeys(("page_size", "page_stride", "token_stride", "head_stride"), "i32"),
    **dict.fromkeys(("cos", "sin", "query_cos", "query_sin"), "*fp32"),
    **dict.fromkeys(("slots", "sources"), "*i64"),
    "eps": "fp32",
}
ATTEND = {
    **dict.fromkeys(("q", "k", "v", "out"), "*bf16"),
    **dict.fromkeys(("lse", "part_out", "part_lse", "slopes"), "*fp32"),
    "control": "*i32",
    "scale": "fp32",
    "softcap": "fp32",
}
GRID = {**ATTEND, "part_top": "*fp32", "part_weights": "*fp32"}
ON_GRID = {"BLOCK_N": 64, "STAGES": 2, "KIND": 0, "FEW": True, "BESIDE": True, "DEPENDENT": True}
TILES = {"M0": 64, "N0": 16, "STAGES0": 3, "M1": 64, "N1": 16, "STAGES1": 3}  # the widest
PLAIN = {"page_size": 16, "windowed": False, "alibi": False, "softcap": False}
WIDE_HEADS = {"num_kv_heads": 2, "group": 8, "head_dim": 512, "block_d": 512, **PLAIN}
HEADS = {"num_kv_heads": 8, "group": 4, "head_dim": 128, "block_d": 128, **PLAIN}
RING = {"columns": 8, "stages": 6, "box": 16, "block_n": 64}
ROLES = {"REGISTERS": 216, "COPY_REGISTERS": 72}
PAGES = (
    "tensordesc<bf16[1, 1, 16, 64],"
    "NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)>"
)
BOXES = PAGES.replace("1, 1, 16", "4, {}").replace("rank=4", "rank=3")
DELTA = {
    **dict.fromkeys(("q", "k", "v", "out", "weights", "solutions"), "*bf16"),
    **dict.fromkeys(("decay", "beta", "factors", "states"), "*fp32"),
    **dict.fromkeys(("parts", "chunks", "scans"), "*i32"),
    **dict.fromkeys(("q_stride", "k_stride", "v_stride", "heads", "group", "dk", "dv"), "i32"),
    "scale": "fp32",
}
IN_CHUNKS = {"DEPENDENT": True, "CHUNK": 64, "DK": 128, "PRECISION": "tf32"}
EXCHANGE = {
    **dict.fromkeys(("x", "out"), "*bf16"),
    **dict.fromkeys(("addresses", "counters"), "*i64"),
    **dict.fromkeys(("width", "chunk", "slot_bytes"), "i32"),
    "stop": "*i32",
}
ONE_ROW = {"HAS_BIAS": True, "DEPENDENT": True, "WARPS": 8, "GELU": False}
SIZES = ("first_slot", "count", "width", "page_size")
KERNELS = {
    "4 bits": ("tiled_groups", "_groups_product", 90, GROUPS, {**WITH_ZERO, **CUT}, 4),
    "zeros": ("tiled_groups", "_groups_product", 90, GROUPS, {**WITH_ZEROS, **CUT}, 4),
    "one row": (
        *("one_row", "_one_row", 90, {**GROUPS, "x": "*i32", "codes": "*i32"}),
        {**ONE_ROW, **WITH_ZERO, "CHUNKS": 56, "APART": 0},
        8,
    ),
    "gated row": (
        *("one_row", "_one_row", 90, {**GROUPS, "x": "*i32", "codes": "*i32"}),
        {**ONE_ROW, **WITH_ZERO, "CHUNKS": 16, "APART": 224},
        8,
    ),
    "Q4_K": ("tiled_groups", "_groups_product", 90, IN_LEVELS, {"PACKING": LEVELS, **CUT}, 4),
    "Q6_K": ("tiled_groups", "_groups_product", 90, IN_LEVELS, {"PACKING": BYTES, **CUT}, 4),
    "MXFP4": ("tiled_groups", "_groups_product", 90, GROUPS, {"PACKING": DOUBLED, **CUT}, 4),
    "Q4_K dense": ("tiled_groups", "_groups_dense", 90, IN_LEVELS, {"PACKING": LEVELS}, 4),
    "Q6_K dense": ("tiled_groups", "_groups_dense", 90, IN_LEVELS, {"PACKING": BYTES}, 4),
    "Q4_K gated row": (
        *("one_row", "_one_row", 90, {**IN_LEVELS, "x": "*i32", "codes": "*i32"}),
        {**ONE_ROW, "PACKING": LEVELS, "CHUNKS": 20, "APART": 152},
        8,
    ),
    "Hopper": (
        *("sm90", "attend_hopper", 90),
        {**ATTEND, "k_pages": PAGES, "v_pages": PAGES, "num_words": "i32"},
        {**ROLES, "FORM": {**HEADS, **RING, "most": 128}},
        4,
    ),
    "Hopper, few rows": (
        *("sm90", "attend_hopper", 90),
        {**ATTEND, "k_pages": PAGES, "v_pages": PAGES, "num_words": "i32"},
        {**ROLES, "FORM": {**HEADS, **RING, "most": 8}},
        4,
    ),
    "grid, few rows": (
        *("grid", "grid_kernel", 90, GRID),
        {"BLOCK_M": 16, **ON_GRID, "HEAD_MAJOR": False, "FORM": HEADS},
        1,
    ),
    "grid on Hopper": (
        *("sm90", "grid_rows", 90, GRID),
        {"HEAD_MAJOR": False, "FORM": HEADS},
        4,
    ),
    "streamed": (
        *("streamed", "_streamed", 90),
        {**POINTERS, "x": BOXES.format(8), "weight": BOXES.format(32)},
        {"STAGES": 5, "HAS_BIAS": True, "DEPENDENT": True},
        4,
    ),
    "pages to rows": (
        *("page_rows", "_move", 90),
        {"table": "*i64", "slots": "*i64", "rows": "*i16", **dict.fromkeys(SIZES, "i32")},
        {"OUT": True, "BITS": 16, "TOKENS": 8, "VALUES": 256, "FIELDS": 7},
        4,
    ),
    "dense": ("tiled_groups", "_groups_dense", 90, GROUPS, WITH_ZEROS, 4),
    "experts of 4 bits": (
        *("tiled_experts", "_up_kernel", 90, EXPERTS),
        {**OF_EXPERTS, **WITH_ZERO},
        4,
    ),
    "experts in another order": (
        *("tiled_experts", "_down_kernel", 90, EXPERTS),
        {**OF_EXPERTS, **WITH_ZEROS, "ORDERED": True, "BIAS": True},
        4,
    ),
    "experts of float8": (
        *("tiled_experts", "_down_kernel", 90, EXPERTS),
        {**OF_EXPERTS, "PACKING": {**FLOATS, "asm": True, "whole": True}},
        4,
    ),
    "results of experts": (
        *("experts", "_summed_kernel", 90),
        {**dict.fromkeys(("results", "beside", "out"), "*bf16"), "gate": "*fp32", "hidden": "i32"},
        {**dict.fromkeys(("BESIDE", "GATED", "DEPENDENT"), True), "TOP_K": 8, "BLOCK": 1024},
        4,
    ),
    "experts of mxfp4": (
        *("tiled_experts", "_up_kernel", 90, {**EXPERTS, "scales": "*i32"}),
        {
            **OF_EXPERTS,
            **dict.fromkeys(("MX", "CLAMPED", "BIAS"), True),
            "TILES": {"out": 128, "rows": 16},
            "PACKING": DOUBLED,
        },
        4,
    ),
    "float8": (
        *("tiled", "_channels_product", 90),
        {**CHANNELS, "codes": "*fp8e4nv", "weight": "*fp8e4nv"},
        {**CUT, "IS_INT": False, "EVEN": True},
        4,
    ),
    "norm": (
        *("layers", "_add_rms_norm", 90, {**NORM, "out": "*fp8e4nv", "largest": "fp32"}),
        {**dict.fromkeys(("HAS_DELTA", "ROUNDS", "PLAIN", "DEPENDENT"), True), "BLOCK": 4096},
        8,
    ),
    "values that are keys": (
        *("layers", "_rope_write", 90, ROPE),
        {
            **dict.fromkeys(("NORM", "VALUE_NORM", "VALUE_IS_KEY", "MOVED", "DEPENDENT"), True),
            "HEADS": 8,
            "HALF": 256,
        },
        4,
    ),
    "sum over ranks": (
        *("peers", "_exchange", 90, EXCHANGE),
        {"KIND": "sum", "RANK": 1, "RANKS": 2, "BLOCK": 2048},
        8,
    ),
    "all of rank 0's": (
        *("peers", "_exchange", 90, {**EXCHANGE, "x": "*i64", "out": "*i64"}),
        {"KIND": "first", "RANK": 0, "RANKS": 4, "BLOCK": 2048},
        8,
    ),
    "gathered": (
        *("peers", "_exchange", 90, {**EXCHANGE, "x": "*fp32", "out": "*fp32"}),
        {"KIND": "gather", "RANK": 0, "RANKS": 2, "BLOCK": 2048},
        8,
    ),
    "rows of states": (
        *("delta", "_few_rows", 90, {**DELTA, "most": "i32"}),
        {"DEPENDENT": True, "DK": 128, "COLUMNS": 32},
        4,
    ),
    "within chunks": (
        *("delta", "_within_chunks", 90, DELTA),
        {**IN_CHUNKS, "LEVELS": 6},
        4,
    ),
    "over chunks": (
        *("delta", "_over_chunks", 90, DELTA),
        {**IN_CHUNKS, "COLUMNS": 32, "STAGES": 2},
        4,
    ),
    "heads of 512": (
        *("kernels", "attend_kernel", 90, ATTEND),
        {"DEPENDENT": False, "HEAD_MAJOR": False, **TILES, "WIDE": 1, "FORM": WIDE_HEADS},
        8,
    ),
}
# One of each kind; `make soak` compiles the others, and the one that takes as long as these.
FEW = {
    "4 bits",
    "Q4_K",
    "within chunks",
    "one row",
    "Hopper, few rows",
    "grid on Hopper",
    "streamed",
    "float8",
    "experts of 4 bits",
}
# What makes them fast: products out of registers or shared memory at once, nothing converted.
INSTRUCTIONS = {
    "4 bits": ("wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16", "lop3.b32"),
    "pages to rows": ("ld.global", "st.global"),
    "grid, few rows": ("mma.sync.aligned.m16n8k16", "cp.async.cg", "griddepcontrol.wait"),
    "grid on Hopper": (
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16",
        *("cp.async.cg", "griddepcontrol.launch_dependents", "setmaxnreg"),
    ),
    "streamed": (
        *("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16", "cp.async.bulk.tensor.3d"),
        *("griddepcontrol.launch_dependents", "griddepcontrol.wait"),
    ),
    "zeros": ("wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16", "fma.rn.bf16x2"),
    "one row": (
        *("mma.sync.aligned.m16n8k16", "ld.global.cg.v4.b32", "lop3.b32"),
        *("griddepcontrol.launch_dependents", "griddepcontrol.wait"),
    ),
    "gated row": ("mma.sync.aligned.m16n8k16", "shfl.sync.bfly.b32", "griddepcontrol.wait"),
    "Q4_K": ("wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16", "lop3.b32"),
    "Q6_K": ("wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16", "prmt.b32"),
    "Q6_K dense": ("prmt.b32",),
    "Q4_K gated row": ("mma.sync.aligned.m16n8k16", "shfl.sync.bfly.b32"),
    "Hopper": (
        *("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16", "setmaxnreg.inc"),
        *("cp.async.bulk.tensor.4d", "griddepcontrol.launch_dependents"),
    ),
    "Hopper, few rows": ("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16", "L2::evict_last"),
    "float8": ("wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3",),
    "experts of 4 bits": ("wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16", "lop3.b32"),
    "experts of float8": ("wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16", "0x07f007f0"),
    "results of experts": ("ld.global.v4.b32", "griddepcontrol.wait"),
    "experts of mxfp4": ("wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16", "0x01c001c0"),
    "norm": ("div.rn.f32", "cvt.rn.satfinite.e4m3x2.f32"),
    "values that are keys": ("rsqrt.approx",),
    "sum over ranks": (
        *("st.global.v4.b32", "ld.global.cg.v4.b32", "atom.global.sys.release.exch.b64"),
    ),
    "all of rank 0's": ("st.global.v2.b64", "atom.global.sys.release.exch.b64"),
    "gathered": ("ld.global.cg.v4.b32", "atom.global.sys.release.exch.b64"),
    "rows of states": ("rsqrt.approx", "griddepcontrol.wait"),
    "within chunks": (
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16",
        "wgmma.mma_async.sync.aligned.m64n64k8.f32.tf32.tf32",
    ),
    "over chunks": ("wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16", "cp.async"),
    "heads of 512": ("wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16", "cp.async"),
}
COMPILE = """
import importlib, json, sys
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from onestem.ops.triton.tiled import Packing, Tiles
from onestem.ops.triton.words import Form, HopperForm
kernels, ints = json.load(sys.stdin)
found = {}
divisible = ("num_out", "size", "chunk", "slot_bytes", "hidden", "inner", "dk", "dv")
divisible += ("q_stride", "k_stride", "v_stride")
for name, (module, kernel, target, types, constants, warps) in kernels.items():
    kernel = getattr(importlib.import_module("onestem.ops.triton." + module), kernel)
    names = kernel.arg_names
    types = {**dict.fromkeys(ints, "i32"), **types}
    made = {"TILES": Tiles, "PACKING": Packing}
    made["FORM"] = HopperForm if "most" in constants.get("FORM", ()) else Form
    constants = {n: made[n](**v) if n in made else v for n, v in constants.items()}
    signature = {n: "constexpr" if n in constants else types[n] for n in names}
    whole = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names)
             if signature[n].startswith("*") or n in divisible}
    values = {(names.index(n),): v for n, v in constants.items() if n in names}
    kind = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    source = kind(kernel, signature, values, whole)
    options = {"num_warps": warps, "num_stages": 4}
    found[name] = compile(source, target=GPUTarget("cuda", target, 32), options=options).asm["ptx"]
json.dump(found, sys.stdout)
"""


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return assembly_of(FEW, tmp_path_factory)


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return assembly_of(KERNELS.keys() - FEW, tmp_path_factory)


def assembly_of(names: Collection[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of kernels, by one process that does not interpret them."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}
    environment["TRITON_INTERPRET"] = "0"
    done = subprocess.run(
        [sys.executable, "-c", COMPILE],
        input=json.dumps([{name: KERNELS[name] for name in names}, INTS]),
        env=environment,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, str] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("name", sorted(FEW))
def test_kernels_compile_to_what_they_are_written_for(name: str, few: dict[str, str]) -> None:
    check(name, few)


@pytest.mark.soak
@pytest.mark.parametrize("name", sorted(KERNELS.keys() - FEW))
def test_other_kernels_compile_too(name: str, others: dict[str, str]) -> None:
    check(name, others)


def check(name: str, assembly: dict[str, str]) -> None:
    for instruction in INSTRUCTIONS.get(name, ("fma.rn.bf16x2",)):
        assert instruction in assembly[name]
    assert "call.uni" not in assembly[name]


def test_a_kernel_for_few_rows_is_without_queries_as_rows(few: dict[str, str]) -> None:
    assert "m64n64k16" not in few["Hopper, few rows"]


@pytest.mark.soak
def test_a_kernel_for_few_rows_is_without_what_they_do_not_need(
    few: dict[str, str], others: dict[str, str]
) -> None:
    assert len(few["Hopper, few rows"]) < len(others["Hopper"]) / 3

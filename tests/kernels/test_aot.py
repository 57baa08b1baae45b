"""The compile gate finds faults in compiler reports and, if the compilers are installed, in planted programs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.gate import bounds, hlo, table, traffic
from pallas_kernels.gate.__main__ import choose
from pallas_kernels.gate.cases import Case, Step, collect, shapes
from pallas_kernels.gate.figures import Figures, kernels, thunks
from pallas_kernels.gate.occupancy import Launched
from pallas_kernels.gate.rules import Bound, bound_of, excess, laws
from pallas_kernels.gate.targets import GB, TARGETS, memory_of
from tests.support.kernels.machine import listing

H200 = TARGETS["h200"]
ROOT = Path(__file__).resolve().parents[2]
PLANTED = ROOT / "tests" / "support" / "kernels"

REPORT = """ptxas info    : Compiling entry function 'kernel_mosaic_gpu_kernel' for 'sm_90a'
ptxas info    : Function properties for kernel_mosaic_gpu_kernel
    8 bytes stack frame, 12 bytes spill stores, 20 bytes spill loads
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to a fence in it
ptxas info    : Used 232 registers, used 16 barriers, 1 bytes smem
"""
CODE = """wgmma.mma_async.sync.aligned
wgmma.mma_async.sync.aligned
cp.async.bulk.tensor.5d.shared
mma.sync.aligned.m16n8k16
ld.shared.v4.b32 {%r1, %r2, %r3, %r4}, [%r5];
ld.shared.b8 %rs1, [%r6];
stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r7], {%r1, %r2, %r3, %r4};
shfl.sync.bfly.b32 %r8, %r1, 1, 31, -1;
"""
THUNKS = """000: kCommandBuffer [source       | next=018 (1)]
    001: kCustomKernel [source       | next=002 (1)] input_reduce_fusion_2 grid: [64, 1, 1]
018: kWhile         [prev=000 (1) | next=000 (1)]
condition:
    019: kCustomKernel [source | sink] loop_compare_fusion grid: [1, 1, 1]
  body:
    000: kCommandBuffer [source | sink]
        033: kCustomKernel [source       | next=034 (1)] loop_gather_select_fusion grid: [2048, 1, 1]
019: kCopy          [prev=000 (1) | sink        ] kCopy
"""
MOVES = """%moves (param_0.1: bf16[8,4096,64]) -> bf16[4096,8,64] {
  %param_0.1 = bf16[8,4096,64]{2,1,0} parameter(0)
  ROOT %transpose.1 = bf16[4096,8,64]{2,1,0} transpose(%param_0.1), dimensions={1,0,2}
}

"""
STEP = """HloModule jit_step, is_scheduled=true, input_output_alias={ {1}: (2, {}, may-alias), {2}: (3, {}, may-alias) }

%multiplies (param_0.2: bf16[8,4096,64]) -> bf16[4096,8,64] {
  %param_0.2 = bf16[8,4096,64]{2,1,0} parameter(0)
  %transpose.2 = bf16[4096,8,64]{2,1,0} transpose(%param_0.2), dimensions={1,0,2}
  ROOT %multiply.2 = bf16[4096,8,64]{2,1,0} multiply(%transpose.2, %transpose.2)
}

ENTRY %main (weight: bf16[8,4096,64], x: f32[4], pool: f32[512,4096], other: f32[512,4096]) -> (f32[4]) {
  %weight = bf16[8,4096,64]{2,1,0} parameter(0), sharding={replicated}
  %x = f32[4]{0} parameter(1)
  %pool = f32[512,4096]{1,0} parameter(2)
  %bitcast.1 = bf16[8,262144]{1,0} bitcast(%weight), metadata={op_name="a"}
  %used = bf16[4096,8,64]{2,1,0} fusion(%weight), kind=kLoop, calls=%multiplies, metadata={op_name="b (c)"}
  %written = f32[512,4096]{1,0} custom-call(%pool, %x), custom_call_target="mosaic_gpu_v2"
  %small = f32[4]{0} copy(%x)
  LINE
  ROOT %tuple.1 = (f32[4]{0}, f32[512,4096]{1,0}) tuple(%small, %written)
}
"""


def folder(path: Path, **files: str) -> Path:
    for name, text in files.items():
        (
            path / name.replace("_ptx", ".ptx").replace("_log", ".mlir-passes.log").replace("_thunks", THUNKS_END)
        ).write_text(text)
    return path


THUNKS_END = ".thunk_sequence_after_thunk_passes.txt"


def test_reports_are_read(tmp_path: Path) -> None:
    log = "gpu.launch blocks dynamic_shared_memory_size %c151656_i32 {\n dynamic_shared_memory_size %c9_i32 {"
    found = kernels(folder(tmp_path, a_ptxas=REPORT, a_ptx=CODE, a_log=log))
    assert found["registers"] == 232 and found["spills"] == 8 + 12 + 20 and found["smem"] == 151656
    assert found["instructions"] == {"wgmma": 2, "mma": 1, "tma": 1} and found["kernels"] == 1
    assert found["shared"] == 4 and found["narrow"] == 1
    assert found["serialized"] == ("wgmma.mma_async instructions are serialized due to a fence in it",)


def test_what_a_kernel_takes_of_a_multiprocessor_is_read(tmp_path: Path) -> None:
    ptx = ".maxntid 128, 3, 1\n" + CODE.replace("cluster", "") + "cp.async.bulk.tensor.4d.shared::cluster.global.x"
    code = listing(".L_x_1:", "HMMA.16816.F32 R4, R8, R2, R4", "IADD3 R1, R1, 1, RZ", "@P0 BRA `(.L_x_1)", "EXIT")
    log = "dynamic_shared_memory_size %c71680_i32"
    folder(tmp_path, a_ptxas=REPORT.replace("232", "80"), a_ptx=ptx, a_log=log)
    (tmp_path / "a.sass_ctrl").write_text(code)
    (tmp_path / "b.ptx").write_text(ptx)
    found = kernels(tmp_path)["largest"]
    assert found == Launched("a", 80, 384, 71680, True, 3)
    assert (found.blocks, found.in_flight, found.cycles) == (2, 2 * 71680, 3 * 2 * 12 / 4)


@pytest.mark.parametrize(
    ("launched", "blocks"),
    [
        (Launched("registers", 168, 384, 0, False), 1),
        (Launched("registers in units of 8", 81, 128, 0, False), 5),
        (Launched("shared memory and what each block takes besides", 32, 128, 113 << 10, False), 2),
        (Launched("one byte more", 32, 128, (113 << 10) + 1, False), 1),
        (Launched("threads", 32, 1024, 0, False), 2),
        (Launched("blocks", 16, 32, 0, False), 32),
    ],
    ids=lambda given: given.name if isinstance(given, Launched) else "",
)
def test_what_limits_the_blocks_of_a_multiprocessor(launched: Launched, blocks: int) -> None:
    assert launched.blocks == blocks and launched.in_flight == 0


def test_no_report_is_no_kernel(tmp_path: Path) -> None:
    assert Figures(**kernels(tmp_path), **thunks(tmp_path)) == Figures()  # type: ignore[arg-type]


def test_command_buffers_are_counted_at_every_depth(tmp_path: Path) -> None:
    assert thunks(folder(tmp_path, m_thunks=THUNKS)) == {"buffers": 2, "loose": 2}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("%a = bf16[8,262144]{1,0} copy(%bitcast.1)", "copy a of bf16[8, 262144]"),
        ("%b = bf16[4096,8,64]{2,1,0} fusion(%weight), kind=kLoop, calls=%moves", "fusion b of bf16[4096, 8, 64]"),
        ("%c = f32[512,4096]{1,0} copy(%written)", "copy c of f32[512, 4096]"),
        ("%d = f32[8,4096,64]{2,1,0} convert(%weight)", "convert d of f32[8, 4096, 64]"),
        ("%e = ((bf16[8,4096,64]), bf16[32,4096,64]) all-gather-start(%weight)", "all-gather-start e of bf16[8, 4096"),
        ("%f = bf16[8,4096,64]{2,1,0:S(1)} copy(%weight)", ""),  # prefetched into a TPU's fast memory
        ("%g = f32[512,4096]{1,0} scatter(%pool, %x)", ""),
        ("%h = f32[64]{0} slice(%x)", ""),
    ],
)
def test_copies_of_what_is_large_are_found(line: str, said: str) -> None:
    step = STEP.replace("LINE", line).replace("ENTRY", MOVES + "ENTRY" if "%moves" in line else "ENTRY")
    found = hlo.copies(step, held=1 << 20)
    assert [each[: len(said)] for each in found] == ([said] if said else [])


def test_aliased_arguments_are_counted() -> None:
    assert hlo.aliased(STEP) == 2
    assert hlo.aliased("HloModule jit_f, is_scheduled=true, entry_computation_layout={()->f32[]}") == 0


DRAW = """HloModule jit_draw, is_scheduled=true

%sums (param_0.1: f32[256,1024]) -> f32[256] {
  %param_0.1 = f32[256,1024]{1,0} parameter(0)
  ROOT %reduce.1 = f32[256]{0} reduce(%param_0.1, %zero), dimensions={1}, to_apply=%add
}

%little (given.1: (f32[256,1024])) -> f32[256] {
  %given.1 = (f32[256,1024]{1,0}) parameter(0)
  %x.1 = f32[256,1024]{1,0} get-tuple-element(%given.1), index=0
  ROOT %sums.1 = f32[256]{0} fusion(%x.1), kind=kInput, calls=%sums
}

%much (given.2: (f32[256,1024])) -> f32[256] {
  %given.2 = (f32[256,1024]{1,0}) parameter(0)
  %x.2 = f32[256,1024]{1,0} get-tuple-element(%given.2), index=0
  %copy.2 = f32[256,1024]{1,0} copy(%x.2)
  ROOT %border.2 = f32[256]{0} custom-call(%copy.2), custom_call_target="mosaic_gpu_v2"
}

%turn (given.3: (f32[256,1024])) -> (f32[256,1024]) {
  %given.3 = (f32[256,1024]{1,0}) parameter(0)
  %x.3 = f32[256,1024]{1,0} get-tuple-element(%given.3), index=0
  %scattered.3 = f32[256,1024]{1,0} fusion(%x.3), kind=kLoop, calls=%scatters
  ROOT %tuple.3 = (f32[256,1024]{1,0}) tuple(%scattered.3)
}

ENTRY %main (x: f32[256,1024], asked: pred[]) -> f32[256] {
  %x = f32[256,1024]{1,0} parameter(0)
  %asked = pred[] parameter(1)
  %given = (f32[256,1024]{1,0}) tuple(%x)
  %while.1 = (f32[256,1024]{1,0}) while(%given), condition=%go, body=%turn, config={"known_trip_count":{"n":"3"}}
  BRANCH
}
"""
LOGITS, ROW = 4 * 256 * 1024, 4 * 256  # bytes


@pytest.mark.parametrize(
    "branch",
    [
        "conditional(%asked, %given, %given), true_computation=%little, false_computation=%much",
        "conditional(%asked, %given, %given), branch_computations={%little, %much}, metadata={op_name='a'}",
    ],
)
def test_bytes_moved_are_those_of_all_turns_and_of_the_longest_branch(branch: str) -> None:
    text = DRAW.replace("BRANCH", f"ROOT %cond = f32[256]{{0}} {branch}")
    assert traffic.traffic(text).moved == 3 * 2 * LOGITS + 2 * LOGITS + LOGITS + ROW
    assert traffic.traffic(text).launches == 3 + 2


WRITES = """HloModule jit_step, is_scheduled=true, input_output_alias={ {0}: (0, {}, may-alias) }

ENTRY %main (pool: bf16[512,64], q: bf16[4,64], k: bf16[4,8]) -> bf16[512,64] {
  %pool = bf16[512,64]{1,0} parameter(0)
  %q = bf16[4,64]{1,0} parameter(1)
  %k = bf16[4,8]{1,0} parameter(2)
  %normed = bf16[4,64]{1,0} fusion(%q), kind=kLoop, calls=%norm, metadata={op_name="jit(step)/jit(layer)/norm"}
  %wrote = (bf16[4,64]{1,0}, bf16[512,64]{1,0}) custom-call(%normed, %k, %pool), custom_call_target="mosaic_gpu_v2", \
output_to_operand_aliasing={{0}: (0, {}), {1}: (2, {})}, metadata={op_name="jit(step)/jit(layer)/write"}
  %q.1 = bf16[4,64]{1,0} get-tuple-element(%wrote), index=0
  %pool.1 = bf16[512,64]{1,0} get-tuple-element(%wrote), index=1
  %again = (bf16[512,64]{1,0}) custom-call(%k, %pool.1), output_to_operand_aliasing={{0}: (1, {})}
  %pool.2 = bf16[512,64]{1,0} get-tuple-element(%again), index=0
  %read = bf16[4,64]{1,0} custom-call(%q.1, %pool.2), metadata={op_name="jit(step)/jit(layer)/attend"}
  %others = bf16[4,64]{1,0} custom-call(%read, %pool.2), metadata={op_name="jit(step)/jit(layer)/attend"}
  ROOT %copy = bf16[4,64]{1,0} copy(%others)
}
"""


def test_a_pool_changed_in_place_counts_what_is_written_to_it_and_one_reading() -> None:
    q, k, pool = 2 * 4 * 64, 2 * 4 * 8, 2 * 512 * 64
    norm, write, again, attend, others = 2 * q, 2 * q + k + (q + k), 2 * k, 2 * q + pool, 2 * q
    assert traffic.traffic(WRITES) == (norm + write + again + attend + others + 2 * q, 6, 4)


def test_real_programs_are_read_as_written_ones_are() -> None:
    """The CPU's compiler writes the same HLO text: a transposed copy, and an update in place."""
    x = jax.ShapeDtypeStruct((512, 1024), jnp.float32)
    turned = jax.jit(lambda x: (x.T, x)).lower(x).compile().as_text()
    assert any("[1024, 512]" in said for said in hlo.copies(turned, held=1 << 20))
    kept = jax.jit(lambda x: x.at[3].set(0.0), donate_argnums=0).lower(x).compile().as_text()
    assert hlo.copies(kept, held=1 << 20) == [] and hlo.aliased(kept) == 1
    summed = jax.jit(lambda x, wanted: jax.lax.cond(wanted, lambda x: x.sum(axis=1), lambda x: x[:, 0], x))
    moved = traffic.traffic(summed.lower(x, jax.ShapeDtypeStruct((), jnp.bool)).compile().as_text()).moved
    assert 4 * 512 * 1024 <= moved < 4 * 512 * 1024 + (1 << 14)


SOUND = Figures(
    kernels=1,
    registers=168,
    instructions={"wgmma": 12, "tma": 3},
    shared=40,
    disassembled=1,
    temp=1600,
    donated=1,
    aliased=1,
    buffers=1,
    moved=5000,
    floor=4000,
    launches=16,
    layered=14,
    layers=2,
)
NEEDY = Case("a", lambda: None, (), needs=frozenset({"wgmma"}))
GRAPHS = Step("s", lambda mesh: None, command_buffers=1)  # type: ignore[arg-type,return-value]


def test_what_is_sound_breaks_no_law() -> None:
    for case in (NEEDY, GRAPHS):
        assert list(laws(case, SOUND, 141 * GB)) == []
    assert list(excess(SOUND, bound_of(SOUND))) == []


@pytest.mark.parametrize(
    ("case", "change", "said"),
    [
        (NEEDY, {"spilling": ("12 bytes spilled",)}, "12 bytes spilled"),
        (NEEDY, {"serialized": ("x",)}, "serialized"),
        (NEEDY, {"hazards": ("R1 is written",)}, "R1 is written"),
        (NEEDY, {"disassembled": 0}, "0 of 1 kernels disassembled"),
        (NEEDY, {"instructions": {"mma": 2}}, "0 wgmma instructions, the bound is at least 1"),
        (NEEDY, {"smem": 300_000}, "300000 bytes of shared memory, the bound is 232448"),
        (NEEDY, {"donated": 2}, "1 of 2 donated arguments changed in place"),
        (replace(NEEDY, donate=(0,)), {}, "1600 bytes of temporaries in an operation in place, the bound is 0"),
        (NEEDY, {"copies": ("copy x",)}, "a weight or a pool is copied, the bound is 0 copies: copy x"),
        (replace(NEEDY, most_moved=2 * GB), {"moved": 3 * GB}, "3.000 GB read and written, the bound is 2.000 GB"),
        (NEEDY, {"memory": 142 * GB}, "142.00 GB per device, the bound is 141 GB"),
        (GRAPHS, {"buffers": 3}, "3 command buffers, the bound is 1"),
        (GRAPHS, {"buffers": None}, "None command buffers, the bound is 1"),
    ],
)
def test_each_law_names_the_figure_and_the_bound(case: Case | Step, change: dict[str, object], said: str) -> None:
    [breach] = laws(case, replace(SOUND, **change), 141 * GB)  # type: ignore[arg-type]
    assert said in breach


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"registers": 169}, "169 registers, the recorded bound is 168"),
        ({"temp": 1701}, "1701 bytes of temporaries, the recorded bound is 1600"),
        ({"buffers": 2}, "2 command buffers, the recorded bound is 1"),
        ({"shared": 41}, "41 instructions through shared memory, the recorded bound is 40"),
        ({"narrow": 1}, "1 loads of shared memory of less than 4 bytes, the recorded bound is 0"),
        ({"kernels": 32}, "32 kernels compiled, the recorded bound is 1"),
        ({"launches": 17}, "17 launches, the recorded bound is 16"),
        ({"moved": 5001}, "5001 bytes read and written, the recorded bound is 5000"),
    ],
)
def test_each_recorded_bound_holds(change: dict[str, int], said: str) -> None:
    [breach] = excess(replace(SOUND, **change), bound_of(SOUND))  # type: ignore[arg-type]
    assert said in breach
    assert list(excess(replace(SOUND, temp=1700, registers=10), bound_of(SOUND))) == []


PRODUCTS = ("HGMMA.64x64x16.F32.BF16 R56, gdesc[UR8], RZ, !UPT, gsb0",) * 199


@pytest.mark.parametrize(
    ("stored", "lines", "said"),
    [
        (0, ("EXIT",), []),
        (4, ("STL [R1], R2", "LDL R2, [R1]", "EXIT"), ["20 bytes of registers spilled, the bound is 0"]),
        (4, ("STL [R1], R2", ".L_x_1:", *PRODUCTS, "LDL R2, [R1]", "@P0 BRA `(.L_x_1)", "EXIT"), []),
        (
            4,
            (".L_x_1:", *PRODUCTS, "LDL R2, [R1]", "LDL R3, [R1+0x4]", "@P0 BRA `(.L_x_1)", "EXIT"),
            ["2 loads of spilled registers in a loop of 202 instructions, the bound is 1/200"],
        ),
        (
            113,
            (".L_x_1:", *PRODUCTS, "STL [R1], R2", "@P0 BRA `(.L_x_1)", "EXIT"),
            ["129 bytes of", "1 stores of spilled registers in a loop with matrix products, the bound is 0"],
        ),
    ],
)
def test_only_spills_that_a_loop_reads_now_and_then_are_allowed(
    tmp_path: Path, stored: int, lines: tuple[str, ...], said: list[str]
) -> None:
    report = f"8 bytes stack frame, {stored} bytes spill stores, 8 bytes spill loads" if stored else ""
    folder(tmp_path, a_ptx=CODE, **{"a.ptxas": report, "a.sass_ctrl": listing(*lines)})
    found = kernels(tmp_path)["spilling"]
    assert isinstance(found, tuple) and len(found) == len(said)
    assert all(one.startswith(start) for one, start in zip(found, said, strict=True))


def test_a_case_without_a_bound_fails() -> None:
    [breach] = excess(SOUND, None)
    assert "--record" in breach


def test_bounds_are_kept_by_target_and_version(tmp_path: Path) -> None:
    file = tmp_path / "bounds.json"
    assert bounds.load("h200", "0.11.2", file) == ({}, "")
    one, two = Bound(168, 0), Bound(99, 7, 1, 2)
    bounds.record("h200", "0.10.2", {"a": one, "b": one}, file)
    bounds.record("h200", "0.11.2", {"a": two}, file)
    bounds.record("h200", "0.11.0", {"c": one}, file)
    assert bounds.load("h200", "0.11.9", file) == ({"a": two, "c": one}, "0.11")
    assert bounds.load("h200", "0.12.0.1", file)[1] == "0.11", "a new jax uses the bounds of the previous one"
    assert bounds.load("h200", "0.9.9", file) == ({}, "")
    assert bounds.load("tpu:v5e", "0.11.2", file) == ({}, "")
    for release in ("13.0.88", "13.10.1"):
        bounds.record("h200", "0.11.2", {"a": Bound(len(release), 0)}, file, ptxas=release)
        assert bounds.load("h200", "0.11.2", file, ptxas=release) == (
            {"a": Bound(len(release), 0)},
            f"0.11 ptxas {release}",
        )
    assert bounds.load("h200", "0.11.2", file, ptxas="13.5.37")[1] == "0.11 ptxas 13.10.1", "the newest, by number"
    assert bounds.load("h200", "0.11.2", file)[1] == "0.11", "bounds without ptxas, as those of TPUs"
    bounds.record("h200", "0.11.2", {"c": two}, file, whole=True)
    assert bounds.load("h200", "0.11.2", file)[0] == {"c": two}, "cases that no longer exist are dropped"
    assert len(file.read_text().splitlines()) < 20


def test_the_package_s_bounds_can_be_read() -> None:
    for target in TARGETS.values():
        ptxas = "13.5.37" if target.platform == "cuda" else ""
        for version in ("0.10.2", "0.11.2"):
            found, key = bounds.load(target.bounds, version, ptxas=ptxas)
            assert key == bounds.key_of(version, ptxas)
            assert found and all(isinstance(bound, Bound) for bound in found.values())


def test_an_h100_has_its_own_memory_and_the_bounds_of_the_h200() -> None:
    h100 = TARGETS["h100"]
    assert (h100.bounds, h100.memory, memory_of("NVIDIA H100 80GB HBM3")) == ("h200", 80 * GB, 80 * GB)
    described = [set(target.description.split()) for target in (H200, h100)]
    assert {word for word in described[0] ^ described[1] if word.isdigit()} == {
        "4800000000000", "150000000000", "62914560", "3350000000000", "85000000000", "52428800",
    }  # fmt: skip
    large = {case.name for case in choose(H200, [], [], True)} - {case.name for case in choose(h100, [], [], True)}
    assert large == {"qwen3-32b tp1 decode", "qwen3-32b tp1 prefill", "qwen3-32b tp1 draw"}
    [breach] = laws(NEEDY, replace(SOUND, memory=81 * GB), h100.memory)
    assert "81.00 GB per device, the bound is 80 GB" in breach


def test_bounds_are_recorded_for_the_target_that_has_them(tmp_path: Path) -> None:
    ran = gate("--target", "h100", "--record", "--bounds", str(tmp_path / "bounds.json"))
    assert ran.returncode == 1 and "the bounds of h200" in ran.stderr and not list(tmp_path.iterdir())


def test_two_cases_of_one_name_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PLANTED))
    with pytest.raises(ValueError, match="sound"):
        collect(["planted", "planted"])
    assert [case.name for case in collect(["planted"])][:2] == ["sound", "spills"]


def test_every_target_has_cases_of_different_names() -> None:
    """`collect` refuses two of one name."""
    assert all(len(choose(target, [], [], True)) > 14 for target in TARGETS.values())


def test_a_kernel_case_donates_what_it_says() -> None:
    case = Case("a", lambda x, y: x + y, shapes(((4,), jnp.float32), ((4,), jnp.float32)), donate=(1,))
    lowered = case.lower(jax.sharding.Mesh(jax.devices("cpu")[:1], ("tp",)))
    assert [info.donated for info in jax.tree.leaves(lowered.args_info)] == [False, True]


def test_the_table_shows_failures_without_figures(capsys: pytest.CaptureFixture[str]) -> None:
    launched = replace(SOUND, largest=Launched("a", 168, 384, 20 << 10, True, 100))
    rows = [table.row("a", launched, "ok", 4.8e12), table.row("b", "does not compile", "FAILED", 4.8e12)]
    known = dict(zip(table.HEAD, rows[0], strict=True))
    told = [known[name] for name in ("blocks", "est. KB in flight", "est. % of copies", "est. loop cycles")]
    assert told == ["1", "20", "56", "300"]
    assert {len(row) for row in rows} == {len(table.HEAD)}
    table.show(rows, "title")
    table._plain(rows, "title")
    said = capsys.readouterr().out
    assert all(said.count(each) == 2 for each in ("12 wgmma 3 tma", "1.250", "7.0"))


def gate(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(PLANTED), str(ROOT)])
    return subprocess.run(
        [sys.executable, "-m", "pallas_kernels.gate", *arguments],
        env={**os.environ, "PYTHONPATH": paths, **environment},
        capture_output=True,
        text=True,
        timeout=250,
    )


@pytest.mark.skipif(H200.missing() is None, reason="the compilers for the GPU are installed")
def test_without_the_packages_it_fails_and_says_what_to_install() -> None:
    ran = gate()
    assert ran.returncode == 1
    assert "jax-cuda13-plugin" in ran.stderr and "pip install --no-deps" in ran.stderr


@pytest.mark.skipif(H200.missing() is not None, reason=str(H200.missing()))
def test_planted_faults_are_found(tmp_path: Path) -> None:
    known, report = tmp_path / "bounds.json", tmp_path / "report.json"
    fine, tight = Bound(0, 0, kernels=1), Bound(100, 0, kernels=1)
    cases = ("spills", "lacks wgmma", "approximates", "changes in place", "loses its donation", "copies its pool")
    bounds.record(
        "h200", jax.__version__, {**dict.fromkeys(cases, replace(fine, registers=255)), "sound": tight}, known
    )
    ran = gate("--cases", "planted", "--bounds", str(known), "--json", str(report))
    assert ran.returncode == 1, ran.stderr
    told = {name: " ".join(one["breaches"]) for name, one in json.loads(report.read_text())["cases"].items()}
    assert "registers, the recorded bound is 100" in told.pop("sound")
    assert "bytes of registers spilled" in told.pop("spills")
    assert told.pop("changes in place") == ""
    assert told.pop("lacks wgmma").startswith("0 wgmma instructions")
    assert "tanh.approx instructions of 11 bits" in told.pop("approximates")
    assert told.pop("loses its donation").startswith("0 of 1 donated arguments")
    assert told.pop("copies its pool").startswith("a weight or a pool is copied")
    assert told.pop("aborts").startswith("the compiler died")
    assert told.pop("raises").startswith("does not compile: TypeError")
    assert not told
    assert "FAILED spills" in ran.stdout and "1 of 9 cases passed" in ran.stdout


@pytest.mark.skipif(H200.missing() is not None, reason=str(H200.missing()))
def test_a_recorded_case_passes(tmp_path: Path) -> None:
    known = str(tmp_path / "bounds.json")
    broken = tmp_path / "ptxas"  # first on PATH, but the gate and Mosaic use that of the installed wheel
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    assert gate("--cases", "planted", "--only", "sound", "--bounds", known).returncode == 1
    path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    recorded = gate("--cases", "planted", "--only", "sound", "--bounds", known, "--record", PATH=path)
    assert recorded.returncode == 0 and re.search(r"h200, jax [\d.]+, ptxas 1\d\.\d+\.\d+", recorded.stdout)
    passed = gate("--cases", "planted", "--only", "s*nd", "--bounds", known)
    assert passed.returncode == 0 and "1 of 1 cases passed" in passed.stdout, passed.stdout + passed.stderr


@pytest.mark.skipif(H200.missing() is not None, reason=str(H200.missing()))
def test_layouts_are_said_where_mosaic_would_search_long() -> None:
    """Without, both took ten times as many guesses as they have values, and 13 to 17 s of Python."""
    cases = ("sampling_threshold llama3 r1", "decode d64 wgmma bfloat16 page64 q1")
    command = [sys.executable, "-m", "tests.support.kernels.guesses", *cases]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert {one["case"] for one in found} == set(cases)
    for one in found:
        assert one["kernels"] and all(guesses <= 1 + values for guesses, values in one["kernels"]), one

"""The kernel parts of the day of the GPU: the cases exist, and the sweep writes what the engine looks up."""

from __future__ import annotations

import inspect
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_day import probe, questions, stage_b
from benchmarks.gpu_day.child import function_of
from benchmarks.gpu_day.kernels import cases, experts, gated, mla, quantized, sweep, timing
from benchmarks.gpu_day.part import Part, Run
from benchmarks.gpu_day.report import rows_of
from benchmarks.gpu_day.stages import all_parts
from benchmarks.gpu_day.state import State
from pallas_kernels import tuned
from pallas_kernels.attention import mosaic_gpu
from pallas_kernels.ops.paged_attention.api import AttentionSpec

PARTS = [part for dry in (False, True) for part in all_parts(dry)]


def run_in(folder: Path, **facts: float) -> Run:
    """Return the run of a dry part that records into a folder."""
    state = State(folder)
    state.append({"part": "x", "begin": "A"})
    return Run(Part("x", "A", 60, "nothing:nothing"), True, state.path, state.files, facts, math.inf)


@pytest.mark.parametrize("dry", [False, True])
def test_parts_can_be_called(dry: bool) -> None:
    """Every part names a function that takes its arguments, and the cases that it names exist."""
    known = {case.name for case in (*cases.decode_cases(dry), *cases.prefill_cases(dry))}
    known |= {case.name for case in (*experts.all_cases(dry), *mla.all_cases(dry))}
    for part in all_parts(dry):
        inspect.signature(function_of(part)).bind(None, **part.arguments)
        asked = [*part.arguments.get("cases", ()), *filter(None, [part.arguments.get("case")])]
        assert set(asked) <= known, part.name
        if "containing" in part.arguments:
            assert any(part.arguments["containing"] in name for name in quantized.specs(dry)), part.name
        if part.call.endswith("gated:measure"):
            assert gated.cases(dry, part.arguments["model"]), part.name


def test_products_are_representative() -> None:
    """The products with 8-bit weights are few, and have every form; each is in exactly one part."""
    names = list(quantized.specs(False))
    asked = [part.arguments["containing"] for part in all_parts(False) if "containing" in part.arguments]
    assert 12 <= len(names) <= 16 and all(sum(one in name for one in asked) == 1 for name in names)
    for form in ("int8 channels", "float8_e4m3fn channels", "float8_e4m3fn blocks"):
        assert any(name.endswith(form) for name in names)


def test_sweep_tunes_what_the_engine_looks_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys of the sweep's entries are those for which an engine asks `tuned.best`."""
    asked: list[dict[str, Any]] = []

    def best(op: str, spec: Any, device: str, kind: type) -> None:
        asked.append({"op": op, **tuned.key_of(spec)})

    monkeypatch.setattr(tuned, "best", best)
    known = {case.name: case for case in (*cases.decode_cases(False), *cases.prefill_cases(False))}
    made = []
    for op, queries, name in stage_b.SWEPT.values():
        made.append({"op": op, **tuned.key_of(sweep.looked_up(op, known[name], queries, dry=False))})
        one = made[-1]
        stored = "" if one["kv_dtype"] == one["dtype"] else one["kv_dtype"]
        spec = AttentionSpec(
            platform="gpu", device="NVIDIA H200", capability="9.0", dtype=one["dtype"], heads=one["heads"],
            kv_heads=one["kv_heads"], head_dim=one["dim"], page=one["page"], kv_dtype=stored,
        )  # fmt: skip
        assert mosaic_gpu.supports(spec) is None
    assert all(one in asked for one in made)
    usual = [one for one in asked if one["page"] == 64 and one["kv_dtype"] == "bfloat16"]
    assert all(one in made for one in usual), "every lookup of the usual model and pages is tuned"


@dataclass(frozen=True)
class Choice:
    """A config that only says where the weights are."""

    number: int
    p_in_smem: bool = True


def test_sweep_never_writes_a_wrong_config(tmp_path: Path) -> None:
    """The fastest config that computes the right numbers wins; faster ones that are wrong are reported."""
    run = run_in(tmp_path)
    timed = [(3.0, Choice(0)), (1.0, Choice(1)), (2.0, Choice(2)), (1.5, Choice(3))]
    errors = {0: 1e-3, 1: 0.4, 2: 2e-3, 3: math.nan}
    found = sweep.fastest_right(timed, lambda config: (errors[config.number], 8e-3), run)
    assert found == (2.0, Choice(2))
    wrong = rows_of(State(tmp_path).attempts()["x"])["sweep wrong"]
    assert [row["config"] for row in wrong] == [str(Choice(1)), str(Choice(3))]
    assert sweep.fastest_right(timed[1:2], lambda config: (0.4, 8e-3), run) is None


@pytest.mark.parametrize(("ptxas", "trusted"), [("", False), ("12.9", False), ("13.0", False), ("13.3", True),
                                                ("13.10", True), ("14.0", True)])  # fmt: skip
def test_old_ptxas_compiles_no_weights_in_registers(ptxas: str, trusted: bool) -> None:
    assert probe.trusted(ptxas) == trusted
    both = [Choice(0), Choice(1, p_in_smem=False)]
    assert list(sweep.usable(both, ptxas)) == both[: 1 + trusted]


def test_sweep_keeps_other_entries(tmp_path: Path) -> None:
    """An entry replaces the one of the same key, and no other."""
    run, key = run_in(tmp_path), dict.fromkeys(tuned.KEYS, 1)
    for op, us in (("decode", 5.0), ("prefill", 6.0), ("decode", 4.0)):
        path = sweep.write(run, {"op": op, **key, "config": {}, "us": us})
    whole = json.loads(path.read_text())
    assert {(entry["op"], entry["us"]) for entry in whole["entries"]} == {("prefill", 6.0), ("decode", 4.0)}
    assert whole["measured"] is None, "a dry run measures nothing"


@pytest.mark.parametrize("facts", [{}, {timing.COPY: 4.0, timing.MATMUL: 800.0}])
def test_rows_need_no_ceilings(tmp_path: Path, facts: dict[str, float]) -> None:
    """Without measured ceilings the shares of them stay empty; nothing else changes."""
    time = timing.Timing(run_in(tmp_path, **facts))
    time.add("case", "kernel", [2e-6, 1e-6], moved=2e6, flops=4e8)
    (row,) = rows_of(State(tmp_path).attempts()["x"])["kernels"]
    assert row["us"] == 2.0 and row["tb_s"] == pytest.approx(2.0)
    if facts:
        assert row["of_copy"] == pytest.approx(50) and row["of_matmul"] == pytest.approx(50)
        assert row["x_floor"] == pytest.approx(2.0) and time.floor(2e6, 4e8) == pytest.approx(5e-7)
    else:
        assert row["of_copy"] is row["of_matmul"] is row["x_floor"] is time.floor(2e6) is None
    assert time.turns(time.floor(2e6)) == 1


def test_one_failure_costs_one_row(tmp_path: Path) -> None:
    """Work that fails ends the part after the rest of its work has run, and names every failure."""
    time, done = timing.Timing(run_in(tmp_path)), []

    def fail() -> None:
        raise ValueError("no config\nmore")

    with pytest.raises(RuntimeError, match=r"^first: ValueError: no config$"), time.each() as attempt:
        attempt("first", fail)
        attempt("second", lambda: done.append(2))
    assert done == [2]


def test_questions_are_asked_of_measured_rows_only() -> None:
    rows = [
        {"case": "decode B64 ctx4096", "kernel": f"mosaic {kind}", "us": us} for kind, us in (("mma", 6), ("wgmma", 3))
    ]
    assert questions.answers(rows) == {"mma of 16 rows / wgmma of 64": 2.0}
    rows.append({"case": "decode B64 ctx4096 fp8", "kernel": "mosaic mma", "us": 1.5})
    assert questions.answers(rows)["fp8 / bf16"] == 0.5

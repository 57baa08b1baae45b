"""The timed kernels of the day of the GPU: every case runs dry, and the sweep writes what the engine looks up."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

import pallas_kernels.ptxas
from benchmarks.gpu_day import headlines, parts, peers, shapes, sweep, timing
from benchmarks.gpu_day.part import Part, Run
from benchmarks.gpu_day.report import rows_of
from benchmarks.gpu_day.state import State
from pallas_kernels import tuned
from pallas_kernels.attention import mosaic_gpu
from pallas_kernels.ops.paged_attention.api import AttentionSpec
from tests.support.bench.parts import run_of

SWEPT = [part.arguments for part in parts.parts(False) if part.call == "sweep:tune"]


def run_in(folder: Path, **facts: float) -> Run:
    """Return the run of a dry part that records into a folder."""
    return run_of(Part("x", 60, "nothing:nothing"), folder, facts)


@pytest.mark.parametrize("dry", [False, True])
def test_cases_exist_and_move_what_they_must(dry: bool) -> None:
    known = shapes.cases(dry)
    assert {*headlines.FIRST, *headlines.LATER, *peers.CASES, *(one["case"] for one in SWEPT)} <= set(known)
    for case in known.values():
        ragged, pages = case.ragged()
        used = {int(page) for row in ragged.block_tables for page in row if page}
        assert len(used) == pages - 1, "every page but the first belongs to a row"
        each = sum(math.prod(part.shape[1:]) for part in case.pool(1, 0)) // case.page
        cache = sum(context for _, context in case.rows) * each * jnp.dtype(case.kv_dtype).itemsize
        assert cache < case.moved


def test_xla_form_runs_dry(tmp_path: Path) -> None:
    """A headline is compiled, made and timed; both kinds of loops keep the device's lock."""
    run = run_in(tmp_path)
    rows = [headlines.xla_attention(shapes.cases(True)["decode B64 ctx4096"]), headlines.writes(True, 256, 256, "xla")]
    timing.Timing(run).all(rows)
    (attempt,) = State(tmp_path).attempts()["x"]
    found = rows_of([attempt])
    assert [row["case"] for row in found["kernels"]] == ["decode B64 ctx4096", "kv write 256"]
    assert all(row["us"] > 0 for row in found["kernels"])
    assert [row["outcome"] for row in found["items"]] == ["begun", "done"] * 2


def test_sweep_tunes_what_the_engine_looks_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys of the sweep's entries are those for which an engine asks `tuned.best`."""
    asked: list[dict[str, Any]] = []

    def best(op: str, spec: Any, device: str, kind: type) -> None:
        asked.append({"op": op, **tuned.key_of(spec)})

    monkeypatch.setattr(tuned, "best", best)
    known = shapes.cases(False)
    made = []
    for asked_for in SWEPT:
        op = asked_for["op"]
        wanted = sweep.looked_up(op, known[asked_for["case"]], asked_for["queries"], dry=False)
        made.append({"op": op, **tuned.key_of(wanted)})
        one = made[-1]
        stored = "" if one["kv_dtype"] == one["dtype"] else one["kv_dtype"]
        spec = AttentionSpec(
            platform="gpu", device="NVIDIA H200", capability="9.0", dtype=one["dtype"], heads=one["heads"],
            kv_heads=one["kv_heads"], head_dim=one["dim"], page=one["page"], kv_dtype=stored,
        )  # fmt: skip
        assert mosaic_gpu.supports(spec) is None
    assert all(one in asked for one in made)


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
    assert pallas_kernels.ptxas.trusted(ptxas) == trusted
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

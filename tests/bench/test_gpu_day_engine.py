"""Stages C and D of the day of the GPU: every part runs dry, and the floors count what a step cannot avoid."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.gpu_day import environment, floors, stage_c, stage_d
from jaxserve.models.published import published, published_spec
from jaxserve.sched.perf.profile import Row
from tests.support.bench.parts import run_part

LLAMA = "llama3-8b"
FACTS = {floors.COPY: 4.0, floors.MATMUL: 500.0}
Tables = dict[str, list[dict[str, Any]]]


def test_parts_have_names_limits_and_functions() -> None:
    for dry in (False, True):
        parts = [*stage_c.parts(dry), *stage_d.parts(dry)]
        assert len({part.name for part in parts}) == len(parts)
        assert all(0 < part.seconds <= 240 and part.stage in "CD" for part in parts)
    whole = {part.call for part in [*stage_c.parts(False), *stage_d.parts(False)]}
    assert whole == {part.call for part in parts}  # the dry run leaves no function out


@pytest.fixture
def dry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Tables]:
    """Return a function that runs a part by name, in an environment that the test leaves as it was."""
    parts = {part.name: part for part in [*stage_c.parts(True), *stage_d.parts(True)]}
    monkeypatch.setenv("JAXSERVE_CACHE_DIR", os.environ["JAX_COMPILATION_CACHE_DIR"])
    for name in ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_FLAGS"):
        monkeypatch.setenv(name, os.environ.get(name, ""))

    def run(name: str) -> Tables:
        return run_part(parts[name], tmp_path / "day", FACTS)

    return run


def test_decode(dry: Callable[[str], Tables]) -> None:
    found = dry("engine decode")
    steps = found["decode step"]
    assert [(row["rows"], row["context"]) for row in steps] == [(4, 16), (1, 16), (4, 32), (1, 32)]
    for row in steps:
        assert 0 < row["best_ms"] <= row["step_ms"]
        assert row["step_ms"] == pytest.approx(row["x_floor"] * row["floor_ms"])
        assert row["floor_ms"] == pytest.approx(row["gb_floor"] / FACTS[floors.COPY])
    for row in found["host"]:
        assert row["exposed_ms"] == pytest.approx(row["awaited_ms"] - row["step_ms"])
        assert min(row[name] for name in ("build_ms", "dispatch_ms", "draw_ms", "read_ms", "submit_ms")) > 0
    assert {row["program"] for row in found["compile"]} == {"decode 4", "decode 1", "draw 4"}


def test_preemption(dry: Callable[[str], Tables]) -> None:
    """A boundary within layers gives twice the segments."""
    rows = dry("preemption layer, op")["preemption"]
    assert [(row["boundary"], row["segments"]) for row in rows] == [("layer", 2), ("op", 4)]
    assert all(0 <= row["wait_p50_ms"] <= row["wait_p99_ms"] and row["tokens_s"] > 0 for row in rows)


def test_without_ceilings_there_is_no_floor() -> None:
    assert floors.against_bytes({}, 1.0, 1e12) == {"gb_floor": 1e3, "tb_s": 1.0, "floor_ms": None, "x_floor": None}
    assert floors.against_flops({}, 1.0, 1e12)["x_floor"] is None


def test_parameters_are_those_of_the_published_model() -> None:
    spec = published_spec(LLAMA)
    counted = floors.parameters(spec)
    norm = spec.dim
    assert counted.token + 2 * counted.row + norm == published()[LLAMA].parameters
    assert floors.weight_bytes(spec, "bfloat16") == 2 * (counted.token + 2 * counted.row)


@given(st.integers(1, 256), st.integers(1, 32768), st.integers(0, 4096))
def test_every_token_of_context_costs_its_kv(rows: int, context: int, more: int) -> None:
    spec = published_spec(LLAMA)
    longer, short = (floors.decode_bytes(spec, "bfloat16", rows, length) for length in (context + more, context))
    assert longer - short == rows * more * 128 * 1024  # 32 layers x 8 heads x 128 x keys and values x 2 bytes


@given(st.integers(1, 8192), st.integers(1, 8192))
def test_cutting_a_prompt_changes_only_the_sampled_tokens(first: int, second: int) -> None:
    spec = published_spec(LLAMA)
    whole = floors.chunk_flops(spec, [Row(0, first + second)])
    cut = floors.chunk_flops(spec, [Row(0, first), Row(first, second)])
    assert cut - whole == pytest.approx(2 * floors.parameters(spec).row, rel=1e-3)


@pytest.mark.full
def test_flags_that_jaxlib_does_not_know_are_found_out() -> None:
    assert environment.accepted("") and environment.accepted("--xla_gpu_enable_command_buffer=")
    assert not environment.accepted("--xla_no_such_flag=1")


OTHERS = [
    part.name
    for part in [*stage_c.parts(True), *stage_d.parts(True)]
    if part.name not in ("engine decode", "preemption layer, op")
]
EXPECTED = {
    "engine prefill": {"prefill", "compile"},
    "engine step model": {"step model", "compile"},
    "engine idle": {"start", "idle"},
    "engine update mode, default": {"update mode", "compile"},
    "shared 2x1": {"shared 2x1", "compile"},
    "goodput": {"start", "goodput", "goodput tasks"},
    "speculation": {"speculation"},
    "http demo": {"start", "http"},
}


@pytest.mark.full
@pytest.mark.parametrize("name", OTHERS)
def test_the_other_parts(dry: Callable[[str], Tables], name: str) -> None:
    found = dry(name)
    assert set(found) == EXPECTED.get(name, set(found) & {"update mode", "compile"})
    for table, rows in found.items():
        for row in rows:
            values = [value for key, value in row.items() if key.endswith(("_ms", "_s")) and key != "exposed_ms"]
            assert "skipped" in row or all(value is not None for value in values), (table, row)

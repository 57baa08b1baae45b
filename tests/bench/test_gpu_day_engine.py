"""The engine on the day of the GPU: its part runs dry, and the floors count what a step cannot avoid."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.gpu_day import floors, parts
from jaxserve.models.published import published, published_spec
from jaxserve.sched.perf.profile import Row
from tests.support.bench.parts import run_part

LLAMA = "llama3-8b"
FACTS = {floors.COPY: 4.0, floors.MATMUL: 500.0}


def test_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process fills every table; a step's time is its floor times x_floor, and its parts take time."""
    monkeypatch.setenv("JAXSERVE_CACHE_DIR", os.environ["JAX_COMPILATION_CACHE_DIR"])
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9"))
    (part,) = [part for part in parts.parts(True) if part.name == "engine 8b"]
    found = run_part(part, tmp_path, FACTS)
    assert {row["outcome"] for row in found["items"]} == {"begun", "done"}
    assert [(row["rows"], row["context"]) for row in found["decode step"]] == [(4, 16), (1, 16)]
    for row in found["decode step"]:
        assert 0 < row["best_ms"] <= row["step_ms"]
        assert row["step_ms"] == pytest.approx(row["x_floor"] * row["floor_ms"])
        assert row["floor_ms"] == pytest.approx(row["gb_floor"] / FACTS[floors.COPY])
    for row in found["host"]:
        assert row["exposed_ms"] == pytest.approx(row["awaited_ms"] - row["step_ms"])
        assert min(row[name] for name in ("build_ms", "dispatch_ms", "draw_ms", "read_ms", "submit_ms")) > 0
    assert [row["tokens"] for row in found["prefill"]] == [64, 32]
    (stopped,), (moved,) = found["preemption"], found["shared 2x1"]
    assert stopped["segments"] == 2 and 0 <= stopped["wait_p50_ms"] <= stopped["wait_p99_ms"]
    assert moved["gb_s"] == pytest.approx(moved["mb"] / moved["move_ms"])
    assert {"decode 4", "decode 1", "draw 4"} <= {row["program"] for row in found["compile"]}


def test_without_ceilings_there_is_no_floor() -> None:
    assert floors.against_bytes({}, 1.0, 1e12) == {"gb_floor": 1e3, "tb_s": 1.0, "floor_ms": None, "x_floor": None}
    assert floors.against_flops({}, 1.0, 1e12)["x_floor"] is None


def test_parameters_are_those_of_the_published_model() -> None:
    spec = published_spec(LLAMA)
    counted = floors.parameters(spec)
    norm = spec.dim
    assert counted.token + 2 * counted.row + norm == published()[LLAMA].parameters


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

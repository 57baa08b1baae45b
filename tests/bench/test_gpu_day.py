"""The day of the GPU: its parts can be called, its state survives, and its sweep writes what the engine looks up."""

from __future__ import annotations

import inspect
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pallas_kernels.ptxas
from benchmarks.gpu_day import floors, headlines, parts, peers, shapes, sweep
from benchmarks.gpu_day.child import function_of
from benchmarks.gpu_day.part import Part, Run, append
from benchmarks.gpu_day.report import rows_of
from benchmarks.gpu_day.state import Attempt, State
from jaxserve.models.published import published, published_spec
from jaxserve.sched.perf.profile import Row
from pallas_kernels import tuned
from pallas_kernels.attention import mosaic_gpu
from pallas_kernels.ops.paged_attention.api import AttentionSpec

SWEPT = [part.arguments for part in parts.parts(False) if part.call == "sweep:tune"]
LLAMA = "llama3-8b"


def test_torn_lines_cost_themselves(tmp_path: Path) -> None:
    """A line that was cut when the machine went away costs no other line; an attempt without an end is repeated."""
    state = State(tmp_path)
    for record in ({"part": "x", "begin": True}, {"part": "x", "table": "t", "row": {"a": 1}}):
        state.append(record)
    with state.path.open("a") as file:
        file.write('{"part": "x", "table": "t", "ro')
    state = State(tmp_path)
    append(state.path, {"part": "x", "fact": "f", "value": 2})
    (run,) = state.attempts()["x"]
    assert run == Attempt("x", rows=[("t", {"a": 1})], facts={"f": 2}) and run.outcome == "interrupted"


def test_files_come_back_and_go_out_again(tmp_path: Path) -> None:
    """The packed files of a call are the files of the next; those too large are named."""
    state = State(tmp_path / "state")
    (state.files / "profiles").mkdir()
    (state.files / "profiles" / "one.json").write_text("[1]")
    with (state.files / "huge").open("wb") as file:
        file.truncate((16 << 20) + 1)
    assert state.export(tmp_path / "out") == ["huge"]
    assert (State(tmp_path / "out").files / "profiles" / "one.json").read_text() == "[1]"


def test_parts_can_be_called() -> None:
    """Every part names a function that takes its arguments, a dry day leaves none out, and no two share a name."""
    whole, dry = parts.parts(False), parts.parts(True)
    for part in (*whole, *dry):
        inspect.signature(function_of(part)).bind(None, **part.arguments)
    assert len({part.name for part in whole}) == len(whole) and all(0 < part.seconds <= 300 for part in whole)
    assert {part.call for part in whole} == {part.call for part in dry}


@pytest.mark.parametrize("dry", [False, True])
def test_cases_exist_and_move_what_they_must(dry: bool) -> None:
    known = shapes.cases(dry)
    assert {*headlines.FIRST, *headlines.LATER, *peers.CASES, *(one["case"] for one in SWEPT)} <= set(known)
    for case in known.values():
        ragged, pages = case.ragged()
        used = np.unique(ragged.block_tables)
        assert np.count_nonzero(used) == pages - 1, "every page but the first belongs to a row"
        pools = jax.eval_shape(lambda case=case: case.pool(1, 0))
        each = sum(math.prod(part.shape[1:]) for part in pools) // case.page
        cache = sum(context for _, context in case.rows) * each * jnp.dtype(case.kv_dtype).itemsize
        assert cache < case.moved


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


def run_in(folder: Path) -> Run:
    """Return the run of a dry part that records into a folder."""
    state = State(folder)
    state.append({"part": "x", "begin": True})
    return Run(Part("x", 60, "nothing:nothing"), True, state.path, state.files, {}, time.monotonic() + 600)


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

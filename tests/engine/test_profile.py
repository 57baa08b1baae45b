"""Profiles measured by a real executor, kept on disk between starts, or taken from matching presets."""

from __future__ import annotations

import asyncio
import json
import logging
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from jaxserve.cli import main as cli
from jaxserve.config import ServeConfig
from jaxserve.engine.startup import assemble, profile
from jaxserve.engine.startup.assemble import Machine
from jaxserve.errors import InvalidValue
from jaxserve.sched.api.perf import Load
from jaxserve.sched.perf.fit import kind
from jaxserve.sched.perf.profile import Point

SMALL: dict[str, Any] = {  # each instance as those of tests/support/engine/faults.py, which compiles them once
    "max_model_len": 256,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "kv_cache_memory": "16MiB",
    "preempt_boundary": "chunk",
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use profiles of this test only, but share compiled programs."""
    monkeypatch.setattr(profile, "cache_folder", lambda: tmp_path)
    return tmp_path


def started(**settings: Any) -> Machine:
    machine = assemble.assemble(ServeConfig.load(**SMALL, profile_time=1.0, **settings))
    asyncio.run(machine.close())
    return machine


def test_the_first_start_measures_and_the_next_one_does_not(
    cache: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = started()
    (path,) = (cache / profile.FOLDER).glob("*.json")
    assert {kind(load) for load, _ in first.recipe.points} == {"decode", "prefill", "mixed"}
    assert first.recipe.kind == "learned" and first.recipe.buckets.mixed == (64,)
    model = first.recipe.make()
    assert 0.3 < median(model.step_time(load) / seconds for load, seconds in first.recipe.points) < 3

    measured = profile.measured

    def looked(*given: Any, **options: Any) -> list[Point]:
        assert given[4] == profile.CHECK, "the profile was measured again"
        return measured(*given, **options)

    with monkeypatch.context() as only, caplog.at_level(logging.INFO, "jaxserve"):
        only.setattr(profile, "measured", looked)
        only.setattr(profile, "FAR", inf)  # other tests may slow this start only
        again = started()
    assert again.recipe == first.recipe and "measured at an earlier start" in caplog.text

    kept = json.loads(path.read_text())  # as after a start on a busy machine
    path.write_text(json.dumps(kept | {"points": [(load, 1e6 * seconds) for load, seconds in kept["points"]]}))
    caplog.clear()
    with caplog.at_level(logging.WARNING, "jaxserve"):
        again = started()
    assert caplog.text.count("measuring again") == 1
    assert max(seconds for _, seconds in again.recipe.points) < 1e5 * max(seconds for _, seconds in kept["points"])

    path.write_text(path.read_text()[:200])  # as after a full disk
    caplog.clear()
    with caplog.at_level(logging.WARNING, "jaxserve"):
        third = started(perf="linear")
    assert caplog.text.count("cannot be read") == 1 and third.recipe.kind == "linear"
    assert len(json.loads(path.read_text())["points"]) == len(third.recipe.points)


@pytest.mark.full
def test_presets_of_other_models_devices_and_meshes_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def preset(**more: Any) -> str:
        fields = {"name": "mine", "kv_bytes_per_token": 0, "kv_tokens": 4096, **more}
        fields["coefficients"] = {"fixed": 0.003, "prefill": 1e-4, "decode": 1e-4, "quadratic": 0.0, "longest": 0.0}
        fields["coefficients"] |= {"context": 1e-6}
        path = tmp_path / "mine.yaml"
        path.write_text(json.dumps(fields))
        return str(path)

    here = {"model": "jaxserve-demo", "device": profile.device_name()}
    machine = started(perf=preset(measured_on=here))
    model = machine.recipe.make()
    assert model.step_time(Load().add_chunk(64, 0)) == pytest.approx(0.003 + 64e-4)
    assert not list(tmp_path.glob(f"{profile.FOLDER}/*")), "nothing was measured"
    with caplog.at_level(logging.WARNING, "jaxserve"):
        started(perf=preset())
    assert "does not say on which model and device" in caplog.text
    for wrong, said in (
        ({"model": "Qwen/Qwen3-8B", "device": here["device"]}, "measured for model 'Qwen/Qwen3-8B', .*'jaxserve-demo'"),
        ({"model": "jaxserve-demo", "device": "NVIDIA H200"}, "measured for device 'NVIDIA H200', but this server has"),
    ):
        with pytest.raises(InvalidValue, match=said):
            started(perf=preset(measured_on=wrong))
    with pytest.raises(InvalidValue, match=r"instances of 2 devices, but mesh 1x1 has instances of 1 devices"):
        started(perf=preset(tensor_parallel=2))


def test_an_engine_starts_inside_a_running_event_loop() -> None:
    async def within() -> Machine:
        machine = assemble.assemble(ServeConfig.load(**SMALL, profile_time=0.2))
        await machine.close()
        return machine

    assert asyncio.run(within()).recipe.points


def test_an_unwritable_folder_does_not_prevent_serving(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / profile.FOLDER).write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING, "jaxserve"):
        profile.ProfileCache({"model": "m"}, tmp_path).save([(Load(decode=1), 0.1)])
    assert "cannot be stored" in caplog.text


@pytest.mark.parametrize(
    ("perf", "said"),
    [
        ("lerned", "perf='lerned' is unknown: did you mean 'learned'"),
        ("nowhere/mine.yaml", "perf='nowhere/mine.yaml' does not exist: `jaxserve profile --out FILE` writes one"),
    ],
)
def test_unknown_models_and_files_are_clear_errors(perf: str, said: str) -> None:
    with pytest.raises(InvalidValue, match=said):
        ServeConfig(perf=perf)


def test_the_profile_command_writes_a_file_for_serve_simulate_and_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    preset, steps = tmp_path / "mine.yaml", tmp_path / "steps.csv"
    small = [word for name, value in SMALL.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    assert (
        cli.dispatch("profile", ["--runs", "2", "--time", "1s", "--out", str(preset), "--steps", str(steps), *small])
        == 0
    )
    assert "general form of padded steps: off by" in capsys.readouterr().out
    latency = ServeConfig(perf=str(preset)).perf_preset
    assert latency is not None and latency.measured_on.known() == {
        "model": "jaxserve-demo",
        "device": profile.device_name(),
    }
    assert latency.buckets.mixed == (64,) and latency.kv_bytes_per_token > 0
    assert cli.dispatch("fit", [str(steps)]) == 0
    served = ["--latency", str(preset), "--policy", "unified", "--perf", "learned"]
    load = ["--workload", "deflection", "--num-requests", "20", "--qps", "1", "--out", str(tmp_path / "out")]
    assert cli.dispatch("simulate", [*served, *load]) == 0
    assert "unified" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--runs", "0"], "runs=0 must be at least 1"),
        (["--time", "0s"], "time='0s' must be above 0"),
        (["--out", "nowhere/mine.yaml"], "out='nowhere/mine.yaml': folder 'nowhere' does not exist"),
    ],
)
def test_invalid_arguments_of_the_profile_command_are_clear_errors(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.dispatch("profile", words) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("known", "here", "fits"),
    [
        (
            {"model": "Llama-3-8B", "device": "A800"},
            {"model": "meta-llama/Meta-Llama-3-8B-Instruct", "device": "x"},
            False,
        ),
        ({"model": "Llama-3-8B"}, {"model": "meta-llama/Meta-Llama-3-8B-Instruct"}, True),
        ({"model": "Llama-3-8B"}, {"model": "meta-llama/Llama-3.1-8B"}, False),
        ({"device": "H20"}, {"device": "NVIDIA H200"}, False),
        ({"device": "A800"}, {"device": "NVIDIA A800-SXM4-80GB"}, True),
        ({}, {"model": "anything", "device": "cpu"}, True),
    ],
)
def test_model_and_device_names_are_compared_by_words(known: dict[str, str], here: dict[str, str], fits: bool) -> None:
    if fits:
        profile.check_measured_on("mine", known, here)
        return
    with pytest.raises(InvalidValue, match="measured for"):
        profile.check_measured_on("mine", known, here)


def test_published_presets_name_their_model_and_device(repo: Path) -> None:
    names = [path.stem for path in (repo / "configs" / "latency").glob("*.yaml")]
    assert names
    for name in names:
        preset = ServeConfig(perf=name).perf_preset
        assert preset is not None and set(preset.measured_on.known()) == {"model", "device"}, name
    with pytest.raises(InvalidValue, match="perf='llama3-8b-a800' was measured for model 'Llama-3-8B'"):
        started(perf="llama3-8b-a800")

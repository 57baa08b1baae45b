"""Executables kept between starts: found by all that determines them, refused if another may have written them."""

from __future__ import annotations

import errno
import logging
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.cli.main import dispatch
from jaxserve.config import ServeConfig
from jaxserve.engine.programs.program import Program, bound
from jaxserve.engine.speculation.drafters import Call
from jaxserve.engine.startup import assemble, executables
from jaxserve.engine.startup.compiled import compile_counter
from jaxserve.engine.startup.executables import MANIFEST, Executables, Shipped, facts_of, remembered
from jaxserve.sched.api.errors import InvalidValue

FACTS = {"spec": "a", "limits": "b", "backends": "c"}


def mesh_of(*devices: int) -> Mesh:
    return Mesh(np.array([jax.devices()[at] for at in devices]), ("tp",))


def call_on(mesh: Mesh, size: int = 4, program: Program | None = None) -> Call:
    """Return a program whose result is split among the devices of a mesh."""
    whole, split = (NamedSharding(mesh, spec) for spec in (PartitionSpec(), PartitionSpec("tp")))
    x = jax.device_put(np.arange(2 * size, dtype=np.float32), split)
    y = jax.device_put(np.float32(3), whole)
    made = program or Program(lambda x, y: (x * 2 + y, y), "tiny", (split, whole))
    return Call(f"tiny {size}", made, (x, y))


def kept_in(folder: Path, **facts: str) -> Executables:
    return Executables(folder, {**FACTS, **facts})


def stored(folder: Path, call: Call) -> Path:
    """Keep the executable of a call; return its file."""
    kept = kept_in(folder)
    kept.compile(call)
    [path] = [path for path in (folder / executables.FOLDER).rglob("*") if path.is_file()]
    return path


def values(call: Call, run: Any) -> list[float]:
    found = run(*call.args)[0]
    assert {device.id for device in found.devices()} == {device.id for device in call.args[0].devices()}
    return [float(one) for one in np.asarray(found)]


@pytest.mark.parametrize("devices", [(0,), (0, 1)])
def test_what_is_kept_runs_on_any_devices_of_the_same_number(tmp_path: Path, devices: tuple[int, ...]) -> None:
    first, other = call_on(mesh_of(*devices)), call_on(mesh_of(*(at + 3 for at in devices)))
    for _ in range(3):  # then jax's own cache has it, on disk and in memory; what was read cannot be serialized
        stored(tmp_path, first)
    for call in (first, other):
        found = kept_in(tmp_path).load(call, call.args[0].sharding.mesh.devices.flat)
        assert found is not None and values(call, found) == [2 * at + 3 for at in range(8)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "int8", "int16"])
def test_programs_of_every_number_type_are_kept(tmp_path: Path, dtype: str) -> None:
    whole = NamedSharding(mesh_of(0), PartitionSpec())
    program = Program(lambda x: (x + x, jnp.zeros(2, dtype)), "tiny", (whole, whole))
    call = Call("tiny", program, (jax.device_put(jnp.ones(2, dtype), whole),))
    stored(tmp_path, call)
    found = kept_in(tmp_path).load(call, mesh_of(0).devices.flat)
    assert found is not None and str(found(*call.args)[0].dtype) == dtype


def test_loading_traces_and_compiles_nothing(tmp_path: Path) -> None:
    call, told = call_on(mesh_of(0, 1)), list[str]()
    stored(tmp_path, call)
    jax.monitoring.register_event_duration_secs_listener(lambda event, duration, **more: told.append(event))
    found = kept_in(tmp_path).load(call, call.args[0].sharding.mesh.devices.flat)
    assert found is not None
    again = call_on(mesh_of(0, 1))
    again.program.install(again.args, found)
    assert values(again, again.program) == [2 * at + 3 for at in range(8)]
    assert [leaf.shape for leaf in again.program.results(*again.args)] == [(8,), ()]
    assert [event for event in told if "trace" in event or "compile" in event] == []


@pytest.mark.parametrize("name", [*FACTS, "new"])
def test_any_other_fact_is_a_miss(tmp_path: Path, name: str) -> None:
    call = call_on(mesh_of(0))
    stored(tmp_path, call)
    assert kept_in(tmp_path, **{name: "other"}).load(call, mesh_of(0).devices.flat) is None


def test_other_arguments_are_a_miss(tmp_path: Path) -> None:
    call, kept = call_on(mesh_of(0)), kept_in(tmp_path)
    stored(tmp_path, call)
    x, y = call.args
    for args in ((x[:4], y), (x.astype(np.int32), y), (np.asarray(x), y), (x, y, y), ([x], y)):
        assert kept.load(call._replace(args=args), mesh_of(0).devices.flat) is None
    assert kept.load(call._replace(label="other"), mesh_of(0).devices.flat) is None
    assert kept.load(call_on(mesh_of(0, 1)), mesh_of(0, 1).devices.flat) is None
    assert kept.load(call, mesh_of(0).devices.flat) is not None


@pytest.mark.parametrize(
    ("place", "name", "value"),
    [
        (executables, "sources", lambda: "changed"),
        (executables, "processor", lambda: "another"),
        (executables, "_version", lambda name: "0"),
        (executables.jax, "process_count", lambda: 2),
        (executables.sys, "version_info", (3, 99)),
    ],
)
def test_what_compilers_read_is_part_of_the_facts(
    monkeypatch: pytest.MonkeyPatch, place: Any, name: str, value: Any
) -> None:
    before = facts_of(jax.devices()[0])
    monkeypatch.setattr(place, name, value)
    assert facts_of(jax.devices()[0]) != before


def test_flags_and_settings_of_jax_are_part_of_the_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    before = facts_of(jax.devices()[0])
    for name in executables.SET:
        with monkeypatch.context() as changed:
            changed.setenv(name, "--another")
            assert facts_of(jax.devices()[0]) != before
    with jax.default_matmul_precision("highest"):
        assert facts_of(jax.devices()[0]) != before
    assert facts_of(jax.devices()[0], spec="a") != before == facts_of(jax.devices()[0])


def test_the_sources_are_all_files_that_programs_depend_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def digest() -> str:
        executables.sources.cache_clear()
        return executables.sources()

    before = digest()
    for package in ("jaxserve", "pallas_kernels"):
        folder = tmp_path / package
        folder.mkdir()
        (folder / "__init__.py").touch()
        (folder / "table.json").write_text("1")
        monkeypatch.setattr(sys.modules[package], "__file__", str(folder / "__init__.py"))
        found = {digest()}
        (folder / "table.json").write_text("2")
        found.add(digest())
        (folder / "more.py").touch()
        found.add(digest())
        (tmp_path / f"{package}-elsewhere").mkdir()
        (tmp_path / f"{package}-elsewhere" / "linked.py").write_text("1")
        (folder / "linked").symlink_to(tmp_path / f"{package}-elsewhere")
        found.add(digest())
        (tmp_path / f"{package}-elsewhere" / "linked.py").write_text("2")
        assert len({before, *found, digest()}) == 6
    executables.sources.cache_clear()


class Planted:
    """Runs a command when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def sealed(body: bytes) -> bytes:
    import hashlib
    import zlib

    packed = zlib.compress(body)
    return executables.HEAD + hashlib.sha256(packed).hexdigest().encode() + packed


@pytest.mark.parametrize("damage", ["cut", "empty", "changed", "older", "planted", "planted within"])
def test_a_wrong_entry_is_not_used_and_said_once(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    call, trap = call_on(mesh_of(0)), tmp_path / "trap"
    path = stored(tmp_path, call)
    data = path.read_bytes()
    path.write_bytes(
        {
            "cut": data[:-100],
            "empty": b"",
            "changed": data[:-1] + bytes([data[-1] ^ 1]),
            "older": data.replace(b"executable 1", b"executable 0"),
            "planted": sealed(pickle.dumps(Planted(trap))),
            "planted within": sealed(pickle.dumps((pickle.dumps(Planted(trap)), None, [0]))),
        }[damage]
    )
    kept = kept_in(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert [kept.load(call, mesh_of(0).devices.flat) for _ in range(2)] == [None, None]
    assert len(caplog.records) == 1 and str(path) in caplog.text and not trap.exists()
    kept.compile(call)
    assert kept_in(tmp_path).load(call, mesh_of(0).devices.flat) is not None


@pytest.mark.parametrize("which", ["file", "engine", "folder"])
@pytest.mark.parametrize("how", ["mode", "owner", "link"])
def test_what_another_user_may_have_written_is_not_read(
    tmp_path: Path, which: str, how: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    call = call_on(mesh_of(0))
    file = stored(tmp_path, call)
    path = {"file": file, "engine": file.parent, "folder": file.parent.parent}[which]
    if how == "mode":
        path.chmod(0o777)
    elif how == "owner":
        real = executables.not_ours
        monkeypatch.setattr(
            executables,
            "not_ours",
            lambda found: "belongs to another" if found.st_ino == path.stat().st_ino else real(found),
        )
    elif which == "file":
        pytest.skip("a link to a file of this user is opened, and the file is checked")
    else:
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    with caplog.at_level(logging.WARNING):
        assert kept_in(tmp_path).load(call, mesh_of(0).devices.flat) is None
    assert len(caplog.records) == 1


def test_a_full_disk_costs_the_next_start_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    call, kept = call_on(mesh_of(0)), kept_in(tmp_path)

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as filled, caplog.at_level(logging.WARNING):
        filled.setattr(executables, "write_whole", full)
        for _ in range(2):
            kept.compile(call)
    assert len(caplog.records) == 1 and "No space left" in caplog.text
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / executables.FOLDER).write_text("a file")
    with caplog.at_level(logging.WARNING):
        kept = kept_in(tmp_path)
    assert not kept.usable and "programs are not kept" in caplog.text
    call = call_on(mesh_of(0))
    assert values(call, kept.compile(call)) == [2 * at + 3 for at in range(8)]


def test_engines_that_have_not_started_for_long_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call = call_on(mesh_of(0))
    for number in range(5):
        kept_in(tmp_path, spec=str(number)).compile(call)
        for path in (tmp_path / executables.FOLDER).iterdir():
            os.utime(path, (path.stat().st_atime - 10, path.stat().st_mtime - 10))
    size = max(path.stat().st_size for path in (tmp_path / executables.FOLDER).rglob("*") if path.is_file())
    monkeypatch.setattr(executables, "MOST", 3 * size + size // 2)
    assert kept_in(tmp_path, spec="0").has(call), "an engine that starts keeps what it has"
    assert len(list((tmp_path / executables.FOLDER).iterdir())) == 3
    assert [kept_in(tmp_path, spec=str(number)).has(call) for number in (4, 3, 0)] == [True] * 3


def test_a_number_of_compiled_programs_is_measured_once(tmp_path: Path) -> None:
    measured: list[int] = []

    def found(**facts: str) -> int:
        return remembered(tmp_path, {**FACTS, **facts}, lambda: measured.append(1) or 7)  # type: ignore[func-returns-value]

    assert [found(), found()] == [7, 7] and len(measured) == 1
    assert found(limits="other") == 7 and len(measured) == 2
    [first, _] = (tmp_path / executables.FOLDER).glob("*.number")
    for damage in (lambda: first.write_text("x"), lambda: first.chmod(0o666)):
        damage()
        before = len(measured)
        assert {found(), found(limits="other")} == {7} and len(measured) == before + 1
    assert kept_in(tmp_path).usable, "a number is not taken for an engine"


def shipped(folder: Path, call: Call) -> tuple[Path, str]:
    """Ship the executable of a call; return the folder and the digest."""
    kept, out = kept_in(folder / "here"), folder / "out"
    kept.compile(call)
    return out, kept.ship(out)


def test_executables_of_another_machine_are_used_by_their_digest(tmp_path: Path) -> None:
    """The digest says what is in the folder, whatever its permissions are."""
    call = call_on(mesh_of(0))
    out, digest = shipped(tmp_path, call)
    for path in (out, *out.iterdir()):
        path.chmod(0o777)
    there = Executables(tmp_path / "there", FACTS, Shipped(out, digest))
    assert there.has(call) and not there.has(call_on(mesh_of(0), 8))
    found = there.load(call, mesh_of(0).devices.flat)
    assert found is not None and values(call, found) == [2 * at + 3 for at in range(8)] and there.loaded == 1


@pytest.mark.parametrize("change", ["digest", "manifest", "entry", "planted", "gone", "no manifest"])
def test_shipped_executables_that_were_changed_are_not_used(
    tmp_path: Path, change: str, caplog: pytest.LogCaptureFixture
) -> None:
    call, trap = call_on(mesh_of(0)), tmp_path / "trap"
    out, digest = shipped(tmp_path, call)
    manifest = out / MANIFEST
    [entry] = [path for path in out.iterdir() if path != manifest]
    if change in ("digest", "manifest", "no manifest"):
        if change == "digest":
            digest = "0" * 64
        elif change == "manifest":
            manifest.write_bytes(manifest.read_bytes() + b" ")
        else:
            manifest.unlink()
        with pytest.raises(InvalidValue, match="programs="):
            Shipped(out, digest)
        return
    if change == "gone":
        entry.unlink()
    else:
        entry.write_bytes(b"" if change == "entry" else sealed(pickle.dumps(Planted(trap))))
    there = Executables(tmp_path / "there", FACTS, Shipped(out, digest))
    with caplog.at_level(logging.WARNING):
        assert there.load(call, mesh_of(0).devices.flat) is None
    assert "cannot be used" in caplog.text and not trap.exists()


def test_shipped_executables_of_another_engine_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    call = call_on(mesh_of(0))
    out, digest = shipped(tmp_path, call)
    with caplog.at_level(logging.WARNING):
        other = Executables(tmp_path / "there", {**FACTS, "limits": "other", "more": "1"}, Shipped(out, digest))
    assert not other.has(call) and "for another engine (limits, more)" in caplog.text


def test_an_engine_starts_from_what_was_compiled_ahead(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {
        "model": str(tiny), "max_num_seqs": 2, "max_num_batched_tokens": 32, "max_model_len": 64,
        "kv_cache_memory": "4MiB",
    }  # fmt: skip
    flags = [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    monkeypatch.setenv("JAXSERVE_CACHE_DIR", str(tmp_path / "one"))
    out, told = tmp_path / "out", list[str]()
    monkeypatch.setattr("builtins.print", lambda *words, **_: told.append(" ".join(map(str, words))))
    assert dispatch("compile", [*flags, "--out", str(out)]) == 0
    digest = told[-1].split()[-1]
    assert dispatch("compile", [*flags, "--out", str(out)]) == 2, "the folder is not empty"
    monkeypatch.setenv("JAXSERVE_CACHE_DIR", str(tmp_path / "two"))
    before = compile_counter().traces_total
    config = ServeConfig.load(programs=str(out), digest=digest, **settings)
    built = assemble.build(config)
    assert built.ladder is not None
    counts = built.ladder.counts
    assert counts.loaded == counts.total == counts.ready > 10 and compile_counter().traces_total == before
    with pytest.raises(InvalidValue, match="digest"):
        ServeConfig.load(programs=str(out))


def test_processes_that_keep_the_same_program_at_once_keep_a_whole_one(tmp_path: Path, repo: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from tests.engine.test_executables import *; "
        "call = call_on(mesh_of(0)); kept = kept_in(Path(sys.argv[1]))\n"
        "for _ in range(50): kept.compile(call_on(mesh_of(0))); "
        "assert kept.load(call, mesh_of(0).devices.flat) is not None"
    )
    running = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], cwd=repo) for _ in range(2)]
    assert [process.wait(120) for process in running] == [0, 0]


def test_instances_have_executables_of_their_own() -> None:
    class Holder:
        def __init__(self) -> None:
            self.one = Program(lambda x, y: (x * 2 + y, y), "one", None)
            self.several = {1: self.one}
            self.name = "holder"

    holder, call = Holder(), call_on(mesh_of(0))
    mine, other = bound(holder), bound(holder)
    mine.one.install(call.args, lambda x, y: "installed")  # type: ignore[arg-type]
    assert mine.one(*call.args) == "installed" and mine.name == "holder"
    for program in (other.one, mine.several[1], holder.one):
        assert values(call, program) == [2 * at + 3 for at in range(8)]

"""The files of the disk tier: found again, checked, bounded to their own folder."""

from __future__ import annotations

import asyncio
import math
import os
import resource
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxserve.engine.memory import disk_pages
from jaxserve.engine.memory.disk_pages import DiskPages
from jaxserve.sched.api.errors import InvalidValue
from jaxserve.sched.api.kv_source import PageCopy
from jaxserve.sched.cluster.kv_tier import Stored
from tests.support.examples import examples

MODEL, SHAPES = bytes(range(16)), [(2, 2, 4, 8), (1, 2, 4, 8)]


class Plain:
    """Pages that are arrays of bytes already."""

    grain = 1

    def plain(self, page: Any) -> Any:
        return page

    def of(self, plain: Any) -> Any:
        return plain

    async def split(self, kv_buffers: Sequence[Any]) -> Any: ...

    async def join(self, pages: Sequence[Any]) -> Any: ...


def name(number: int) -> bytes:
    return number.to_bytes(16, "little")


def page(number: int) -> tuple[Any, ...]:
    return tuple(np.random.default_rng(number).integers(0, 256, shape, np.uint8) for shape in SHAPES)


def chain(count: int) -> list[Stored]:
    parents = [b"", *map(name, range(1, count))]
    return [Stored(PageCopy(name(at + 1), parents[at], 0.5 * at), page(at)) for at in range(count)]


def disk(path: Path, model: bytes = MODEL, room: float = math.inf) -> DiskPages:
    return DiskPages(path, model, SHAPES, Plain(), room)


def same(found: Any, stored: Stored) -> bool:
    return found is not None and all(map(np.array_equal, found, stored.page))


def test_pages_are_found_by_the_next_process_each_after_the_one_before_it(tmp_path: Path) -> None:
    several, one = chain(9), disk(tmp_path)
    assert list(asyncio.run(one.write(several[::-1]))) == [stored.copy.digest for stored in several[::-1]]
    one.close()
    two = disk(tmp_path)
    assert two.folder == one.folder and list(two.stored()) == [stored.copy for stored in several]
    found = asyncio.run(two.read([stored.copy.digest for stored in several]))
    assert all(map(same, found, several))
    two.close()
    other = disk(tmp_path, bytes(16))
    assert list(other.stored()) == []
    other.close()


def test_two_processes_use_folders_of_their_own(tmp_path: Path) -> None:
    one, two = disk(tmp_path), disk(tmp_path)
    asyncio.run(one.write(chain(2)))
    assert one.folder != two.folder and list(two.stored()) == [] and asyncio.run(two.read([name(1)])) == [None]
    two.take(name(1))
    two.close()
    assert same(asyncio.run(one.read([name(1)]))[0], chain(1)[0])
    one.close()


def test_files_of_others_stay_and_unfinished_ones_go(tmp_path: Path) -> None:
    one = disk(tmp_path)
    for other in ("notes.txt", name(7).hex() + ".part", name(8).hex()):
        (one.folder / other).write_text("x")
    assert list(one.stored()) == []
    assert sorted(path.name for path in one.folder.iterdir()) == ["lock", "notes.txt"]
    one.close()


@given(at=st.integers(0, 10_000), bit=st.integers(0, 7), cut=st.none() | st.integers(0, 300))
@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_file_is_a_missing_page(tmp_path: Path, at: int, bit: int, cut: int | None) -> None:
    """Any bit of it but those of the cost, which decides only what is evicted."""
    one, (stored,) = disk(tmp_path), chain(1)
    asyncio.run(one.write([stored]))
    path = one.folder / name(1).hex()
    data = bytearray(path.read_bytes())
    place = at % len(data)
    data[place] ^= 1 << bit
    path.write_bytes(data if cut is None else data[:cut])
    found = asyncio.run(one.read([name(1)]))[0]
    assert found is None or (cut is None and 80 <= place < 88 and same(found, stored))
    one.close()


@settings(max_examples=examples(30), suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(parents=st.lists(st.integers(0, 6), min_size=1, max_size=6))
def test_pages_that_name_each_other_as_the_page_before_are_none(tmp_path_factory: Any, parents: list[int]) -> None:
    """Whatever the files say: a start ends, and each page comes after the one before it, if that is there."""
    folder = tmp_path_factory.mktemp("disk")
    pages = [
        Stored(PageCopy(name(at + 1), (parent and name(parent)) or b"", 1.0), page(at))
        for at, parent in enumerate(parents)
    ]
    medium = disk(folder)
    assert len(asyncio.run(medium.write(pages))) == len(pages)
    medium.close()
    medium = disk(folder)
    seen = [copy.digest for copy in medium.stored()]
    medium.close()

    def rooted(number: int, left: int = 6) -> bool:
        parent = parents[number - 1]
        return not 1 <= parent <= len(parents) or (left > 0 and rooted(parent, left - 1))

    assert {name(at + 1) for at in range(len(parents)) if rooted(at + 1)} <= set(seen) and len(set(seen)) == len(seen)
    for at, digest in enumerate(seen):
        parent = parents[int.from_bytes(digest, "little") - 1]
        assert name(parent) not in seen[at:], "a page came before the page before it"


def test_a_folder_that_others_can_write_is_refused(tmp_path: Path) -> None:
    disk(tmp_path).close()
    used = tmp_path / MODEL.hex()
    used.chmod(0o777)
    with pytest.raises(InvalidValue, match=r"kv_disk='.*' cannot be used: .* can be written by others \(mode 777\)"):
        disk(tmp_path)
    used.chmod(0o700)
    tmp_path.chmod(0o777)
    with pytest.raises(InvalidValue, match="can be written by others"):
        disk(tmp_path)
    tmp_path.chmod(0o1777)  # as /tmp: other users cannot replace these folders
    disk(tmp_path).close()


def test_a_lock_that_is_a_link_is_refused_and_its_target_stays(tmp_path: Path) -> None:
    disk(tmp_path).close()
    precious, lock = tmp_path / "precious", tmp_path / MODEL.hex() / "0" / "lock"
    precious.write_text("data")
    lock.unlink()
    lock.symlink_to(precious)
    with pytest.raises(InvalidValue, match="kv_disk"):
        disk(tmp_path)
    assert precious.read_text() == "data"


def test_a_full_disk_is_a_page_that_was_not_written(tmp_path: Path) -> None:
    one = disk(tmp_path)
    one.folder.chmod(0o500)
    (one.folder / f"{name(1).hex()}.part").mkdir() if _root(one.folder) else None
    assert list(asyncio.run(one.write(chain(1)))) == []
    one.folder.chmod(0o700)
    one.close()


def test_a_disk_that_stays_full_is_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one = disk(tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        for _ in range(2):
            assert list(asyncio.run(one.write(chain(4)))) == []
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caplog.text.count("cannot be written") == 1 and sorted(os.listdir(one.folder)) == ["lock"]
    assert len(asyncio.run(one.write(chain(4)))) == 4
    one.close()


def left_by(path: Path, model: int, age: int) -> Path:
    """Leave 4 pages of a model, used some seconds ago."""
    other = disk(path, name(model))
    asyncio.run(other.write(chain(4)))
    other.close()
    os.utime(other.folder, (1e9 - age, 1e9 - age))
    return other.folder


def test_what_other_models_have_left_goes_where_it_does_not_fit(tmp_path: Path) -> None:
    older, newer = left_by(tmp_path, 100, age=1), left_by(tmp_path, 101, age=0)
    roomy = disk(tmp_path, room=1e9)
    asyncio.run(roomy.write(chain(4)))
    assert older.exists() and newer.exists()
    roomy.close()
    one = disk(tmp_path, room=10 * roomy.page_bytes)  # 4 pages are its own
    asyncio.run(one.write([]))
    one._writer.submit(lambda: None).result()
    assert not older.parent.exists() and len(os.listdir(newer)) == 5, "the least recently used first"
    asyncio.run(one.write([Stored(PageCopy(name(9 + at), b"", 0.0), page(at)) for at in range(3)]))
    assert not newer.parent.exists(), "7 pages and 4 are more than 10"
    assert len(list(one.stored())) == 7
    one.close()


def test_nothing_else_is_removed(tmp_path: Path) -> None:
    used = disk(tmp_path, name(100))
    asyncio.run(used.write(chain(4)))
    foreign, linked, mixed = (left_by(tmp_path, model, age=9) for model in (101, 102, 103))
    foreign.chmod(0o722)
    target = tmp_path / "target"
    linked.parent.rename(target)
    linked.parent.symlink_to(target)
    (mixed / "mine.txt").write_text("data")
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / name(1).hex()).write_text("data")
    two = disk(tmp_path)
    same = disk(tmp_path)  # of the same model: it may be of a replica that has not started yet
    asyncio.run(two.write(chain(4)))
    two.close()
    one = disk(tmp_path, room=1)
    asyncio.run(one.write(chain(1)))
    assert len(os.listdir(used.folder)) == len(os.listdir(foreign)) == len(os.listdir(target / "0")) == 5
    assert os.listdir(mixed) == ["mine.txt"] and len(os.listdir(precious)) == 1
    for each in (used, same, one):
        each.close()


def test_a_folder_that_is_removed_as_it_is_claimed_is_not_shared(tmp_path: Path) -> None:
    """A lock that was unlinked between its opening and its locking is that of no folder."""
    folder = left_by(tmp_path, 100, age=0)
    real = disk_pages.fcntl.flock
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk_pages.fcntl, "flock", lambda lock, how: ((folder / "lock").unlink(), real(lock, how)))
        assert disk_pages._locked(folder) is None


def _root(folder: Path) -> bool:
    """Return whether permissions do not hold, as for root, so that only a folder in the way stops a file."""
    try:
        (folder / "probe").touch()
    except OSError:
        return False
    (folder / "probe").unlink()
    return True

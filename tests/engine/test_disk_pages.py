"""The files of the disk tier: found again, checked, bounded to their own folder."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxserve.engine.memory.disk_pages import DiskPages
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


def disk(path: Path, model: bytes = MODEL) -> DiskPages:
    return DiskPages(path, model, SHAPES, Plain())


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


def test_a_full_disk_is_a_page_that_was_not_written(tmp_path: Path) -> None:
    one = disk(tmp_path)
    one.folder.chmod(0o500)
    (one.folder / f"{name(1).hex()}.part").mkdir() if _root(one.folder) else None
    assert list(asyncio.run(one.write(chain(1)))) == []
    one.folder.chmod(0o700)
    one.close()


def _root(folder: Path) -> bool:
    """Return whether permissions do not hold, as for root, so that only a folder in the way stops a file."""
    try:
        (folder / "probe").touch()
    except OSError:
        return False
    (folder / "probe").unlink()
    return True

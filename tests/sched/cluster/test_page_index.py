"""Laws of the eviction order of a KV tier."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.sched.cluster.page_index import PageIndex
from tests.support.examples import examples

PROMPTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple), min_size=1, max_size=30)


def pages(prompt: tuple[int, ...]) -> list[bytes]:
    return [bytes(prompt[: end + 1]) for end in range(len(prompt))]


def put(index: PageIndex, prompt: tuple[int, ...], cost: float = 1.0) -> list[bytes]:
    """Use the pages of a prompt that are there, add the others, and return what was evicted."""
    digests, evicted = pages(prompt), []
    found = index.match(digests)
    index.use(digests[:found])
    for at in range(found, len(digests)):
        parent = digests[at - 1] if at else b""
        while not index.add(digests[at], parent, cost):
            least = index.evict(parent)
            if least is None:
                return evicted
            evicted.append(least[0])
        index.written(digests[at])
    return evicted


@given(prompts=PROMPTS, capacity=st.integers(1, 12))
@settings(max_examples=examples(100))
def test_no_page_outlives_the_pages_before_it(prompts, capacity) -> None:  # type: ignore[no-untyped-def]
    index, known = PageIndex(capacity), set()
    for prompt in prompts:
        known |= set(pages(prompt))
        known -= set(put(index, prompt))
        assert len(index) <= capacity
        held = {digest for digest in known if digest in index}
        assert len(held) == len(index)
        assert all(index.match(pages(tuple(digest))) == len(digest) for digest in held)
    assert sorted(index.clear()) == sorted(held) and len(index) == 0


@given(prompts=PROMPTS, capacity=st.integers(1, 12))
@settings(max_examples=examples(100))
def test_ranked_pages_come_after_the_pages_before_them(prompts, capacity) -> None:  # type: ignore[no-untyped-def]
    index = PageIndex(capacity)
    for prompt in prompts:
        put(index, prompt)
    ranked = [digest for digest, _ in index.ranked()]
    assert sorted(ranked) == sorted(set(ranked)) and len(ranked) == len(index)
    for at, digest in enumerate(ranked):
        assert len(digest) == 1 or digest[:-1] in ranked[:at]


def test_the_most_valuable_page_is_ranked_first() -> None:
    index = PageIndex(4)
    for name, cost in ((1, 1.0), (2, 9.0), (3, 5.0)):
        put(index, (name,), cost)
    put(index, (1, 7), 20.0)
    assert [digest for digest, _ in index.ranked()] == [bytes([1]), bytes([1, 7]), bytes([2]), bytes([3])]


def test_the_least_recently_used_of_equals_is_evicted_first() -> None:
    index = PageIndex(3)
    for name in (1, 2, 3):
        put(index, (name,))
    index.use([bytes([1])])
    index.use([bytes([2])])
    index.use([bytes([3])])
    assert put(index, (4,)) == [bytes([1])] and put(index, (5,)) == [bytes([2])]


def test_pages_that_are_not_used_any_more_are_evicted_however_often_they_were_used() -> None:
    index = PageIndex(2)
    put(index, (1,))
    for _ in range(9):
        index.use([bytes([1])])
    evicted = [digest for name in range(2, 40) for digest in put(index, (name,))]
    assert bytes([1]) in evicted


def test_a_page_that_is_being_written_is_neither_found_nor_evicted() -> None:
    index = PageIndex(1)
    assert index.add(b"a", b"", 1.0) and b"a" in index
    assert index.match([b"a"]) == 0 and index.evict() is None and not index.add(b"b", b"", 1.0)
    index.written(b"a")
    assert index.match([b"a"]) == 1 and not index.add(b"b", b"", 1.0)
    least = index.evict()
    assert least is not None and least[0] == b"a" and index.add(b"b", b"", 1.0)


def test_the_heap_stays_small_under_use() -> None:
    index = PageIndex(10)
    for name in range(10):
        put(index, (name,))
    for turn in range(10_000):
        index.use([bytes([turn % 10])])
    assert len(index._heap) < 200

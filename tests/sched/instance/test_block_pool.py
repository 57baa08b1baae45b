"""Pages are conserved under any operations, and a prefix is found exactly if its content is in the pool."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule

from jaxserve.sched.api.errors import InvalidValue
from jaxserve.sched.instance.block_pool import BlockPool, chain
from tests.support.examples import examples

SIZE = 2


class Pool(RuleBasedStateMachine):
    """A state machine that allocates, releases and evicts pages beside a simple model of their holders."""

    holders = Bundle("holders")

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockPool(12, SIZE)
        self.owned: dict[int, list[int]] = {}
        self.content: dict[int, bytes] = {}  # content that each page was last filled with
        self.count = 0

    @rule(target=holders, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=10), reserve=st.integers(0, 3))
    def take(self, tokens: list[int], reserve: int):  # type: ignore[no-untyped-def]
        digests, parents, parent = [], {}, b""
        for page in range(len(tokens) // SIZE):
            digest = chain(parent, tokens[page * SIZE : (page + 1) * SIZE])
            parents[digest] = parent
            parent = digest
            digests.append(digest)
        hits = digests[: self.blocks.match(digests)]
        before = self.blocks.available
        pages = self.blocks.take(hits, self.blocks.count(len(tokens)) - len(hits), reserve)
        if pages is None:
            assert self.blocks.available == before
            return multiple()
        assert self.blocks.available >= reserve
        for page, digest in zip(pages, hits, strict=False):
            assert self.content[page] == digest, "a hit must hold the requested content"
        for page, digest in list(zip(pages, digests, strict=False))[len(hits) :]:
            self.content[page] = digest
            self.blocks.register(page, digest, parents[digest])
        for page in pages[len(digests) :]:
            self.content[page] = b"partial"
        self.count += 1
        self.owned[self.count] = pages
        return self.count

    @rule(holder=holders)
    def release(self, holder: int) -> None:
        self.blocks.release(self.owned.pop(holder, []))

    @rule()
    def forget(self) -> None:
        available = self.blocks.available
        self.blocks.forget_idle()
        assert self.blocks.available == available
        assert set(self.blocks._page.values()) <= {page for pages in self.owned.values() for page in pages}

    @invariant()
    def conserved(self) -> None:
        self.blocks.check(self.owned.values())
        assert self.blocks.held == len({page for pages in self.owned.values() for page in pages})


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=examples(60), stateful_step_count=40)


def test_the_least_recently_used_page_goes_first() -> None:
    blocks = BlockPool(2, 1)
    for token in (1, 2):
        pages = blocks.take((), 1)
        assert pages is not None
        blocks.register(pages[0], chain(b"", [token]), b"")
        blocks.release(pages)
    blocks.take((), 1)
    assert blocks.match([chain(b"", [1])]) == 0 and blocks.match([chain(b"", [2])]) == 1


def test_a_digest_covers_the_whole_prefix() -> None:
    assert chain(chain(b"", [1]), [2]) != chain(chain(b"", [3]), [2])
    assert chain(b"", [1, 2]) != chain(b"salt", [1, 2])


def test_releasing_twice_is_detected() -> None:
    blocks = BlockPool(2, 1)
    pages = blocks.take((), 1)
    assert pages is not None
    blocks.release(pages)
    with pytest.raises(AssertionError, match="more often than held"):
        blocks.release(pages)


def test_an_empty_pool_is_refused() -> None:
    with pytest.raises(InvalidValue, match="pages=0"):
        BlockPool(0, 16)

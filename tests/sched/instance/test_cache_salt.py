"""Pages are shared only between requests with the same salt, so that clients learn nothing of other prompts."""

from __future__ import annotations

import pytest

from jaxserve.sched.api.new_request import NewRequest
from jaxserve.sched.api.params import SamplingParams
from jaxserve.sched.api.request import Request
from jaxserve.sched.api.slo import NO_SLO
from jaxserve.sched.instance.block_pool import BlockPool
from jaxserve.sched.instance.kv_manager import KVManager

PROMPT = tuple(range(64))


def request(id: int, salt: bytes) -> Request:
    return Request(id, NewRequest(PROMPT, SamplingParams(), NO_SLO, salt=salt), 0.0)


@pytest.mark.parametrize("salt", [b"", b"red" * 4])
def test_pages_are_found_with_the_same_salt_only(salt):
    memory = KVManager(BlockPool(64, 16), 4)
    first = request(0, salt)
    assert memory.admit(first, 0) and first.computed == 0
    memory.register(first, 0, 64)
    memory.vacate(first)
    same, other, third = request(1, salt), request(2, b"blue" * 4), request(3, b"red" * 4 + b"\0")
    assert len(memory.cached(same)) == 3, "the last page must be computed, since it samples"
    assert memory.cached(other) == memory.cached(third) == []
    assert memory.admit(other, 0) and other.computed == other.cached == 0
    assert memory.admit(same, 0) and same.computed == same.cached == 48
    assert not set(other.pages) & set(same.pages)

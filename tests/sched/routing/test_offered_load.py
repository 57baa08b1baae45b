"""The load that prompts offer, by which `unified` changes roles: it follows a change within the time of its prompts."""

from __future__ import annotations

import pytest

from jaxserve.sched.routing.unified import _Lately


def test_the_offered_load_follows_a_change() -> None:
    """One prompt of 0.1 s a minute for an hour, then ten a second, then none; 256 decode at a time."""
    load, now = _Lately(), 1e5
    assert load.at(now) == 0.0
    for _ in range(60):
        load.add(0.1, now := now + 60.0, 256)
    assert load.at(now) < 0.01
    for _ in range(20):
        load.add(0.1, now := now + 0.1, 256)
    assert load.at(now) == pytest.approx(1.0)
    for _ in range(2000):
        load.add(0.1, now := now + 0.1, 256)
    assert load.at(now) == pytest.approx(1.0) and len(load._prompts) == 256
    assert load.at(now + 25.6) < 0.6 and load.at(now + 100.0) < 0.25


def test_prompts_at_one_time_offer_nothing_yet() -> None:
    load = _Lately()
    for _ in range(2):
        load.add(0.1, 5.0, 8)
    assert load.at(5.0) == 0.0
    assert load.at(5.1) == pytest.approx(1.0)

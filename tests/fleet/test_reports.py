"""A snapshot survives its message, and a front that reads the news of an instance knows what the instance has."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.fleet.reports import Feed, InstanceReport, Receiver, report_of, update_of
from jaxserve.sched.api.policy import Role
from jaxserve.sched.instance.scheduler import Scheduler
from jaxserve.sched.routing.prefix_index import KEPT
from jaxserve.sched.routing.snapshot import COLUMNS, Rows, Snapshot
from jaxserve.wire.connection import encode
from tests.support.examples import examples
from tests.support.sched.fleet import instance, request
from tests.support.sched.loaded import instances


def sent(report: InstanceReport) -> InstanceReport:
    return msgspec.msgpack.decode(encode(report), type=InstanceReport)


def plain(one: Snapshot) -> dict[str, Any]:
    """Return the values of a snapshot without those that a report has once, or the receiver adds."""
    made: dict[str, Any] = {}
    for each in fields(one):
        value = getattr(one, each.name)
        if isinstance(value, Rows):
            value = value.standard, {name: getattr(value, name).tolist() for name in COLUMNS}
        made[each.name] = repr(value)
    del made["hits"], made["perf"]
    return made


@given(one=instances(st.sampled_from(Role)), identify=st.booleans())
@settings(max_examples=examples(60), deadline=None)
def test_a_snapshot_survives_its_message(one: Scheduler, identify: bool) -> None:
    taken = Snapshot.of(one, 0.0, identify=identify)
    found = update_of(sent(report_of(0, taken)), one.limits, one.perf)
    assert plain(found.snapshot) == plain(taken)


def test_a_feed_tells_what_changed_and_a_receiver_keeps_the_rest() -> None:
    one = instance(Role.MIXED)
    feed, receiver = Feed(0, one), Receiver([one.limits])
    assert feed.news(0.0) is None, "no front follows"
    feed.follow(True)
    [whole] = receiver.read([sent(feed.whole(0.0))]).values()
    assert whole.anew and not whole.gained
    first = feed.news(0.0)
    assert first is not None and first.perf is not None and feed.news(0.0) is None
    one.add(request(1, 40))
    assert one.plan(0.0, 0.0) is not None
    news = feed.news(1.0)
    assert news is not None and news.perf is None
    [update] = receiver.read([sent(news)]).values()
    assert update.snapshot.running == 1 and update.snapshot.perf is whole.snapshot.perf and not update.anew
    one.recover()
    again = feed.news(2.0)
    assert again is not None and again.anew, "the pool was rebuilt"
    feed.follow(False)
    one.add(request(2, 40))
    assert feed.news(3.0) is None


def test_cache_events_are_digests_of_the_same_chain() -> None:
    one = instance(Role.MIXED)
    page, digest = one.blocks.take((), 1), bytes(range(16))
    assert page is not None
    one.blocks.register(page[0], digest, b"")
    assert Receiver([one.limits]).read([Feed(0, one).whole(0.0)])[0].gained == [digest[:KEPT]]


def test_a_report_of_an_unknown_instance_is_refused() -> None:
    one = instance(Role.MIXED)
    report = report_of(1, Snapshot.of(one, 0.0))
    for limits in ([one.limits], [one.limits] * 2):
        with pytest.raises(ValueError, match="a report of instance 1 before"):
            Receiver(limits).read([report])

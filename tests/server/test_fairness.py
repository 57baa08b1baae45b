"""Client limits and the order of clients under overload, counting a request with n outputs as n requests."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest

from jaxserve.config import ServeConfig
from jaxserve.errors import InvalidValue, QueueFull
from jaxserve.server.failures import Refused
from jaxserve.server.fairness import BURST, Stage
from jaxserve.server.limits import ClientLimits, ClientLimitsFile, load_limits
from tests.support.timing import until

NAMES = ("red", "blue", "green")


def stage(window: int = 4, bound: int = 1000, *, names: tuple[str, ...] = NAMES, **limits: ClientLimits) -> Stage:
    return Stage(ClientLimitsFile(keys=limits), names, window=window, bound=bound)


async def served(made: Stage, asked: list[tuple[str, int]]) -> list[str]:
    """Return the order of admission if all clients ask at once and each admitted request ends at once."""
    order: list[str] = []
    async with AsyncExitStack() as full:
        window = made._window or 0
        holder = await full.enter_async_context(made.admitted(NAMES[-1], window, 0))  # until all have asked

        async def one(name: str, outputs: int) -> None:
            async with made.admitted(name, outputs, 0):
                order.append(name)
                await asyncio.sleep(0)

        tasks = [asyncio.ensure_future(one(*ask)) for ask in asked]
        await asyncio.sleep(0.01)
        assert not order and holder.inside == window
    await asyncio.gather(*tasks)
    assert all(not client.inside and not client.queue for client in made.clients.values())
    return order


def test_a_flood_does_not_delay_another_client():
    order = asyncio.run(served(stage(window=1), [("red", 1)] * 50 + [("blue", 1)] * 5))
    assert Counter(order) == {"red": 50, "blue": 5}
    assert Counter(order[:10]) == {"red": 5, "blue": 5}


def test_outputs_count_not_http_requests():
    order = asyncio.run(served(stage(window=1), [("red", 10)] * 10 + [("blue", 1)] * 40))
    assert Counter(order[:22])["red"] in (1, 2), "10 outputs of red per 10 of blue"


def test_weights_share_the_engine():
    made = stage(window=1, red=ClientLimits(weight=3.0))
    order = asyncio.run(served(made, [("blue", 1)] * 40 + [("red", 1)] * 40))
    assert Counter(order[:40])["red"] == pytest.approx(30, abs=2)


def test_a_request_larger_than_the_window_is_served():
    assert asyncio.run(served(stage(window=2, bound=2000), [("red", 1000), ("blue", 1)])) == ["blue", "red"]


def test_a_single_client_is_never_delayed():
    async def main() -> None:
        made = stage(window=1, names=())
        async with AsyncExitStack() as all_of_them:
            for _ in range(100):
                await asyncio.wait_for(all_of_them.enter_async_context(made.admitted("", 1, 5)), 1)

    asyncio.run(main())


def test_concurrency_delays_and_the_queue_share_refuses():
    async def main() -> None:
        made = stage(
            window=100,
            bound=10,
            red=ClientLimits(max_concurrency=2, queue_share=0.3),
            blue=ClientLimits(max_concurrency=1),
        )
        with pytest.raises(InvalidValue, match="3 outputs; this API key may run at most 2"):
            async with made.admitted("red", 3, 0):
                pass
        async with made.admitted("red", 2, 0), made.admitted("blue", 1, 0):
            waits = [asyncio.ensure_future(made.admitted("red", 1, 0).__aenter__()) for _ in range(3)]
            await asyncio.sleep(0)
            with pytest.raises(Refused, match="30% of the queue") as refused:
                await made.admitted("red", 1, 0).__aenter__()
            assert (refused.value.status, refused.value.code) == (429, "queue_share")
            waits += [asyncio.ensure_future(made.admitted("blue", 1, 0).__aenter__()) for _ in range(7)]
            await asyncio.sleep(0)
            with pytest.raises(QueueFull, match="the limit is 10"):
                await made.admitted("blue", 1, 0).__aenter__()
            async with made.admitted("green", 1, 0):
                assert not any(wait.done() for wait in waits)
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
        assert all(not client.inside and not client.queue for client in made.clients.values())
        assert made.clients["red"].refused == {"queue_share": 1} and made.clients["blue"].refused == {"queue_full": 1}

    asyncio.run(main())


def test_a_full_queue_still_admits_other_clients():
    async def main() -> None:
        made = stage(window=1, bound=30)
        async with made.admitted("green", 1, 0):
            waits = [asyncio.ensure_future(made.admitted("red", 1, 0).__aenter__()) for _ in range(30)]
            await asyncio.sleep(0)
            with pytest.raises(QueueFull):
                await made.admitted("red", 1, 0).__aenter__()
            waits += [asyncio.ensure_future(made.admitted("blue", 1, 0).__aenter__()) for _ in range(10)]
            await asyncio.sleep(0)
            assert made.clients["blue"].waiting == 10
            with pytest.raises(QueueFull):
                await made.admitted("blue", 1, 0).__aenter__()
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    asyncio.run(main())


def test_a_token_rate_is_an_average():
    async def main() -> None:
        clock = 0.0
        file = ClientLimitsFile(keys={"red": ClientLimits(tokens_per_second=10.0)})
        made = Stage(file, NAMES, window=4, bound=4, now=lambda: clock)
        async with made.admitted("red", 1, 60) as client:
            client.use("generation", 70)  # more than the burst: running requests are not cut
        with pytest.raises(Refused) as refused:
            await made.admitted("red", 1, 1).__aenter__()
        assert (refused.value.status, refused.value.code) == (429, "token_rate")
        assert refused.value.retry_after == pytest.approx(3.1)
        clock += refused.value.retry_after
        async with made.admitted("red", 1, 0), made.admitted("blue", 1, 1000):
            pass
        clock += 1000.0
        made.clients["red"].wait_for_tokens(clock)
        assert made.clients["red"]._level == 10.0 * BURST

    asyncio.run(main())


def test_cancelling_while_waiting_loses_nothing():
    async def main() -> None:
        made = stage(window=1)
        for _ in range(20):
            async with made.admitted("red", 1, 0):
                waits = [asyncio.ensure_future(made.admitted("blue", 1, 0).__aenter__()) for _ in range(3)]
                await asyncio.sleep(0)
                waits[1].cancel()
                await asyncio.sleep(0)
            waits[0].cancel()  # admitted at the same moment
            waits[2].cancel()
            await asyncio.gather(*waits, return_exceptions=True)
            assert all(not client.inside and not client.queue for client in made.clients.values())

    asyncio.run(main())


def test_a_request_waits_no_longer_than_the_queue_timeout():
    async def main() -> None:
        made = Stage(ClientLimitsFile(), NAMES, window=1, bound=4, timeout=0.05)
        async with made.admitted("red", 1, 0):
            with pytest.raises(Refused, match=r"within 0\.05 s") as refused:
                await made.admitted("blue", 1, 0).__aenter__()
        assert refused.value.status == 503 and not made.clients["blue"].queue

    asyncio.run(main())


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("keys: {white: {}}", "no API key is called 'white'"),
        ("keys: {red: {weight: 0}}", "weight"),
        ("keys: {red: {max_concurrency: 0}}", "max_concurrency"),
        ("keys: {red: {queue_share: 2}}", "0 to 1"),
        ("keys: {red: {wieght: 1}}", "wieght"),
        ("default: {tokens_per_second: -1}", "tokens_per_second"),
    ],
)
def test_an_invalid_limits_file_is_refused(tmp_path, text, says):
    (tmp_path / "limits.yaml").write_text(text)
    with pytest.raises(InvalidValue, match=says):
        load_limits(ServeConfig.load(limits=str(tmp_path / "limits.yaml")), NAMES)
    with pytest.raises(InvalidValue, match="does not exist"):
        load_limits(ServeConfig.load(limits=str(tmp_path / "none")), NAMES)


@pytest.fixture
def limited(fake, tmp_path):
    """A factory of servers with keys `red` and `blue`, and limits."""

    def start(limits: str, **more: Any) -> Any:
        (tmp_path / "keys").write_text("red sk-red\nblue sk-blue\n")
        (tmp_path / "limits").write_text(limits)
        config = {"api_key_file": str(tmp_path / "keys"), "limits": str(tmp_path / "limits"), **more.pop("config", {})}
        return fake(config=config, **more)

    return start


def ask(live: Any, key: str, **body: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer sk-{key}"}
    answer: httpx.Response = live.http.post(
        "/v1/completions", json={"prompt": [5], "max_tokens": 2, **body}, headers=headers
    )
    return answer


def test_keys_grant_the_right_to_set_priority_and_tiers(limited):
    live = limited("default: {priority: false, tiers: [batch]}\nkeys: {blue: {}}")
    for key, body, status in (
        ("red", {}, 200), ("red", {"service_tier": "batch"}, 200), ("blue", {"priority": -5}, 200),
        ("blue", {"service_tier": "interactive"}, 200), ("red", {"priority": 0}, 403),
        ("red", {"service_tier": "interactive"}, 403),
    ):  # fmt: skip
        answer = ask(live, key, **body)
        assert answer.status_code == status, (key, body, answer.text)
        assert status == 200 or answer.json()["error"]["code"] == "not_allowed"


def test_under_overload_another_client_is_served_at_once(limited):
    """One client sends 40 requests and a request with n=40 before another client's single one; one runs at a time."""
    live = limited("{}", delay=0.02, config={"max_num_seqs": 1, "max_num_queued_reqs": 200})
    flood = [threading.Thread(target=ask, args=(live, "red"), kwargs={"max_tokens": 4}) for _ in range(40)]
    flood.append(threading.Thread(target=ask, args=(live, "red"), kwargs={"n": 4, "max_tokens": 4}))
    for one in flood:
        one.start()
    until(lambda: live.service.stage.clients["red"].waiting >= 30)
    done = len([one for one in live.engine.submitted if one.finish_reason])
    assert ask(live, "blue").status_code == 200
    assert len([one for one in live.engine.submitted if one.finish_reason]) - done < 15
    blue = next(one for one in live.engine.submitted if one.params.max_tokens == 2)
    assert blue.first_token_at - blue.arrival >= 0.02, "waiting for admission counts in TTFT"
    for one in flood:
        one.join(60)
    assert live.service.active == 0 and all(not one.inside for one in live.service.stage.clients.values())
    page = live.http.get("/metrics").text
    assert 'jaxserve:client_requests_total{api_key="red",model_name="jaxserve-demo"} 44.0' in page
    assert 'jaxserve:client_tokens_total{api_key="blue",kind="generation",model_name="jaxserve-demo"} 2.0' in page


def test_a_client_that_leaves_while_waiting_frees_its_place(limited):
    live = limited("keys: {red: {max_concurrency: 1}}", delay=0.2)
    first = threading.Thread(target=ask, args=(live, "red"), kwargs={"max_tokens": 5})
    first.start()
    while not live.engine.submitted:
        time.sleep(0.01)
    with pytest.raises(httpx.ReadTimeout):
        live.http.post(
            "/v1/completions", json={"prompt": [5]}, headers={"Authorization": "Bearer sk-red"},
            timeout=httpx.Timeout(5, read=0.1),
        )  # fmt: skip
    until(lambda: not live.service.stage.clients["red"].waiting)
    first.join(20)
    assert len(live.engine.submitted) == 1

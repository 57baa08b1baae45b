"""Generation of several outputs: submitted together, and cancelled if no reader is left."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.errors import QueueFull
from jaxserve.generation.generate import TOGETHER, Mailbox, Submission, Unread, pieces, submit_all
from jaxserve.sched.api.new_request import NewRequest
from jaxserve.sched.api.params import SamplingParams
from jaxserve.sched.api.plan import Delta
from jaxserve.sched.api.slo import SLO
from jaxserve.tokenizer import Tokenizer
from tests.support.examples import examples
from tests.support.server.double import Double

JOB = Submission(NewRequest([5, 6, 7], SamplingParams(max_tokens=200, n=3, ignore_eos=True), SLO()))


@pytest.mark.parametrize("bound", [0, 1, 2])
def test_if_one_output_is_refused_the_others_are_cancelled(tokenizer: Tokenizer, bound: int) -> None:
    engine = Double(bound=bound, delay=0.01)
    with pytest.raises(QueueFull):
        submit_all(engine, tokenizer, JOB, lambda choice, delta: None)
    assert engine.cancelled == dict.fromkeys(range(bound), "abort")


@pytest.mark.parametrize("by_task", [False, True])
def test_closing_or_cancelling_a_stream_cancels_unfinished_outputs(tokenizer: Tokenizer, by_task: bool) -> None:
    engine = Double(delay=0.01)

    async def main() -> None:
        stream = pieces(engine, tokenizer, JOB, Mailbox(asyncio.get_running_loop()))
        await anext(stream)
        if not by_task:
            await stream.aclose()
            return

        async def read() -> None:
            async for _ in stream:
                pass

        task = asyncio.ensure_future(read())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(main())
    assert engine.cancelled == dict.fromkeys(range(3), "abort")


def test_other_streams_go_on_while_many_outputs_are_submitted(tokenizer: Tokenizer) -> None:
    count, turns = 5 * TOGETHER, list[int]()

    class Slow(Double):
        def submit(self, new: NewRequest, on_delta: Callable[[Delta], None]) -> int:
            turns.append(0)
            return super().submit(new, on_delta)

    async def other() -> None:
        while True:
            turns.append(1)
            await asyncio.sleep(0)

    async def main() -> None:
        job = replace(JOB, request=replace(JOB.request, params=replace(JOB.request.params, n=count, max_tokens=1)))
        task = asyncio.ensure_future(other())
        async for _ in pieces(Slow(bound=count), tokenizer, job, Mailbox(asyncio.get_running_loop())):
            pass
        task.cancel()

    asyncio.run(main())
    assert turns.count(0) == count
    together = "".join(map(str, turns)).strip("1").split("1")
    assert max(map(len, together)) == TOGETHER


def test_finished_outputs_are_not_cancelled(tokenizer: Tokenizer) -> None:
    engine = Double()
    job = replace(JOB, request=replace(JOB.request, params=replace(JOB.request.params, max_tokens=2)))

    async def main() -> None:
        stream = pieces(engine, tokenizer, job, Mailbox(asyncio.get_running_loop()))
        assert sum([piece.finish_reason == "length" async for piece in stream]) == 3

    asyncio.run(main())
    assert engine.cancelled == {}


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), max_size=20), st.data())
def test_a_reader_that_falls_behind_gets_all_tokens_in_order(said: list[tuple[int, int]], data: st.DataObject) -> None:
    async def main() -> list[tuple[int, Delta]]:
        loop = asyncio.get_running_loop()
        mailbox, unread = Mailbox(loop), Unread(loop)
        choices: list[Any] = [object() for _ in range(3)]
        read: list[tuple[int, Delta]] = []
        for at, (which, tokens) in enumerate([*said, *((which, 1) for which in range(3))]):
            end = "length" if at >= len(said) else None
            mailbox.post(unread, (choices[which], Delta(which, tuple(range(at, at + tokens)), finish_reason=end)))
            if data.draw(st.booleans()) or at == len(said) + 2:
                read += [(choices.index(choice), delta) for choice, delta in await unread.take()]
        return read

    read = asyncio.run(main())
    for which in range(3):
        mine = [delta for choice, delta in read if choice == which]
        sent = [token for at, (of, n) in enumerate(said) if of == which for token in range(at, at + n)]
        assert [token for delta in mine for token in delta.tokens] == [*sent, len(said) + which]
        assert [delta.finish_reason for delta in mine] == [None] * (len(mine) - 1) + ["length"]

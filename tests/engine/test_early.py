"""An engine answers once its first programs can compute anything; the tokens are those of all programs."""

from __future__ import annotations

import asyncio
import io
import queue
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jaxserve.config import ServeConfig
from jaxserve.engine.engine import Engine
from jaxserve.engine.programs.inputs import Bucket, InputBuilder, Limits
from jaxserve.engine.runtime.executor import JaxExecutor
from jaxserve.engine.startup import assemble, warmup
from jaxserve.engine.startup.calls import Rung
from jaxserve.engine.startup.compiled import compile_counter
from jaxserve.engine.startup.warmup import Ladder
from jaxserve.sched.api.new_request import NewRequest
from jaxserve.sched.api.params import SamplingParams
from jaxserve.sched.api.slo import NO_SLO
from jaxserve.sched.journal import replay
from jaxserve.sched.perf.recipe import Recipe
from tests.support.engine.steps import GREEDY, LENGTH, PAGE, POOL, SLOTS, Job, early_executors, executors, generate, run
from tests.support.timing import until

TOKENS = 100  # programs for 64, 96 and 100 tokens with prompts, and for 1, 4 and 8 decodes
# An engine with the programs of `executors`, which compile once.
SHAPE: dict[str, Any] = {
    "mesh": "2x1", "max_num_seqs": SLOTS, "max_num_batched_tokens": TOKENS, "max_model_len": LENGTH, "block_size": PAGE,
    "kv_cache_memory": 2 * POOL, "profile_time": 0.2,
}  # fmt: skip
KINDS = {
    "greedy": GREEDY,
    "seeded": SamplingParams(temperature=1.0, top_k=20, top_p=0.9, max_tokens=None),
    "log-probabilities": replace(GREEDY, logprobs=3, prompt_logprobs=2),
    "penalties": replace(GREEDY, repetition_penalty=1.3, presence_penalty=0.4),
    "masked": replace(GREEDY, allowed_token_ids=tuple(range(10, 60))),
    "masked, with penalties": replace(GREEDY, allowed_token_ids=tuple(range(10, 60)), frequency_penalty=0.5),
}


def jobs() -> list[Job]:
    made = []
    for slot, params in enumerate(KINDS.values()):
        prompt = tuple((7 * slot + 5 * at) % 90 + 3 for at in range(9 + 7 * slot))
        made.append(Job(prompt, params, slot=slot, seed=slot))
    return made


def answered(executor: JaxExecutor) -> tuple[list[list[int]], list[float]]:
    """Run requests of all kinds together and each alone; return tokens and log-probabilities."""
    made = jobs()
    run(generate(executor, made, 6, chunk=lambda: 16))
    for job in jobs():
        run(generate(executor, [job], 6, chunk=lambda: 70))
        made.append(job)
    return [job.output for job in made], [x.logprob for job in made for x in (*job.logprobs, *job.prompt_logprobs)]


def same(one: tuple[list[list[int]], list[float]], other: tuple[list[list[int]], list[float]]) -> bool:
    return one[0] == other[0] and one[1] == pytest.approx(other[1], abs=1e-4)


class Climb:
    """A ladder that makes one rung at a time."""

    def __init__(self, ladder: Ladder) -> None:
        self._arrived: queue.Queue[Rung] = queue.Queue()
        self._go = threading.Semaphore(0)
        ladder.climb(self._opened)

    def _opened(self, rung: Rung) -> None:
        self._arrived.put(rung)
        self._go.acquire()

    def next(self) -> Rung:
        """Return the next rung, which is made but not open."""
        return self._arrived.get(timeout=300)

    def go_on(self) -> None:
        self._go.release()


@pytest.fixture(scope="module")
def whole(tiny: Path) -> JaxExecutor:
    """An executor with all programs."""
    return executors(tiny, max_num_batched_tokens=TOKENS)[0]


def test_every_rung_gives_the_tokens_of_all_programs(tiny: Path, whole: JaxExecutor) -> None:
    expected = answered(whole)
    (executor,), ladder = early_executors(tiny, max_num_batched_tokens=TOKENS)
    assert ladder is not None and ladder.counts.ready < ladder.counts.total
    assert {bucket.label for bucket in executor.ready} == {"decode 1", "decode 8", "step 64", "step 100"}
    waited = compile_counter().after_warmup
    assert same(answered(executor), expected)
    climb, opened = Climb(ladder), []
    while not (opened and opened[-1].last):
        opened.append(climb.next())
        executor.open(opened[-1].buckets, opened[-1].last)
        assert same(answered(executor), expected)
        climb.go_on()
    ladder.close()
    assert executor.ready == whole.ready and len(opened) == 3
    assert ladder.counts.ready == ladder.counts.total and ladder.counts.later > 0
    assert compile_counter().after_warmup == waited, "a step waited for a program"


def test_pages_from_a_process_with_all_programs_wait_for_none(tiny: Path, whole: JaxExecutor) -> None:
    """It cuts them into pieces of any size; so may this one give them back."""
    (executor,), _ = early_executors(tiny, max_num_batched_tokens=TOKENS, exchanges=True)
    waited = compile_counter().after_warmup
    for count in (1, 2, 5, 8):
        pages = range(count)
        asyncio.run(executor.import_kv(whole.export_kv(pages), pages))
        asyncio.run(whole.import_kv(executor.export_kv(pages), pages))
    assert compile_counter().after_warmup == waited, "a transfer waited for a program"


def test_a_program_that_cannot_be_made_ends_no_request(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (executor,), ladder = early_executors(tiny, max_num_batched_tokens=TOKENS)
    assert ladder is not None
    before = answered(executor)

    def fails(state: Any) -> list[Any]:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(warmup, "inner_calls", fails)
    opened: list[Rung] = []
    ladder.climb(opened.append)
    until(lambda: len(opened) == 2)
    ladder.close()
    assert not any(rung.last for rung in opened) and same(answered(executor), before)


def test_a_process_that_ends_during_the_climb_says_nothing(tiny: Path, repo: Path) -> None:
    code = """if True:
        import sys, threading, time
        from concurrent.futures import thread
        from pathlib import Path
        from tests.support.engine.steps import early_executors

        def opened(rung):
            begun.set()
            while not thread._shutdown:  # set when the main thread is at its end
                time.sleep(0.01)

        begun = threading.Event()
        _, ladder = early_executors(Path(sys.argv[1]), max_num_batched_tokens=100)
        ladder.climb(opened)
        assert begun.wait(300)
    """
    ended = subprocess.run([sys.executable, "-c", code, str(tiny)], cwd=repo, capture_output=True, text=True)
    assert ended.returncode == 0 and "Traceback" not in ended.stderr, ended.stderr


def test_the_ladder_rests_while_there_are_requests(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, ladder = early_executors(tiny, max_num_batched_tokens=TOKENS)
    assert ladder is not None
    rests, busy = list[float](), list[bool]()

    def requests() -> bool:  # at every other look
        busy.append(asked := len(busy) % 2 == 0)
        return asked

    monkeypatch.setattr(ladder._stopped, "wait", rests.append)
    ladder.climb(lambda rung: None, requests)
    until(lambda: ladder.counts.ready == ladder.counts.total)
    ladder.close()
    assert 0 < len(rests) == sum(busy) < len(busy) == ladder.counts.later and all(seconds > 0 for seconds in rests)


@pytest.mark.parametrize(("slots", "tokens"), [(1, 1), (4, 16), (64, 512), (256, 8192)])
def test_the_first_buckets_hold_every_step(slots: int, tokens: int) -> None:
    limits = Limits(slots, tokens, pages=100, page_size=16, row_pages=8, vocab=96)
    first, whole = InputBuilder(limits, limits.first_buckets), InputBuilder(limits)
    assert len(first.ready) <= 4
    for rows in range(1, slots + 1):
        for size in {rows, min(rows + 1, tokens), max(rows, tokens)}:
            coarse, fine = first.bucket(rows, size), whole.bucket(rows, size)
            assert coarse.tokens >= fine.tokens and coarse.decode == fine.decode
    first.open(limits.buckets)
    assert first.ready == whole.ready


def test_hidden_states_of_prompts_come_from_programs_for_prompts() -> None:
    """Even of a single token, whose step could be one of decodes."""
    limits = Limits(8, 64, pages=100, page_size=16, row_pages=8, vocab=96)
    assert InputBuilder(limits).bucket(1, 1).decode
    heard: Bucket = InputBuilder(limits).bucket(1, 1, heard=True)
    assert heard.prompts


def test_a_served_journal_records_the_ladder_and_replays_to_the_same_plans(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assemble, "TAUGHT", 20)
    monkeypatch.setattr(warmup, "REST", 0.0)  # requests run all the time
    path = tmp_path / "journal"
    monkeypatch.setenv("JAXSERVE_CACHE_DIR", str(tmp_path))  # no profile of an earlier start
    config = ServeConfig.load(model=str(tiny), journal=str(path), **SHAPE)
    engine = Engine.start(config)
    try:
        ended: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        first, cache = engine.stats(), engine.machine.profile
        assert cache is not None
        measured = cache.load() or []
        few = engine.machine.recipe.buckets
        assert few.mixed == (64, 100) and len(few.decode) == 2, "steps are predicted for the programs that are ready"
        assert first.programs_ready < first.programs and first.programs_later == 0
        asked = 0
        while (stats := engine.stats()).programs_ready < stats.programs or asked < 20:
            for length in (3, 40, 60):
                params = SamplingParams(temperature=0.0, max_tokens=4)
                engine.submit(
                    NewRequest([5 + at % 90 for at in range(length)], params, NO_SLO),
                    lambda delta: delta.finish_reason and ended.put(delta.error),
                )
            assert [ended.get(timeout=60) for _ in range(3)] == [None] * 3
            asked += 1
        assert stats.programs_later > 0 and stats.compilations_after_warmup == 0
    finally:
        engine.close()
    assert engine.machine.recipe.buckets.mixed == (64, 96, 100)
    assert len(cache.load() or []) > len(measured) > 3, "what serving taught is kept for the next start"
    text = path.read_text()
    assert text.count('"kind":"adopt"') >= 2, "each instance sees the ladder grow"
    replayed = replay(io.StringIO(text), lambda record: Recipe.of(record).make())
    assert replayed.plans > 20 and not replayed.differences


def test_an_engine_closes_while_its_programs_are_made(tiny: Path) -> None:
    engine = Engine.start(ServeConfig.load(model=str(tiny), **SHAPE))
    assert engine.close()
    # A compilation cannot be stopped, and closing does not wait for one that takes long on a busy machine.
    until(lambda: not any(thread.name.startswith("jaxserve-ladder") for thread in threading.enumerate()))

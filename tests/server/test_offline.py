"""`LLM` and `AsyncLLM`, on the session's engine."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import jaxserve
from jaxserve import LLM, SLO, AsyncLLM, InvalidValue, SamplingParams
from jaxserve.config import ServeConfig

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


@pytest.fixture
def llm(engine: Any, tokenizer: Any) -> LLM:
    return LLM(config=ServeConfig(), engine=engine, tokenizer_object=tokenizer)


@pytest.fixture
def allm(engine: Any, tokenizer: Any) -> AsyncLLM:
    return AsyncLLM(config=ServeConfig(), engine=engine, tokenizer_object=tokenizer)


def test_names_are_those_of_vllm(llm):
    (made,) = llm.generate("def main(", GREEDY)
    (output,) = made.outputs
    assert made.prompt == "def main(" and made.prompt_token_ids == llm.tokenizer.encode("def main(")
    assert len(output.token_ids) == 8 and output.finish_reason == "length" and output.logprobs is None
    assert output.text == llm.tokenizer.decode(output.token_ids, skip_special_tokens=True)
    times = made.metrics
    assert times.arrival <= times.scheduled <= times.first_token <= times.finished
    assert times.ttft > 0 and times.tpot > 0 and len(times.token_times) == 8


def test_times_are_told_once_and_nothing_else_is_kept(llm, engine):
    kept = set(engine._over)
    (made,) = llm.generate("def main(", SamplingParams(n=3, seed=1, max_tokens=8, ignore_eos=True))
    assert all(len(one.metrics.token_times) == 8 for one in made.outputs)
    assert set(engine._over) == kept


def test_many_prompts_of_every_kind_keep_their_order(llm):
    ids = llm.tokenizer.encode("def main(")
    texts = ["def main(", "import os", "class A:", "# note"] * 5
    made = llm.generate(texts, GREEDY, use_tqdm=False)
    assert [one.prompt for one in made] == texts and all(one.finished for one in made)
    alone = llm.generate(ids, GREEDY)[0].outputs[0].token_ids
    assert made[0].outputs[0].token_ids == alone
    assert [one.outputs[0].token_ids for one in llm.generate([ids, ids], GREEDY)] == [alone, alone]
    assert llm.generate([], GREEDY) == []


def test_each_prompt_has_its_own(llm):
    params = [SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True) for n in (1, 2, 3)]
    made = llm.generate(["a", "b", "c"], params, slo=[SLO(), SLO(ttft=1.0), SLO()], priority=[0, 1, 2])
    assert [len(one.outputs[0].token_ids) for one in made] == [1, 2, 3]
    with pytest.raises(InvalidValue, match="2 entries for 3 prompts"):
        llm.generate(["a", "b", "c"], params[:2])


def test_several_outputs_logprobs_and_seeds(llm):
    params = SamplingParams(n=3, max_tokens=6, seed=3, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    (made,) = llm.generate("def main(", params)
    assert [one.index for one in made.outputs] == [0, 1, 2]
    assert len({tuple(one.token_ids) for one in made.outputs}) > 1
    for one in made.outputs:
        assert len(one.logprobs) == 6 and one.cumulative_logprob == pytest.approx(
            sum(at[token].logprob for at, token in zip(one.logprobs, one.token_ids, strict=True))
        )
    assert made.prompt_logprobs[0] is None and len(made.prompt_logprobs) == len(made.prompt_token_ids)
    (again,) = llm.generate("def main(", params)
    assert [one.token_ids for one in again.outputs] == [one.token_ids for one in made.outputs]


def test_stop_strings_cut_text_and_tokens(llm):
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    text = llm.generate("def main(", params)[0].outputs[0].text
    stop = text[6:9]
    cut = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True, stop=(stop,))
    output = llm.generate("def main(", cut)[0].outputs[0]
    assert output.text == text[: text.index(stop)] and output.finish_reason == "stop" and output.stop_reason == stop
    assert len(output.metrics.token_times) == len(output.token_ids)


def test_chat(llm):
    talk = [{"role": "user", "content": "hi"}]
    (made,) = llm.chat(talk, GREEDY)
    assert made.prompt.endswith("<|assistant|>\n") and len(made.outputs[0].token_ids) == 8
    both = llm.chat([talk, talk], GREEDY)
    assert [one.outputs[0].token_ids for one in both] == [made.outputs[0].token_ids] * 2


def test_what_does_not_fit_is_refused_before_anything_runs(llm):
    before = llm.engine.stats().counters.steps
    with pytest.raises(InvalidValue, match="300 tokens"):
        llm.generate(["a", [5] * 300], GREEDY)
    with pytest.raises(InvalidValue, match="empty"):
        llm.generate("", GREEDY)
    assert llm.engine.stats().counters.steps == before
    (made,) = llm.generate([5] * 250, SamplingParams(max_tokens=100, ignore_eos=True))
    assert len(made.outputs[0].token_ids) == 6 and made.outputs[0].finish_reason == "length"


def test_it_works_where_an_event_loop_runs(llm):
    async def notebook() -> list[jaxserve.RequestOutput]:
        return llm.generate("def main(", GREEDY)

    assert len(asyncio.run(notebook())[0].outputs[0].token_ids) == 8


def test_a_bounded_queue_only_slows_down(tokenizer):
    from double import Double

    engine = Double(bound=3, delay=0.001)
    made = LLM(config=ServeConfig(), engine=engine, tokenizer_object=tokenizer).generate([[5, 6, 7]] * 10, GREEDY)
    assert all(len(one.outputs[0].token_ids) == 8 for one in made)


def test_an_interrupt_cancels(tokenizer):
    from double import Double

    engine = Double(delay=0.05)
    llm = LLM(config=ServeConfig(), engine=engine, tokenizer_object=tokenizer)
    record = engine.record

    def interrupt(request: int) -> Any:
        raise KeyboardInterrupt

    engine.record = interrupt
    params = [SamplingParams(max_tokens=n) for n in (1, 100, 100)]
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[5, 6, 7]] * 3, params)
    engine.record = record
    assert set(engine.cancelled) >= {1, 2}


def test_failures_are_told_per_request(tokenizer):
    from double import Double

    engine = Double()
    engine.fail_after = 2
    (made,) = LLM(config=ServeConfig(), engine=engine, tokenizer_object=tokenizer).generate([5, 6], GREEDY)
    assert made.outputs[0].finish_reason == "error" and made.outputs[0].error == "out of luck"


def test_streams(allm, llm):
    whole = llm.generate("def main(", GREEDY)[0].outputs[0]

    async def main() -> None:
        news = [output async for output in allm.stream("def main(", GREEDY, slo=SLO(ttft=2.0))]
        assert "".join(one.outputs[0].text for one in news) == whole.text
        assert [token for one in news for token in one.outputs[0].token_ids] == whole.token_ids
        assert [one.finished for one in news] == [False] * (len(news) - 1) + [True]
        assert news[-1].metrics.ttft > 0
        made = await asyncio.gather(*(allm.generate("def main(", GREEDY) for _ in range(3)))
        assert all(one.outputs[0].token_ids == whole.token_ids for one in made)

    asyncio.run(main())


def test_closing_a_stream_cancels(allm):
    async def main() -> None:
        long = SamplingParams(max_tokens=200, ignore_eos=True)
        stream = allm.stream("def main(", long)
        await anext(stream)
        await stream.aclose()
        task = asyncio.ensure_future(allm.generate("def main(", long))
        while not allm.engine.stats().running:
            await asyncio.sleep(0.01)
        task.cancel()
        while allm.engine.stats().running:
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(main(), 30))


def test_settings_are_checked_by_name():
    with pytest.raises(InvalidValue, match="did you mean 'mesh'"):
        LLM(mseh="2x1")
    with pytest.raises(InvalidValue, match="mesh='2y1'"):
        LLM(mesh="2y1")
    with pytest.raises(InvalidValue, match="config is given"):
        LLM("x", config=ServeConfig())

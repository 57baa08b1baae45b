"""`LLM` and `AsyncLLM` on the session's engine."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest

import jaxserve
from jaxserve import LLM, SLO, AsyncLLM, InvalidValue, SamplingParams
from jaxserve.config import ServeConfig
from jaxserve.server.metrics_reader import Counter, Gauge, Histogram
from tests.support.server.double import Double

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


@pytest.fixture
def llm(engine: Any, tokenizer: Any) -> LLM:
    return LLM(config=ServeConfig(), engine=engine, tokenizer_object=tokenizer)


@pytest.fixture
def allm(engine: Any, tokenizer: Any) -> AsyncLLM:
    return AsyncLLM(config=ServeConfig(), engine=engine, tokenizer_object=tokenizer)


async def last(outputs: AsyncGenerator[jaxserve.RequestOutput, None]) -> jaxserve.RequestOutput:
    """Return the finished output of a stream."""
    async for output in outputs:
        if output.finished:
            return output
    raise AssertionError("the stream ended without a finished output")


def test_names_match_vllm(llm):
    (made,) = llm.generate("def main(", GREEDY)
    (output,) = made.outputs
    assert made.prompt == "def main(" and made.prompt_token_ids == llm.tokenizer.encode("def main(")
    assert len(output.token_ids) == 8 and output.finish_reason == "length" and output.logprobs is None
    assert output.text == llm.tokenizer.decode(output.token_ids, skip_special_tokens=True)
    times = made.metrics
    assert times.arrival <= times.scheduled <= times.first_token <= times.finished
    assert times.ttft > 0 and times.tpot > 0 and len(times.token_times) == 8


def test_prompt_types_match_vllm(llm):
    ids = llm.tokenizer.encode("def main(")
    alone = llm.generate("def main(", GREEDY)[0].outputs[0].token_ids
    for prompts in ({"prompt": "def main("}, {"prompt_token_ids": ids}, {"prompt_token_ids": np.array(ids)}):
        (made,) = llm.generate(prompts, GREEDY)
        assert made.prompt_token_ids == ids and made.outputs[0].token_ids == alone
        assert made.prompt == prompts.get("prompt")
    mixed = ["def main(", ids, {"prompt": "def main("}, {"prompt": "def main(", "prompt_token_ids": ids}, "import os"]
    made = llm.generate(mixed * 4, GREEDY, use_tqdm=False)
    assert [one.prompt for one in made] == ["def main(", None, "def main(", "def main(", "import os"] * 4
    assert all(one.finished for one in made)
    tokens = [one.outputs[0].token_ids for one in made]
    assert tokens == [alone, alone, alone, alone, tokens[4]] * 4 and tokens[4] != alone
    assert llm.generate(ids, GREEDY)[0].outputs[0].token_ids == alone and llm.generate([], GREEDY) == []


@pytest.mark.parametrize(
    ("prompts", "said"),
    [
        ({"text": "def main("}, "a prompt with 'text' is not supported: it must be a string, a list of token ids"),
        ({"prompt": "x", "multi_modal_data": {"image": 1}}, "'multi_modal_data' is not supported"),
        ({"prompt": "x", "cache_salt": ""}, "cache_salt='' must be a string of 1 to 1024 characters"),
        ({"prompt": "x", "cache_salt": "s" * 1025}, "cache_salt='sss.* must be a string of 1 to 1024 characters"),
        ({"prompt": "x", "cache_salt": 7}, "cache_salt=7 must be a string"),
        ({"prompt": [5, 6]}, r"prompt=\[5, 6\] must be a string; token ids belong in 'prompt_token_ids'"),
        ({"prompt_token_ids": "def"}, "prompt_token_ids='def' must be a list of token ids"),
        ({"prompt_token_ids": [5, "a"]}, "token id 'a' must be a whole number"),
        ({}, "has no prompt"),
        (7, "prompts=7 must be a string"),
        (b"def", "prompts=b'def' must be a string"),
        ([None], "prompt=None must be a string"),
        ([5, 6.5], "prompt=5 must be a string"),
        ([[5, True]], "token id True must be a whole number"),
    ],
)
def test_malformed_prompts_are_refused_by_name(llm, prompts, said):
    before = llm.engine.stats().counters.steps
    with pytest.raises(InvalidValue, match=said) as raised:
        llm.generate(prompts, GREEDY)
    assert len(str(raised.value)) < 300 and llm.engine.stats().counters.steps == before


def test_parameters_per_prompt(llm):
    params = [SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True) for n in (1, 2, 3)]
    made = llm.generate(["a", "b", "c"], params, slo=[SLO(), SLO(ttft=1.0), SLO()], priority=[0, 1, 2])
    assert [len(one.outputs[0].token_ids) for one in made] == [1, 2, 3]
    with pytest.raises(InvalidValue, match="2 entries for 3 prompts"):
        llm.generate(["a", "b", "c"], params[:2])


def test_several_outputs_logprobs_and_seeds(llm, engine):
    kept = set(engine._over)
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
    assert all(len(one.metrics.token_times) == 6 for one in made.outputs)
    assert set(engine._over) == kept, "times are reported once and not retained"


def test_stop_strings_cut_text_and_tokens(llm):
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    text = llm.generate("def main(", params)[0].outputs[0].text
    stop = text[6:9]
    cut = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True, stop=stop)
    output = llm.generate("def main(", cut)[0].outputs[0]
    assert output.text == text[: text.index(stop)] and output.finish_reason == "stop" and output.stop_reason == stop
    assert len(output.metrics.token_times) == len(output.token_ids)


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"stop": "self"}, {"stop": ("self",)}),
        ({"stop": ["a", "b"], "stop_token_ids": [1, 2]}, {"stop": ("a", "b"), "stop_token_ids": (1, 2)}),
        ({"stop": None, "stop_token_ids": None, "logit_bias": None}, {"stop": (), "stop_token_ids": ()}),
        ({"logit_bias": {5: 1}}, {"logit_bias": ((5, 1.0),)}),
        ({"max_tokens": np.int64(5), "temperature": np.float32(0.5)}, {"max_tokens": 5, "temperature": 0.5}),
    ],
)
def test_sampling_params_accept_vllms_values(given, kept):
    params = SamplingParams(**given)
    assert {name: getattr(params, name) for name in kept} == kept
    json.dumps(asdict(params))  # a journal writes them as JSON
    assert replace(params, n=2).n == 2 and hash(params) == hash(SamplingParams(**kept))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"stop": 5}, "stop=5 must be a string or a list of strings"),
        ({"stop": ["a", 5]}, "must be a string or a list of strings"),
        ({"stop_token_ids": "a"}, "stop_token_ids='a' must be a list of token ids"),
        ({"stop_token_ids": [1.5]}, "must be a list of token ids"),
        ({"logit_bias": {"a": 1}}, "must be a mapping of token ids to numbers"),
        ({"max_tokens": "5"}, "max_tokens='5' must be a whole number or None"),
        ({"n": 1.5}, "n=1.5 must be a whole number"),
        ({"temperature": "hot"}, "temperature='hot' must be a number"),
        ({"seed": True}, "seed=True must be a whole number or None"),
    ],
)
def test_invalid_sampling_params_are_refused_by_name(given, said):
    with pytest.raises(InvalidValue, match=re.escape(said)) as raised:
        SamplingParams(**given)
    assert raised.value.param == next(iter(given))


def test_tiers_bring_their_objectives_offline(tokenizer):
    engine = Double()
    config = ServeConfig(ttft_slo=9.0, tpot_slo=0.9)
    llm = LLM(config=config, engine=engine, tokenizer_object=tokenizer)
    gold, batch = config.tier("interactive"), config.tier("batch")
    llm.generate(["a", "b"], GREEDY, tier=["interactive", "batch"])
    first, second = sorted(engine.submitted, key=lambda one: one.id)
    assert (first.slo, first.tier, first.priority) == (gold[1], "interactive", gold[0].priority)
    assert (second.slo, second.tier) == (batch[1], "best_effort" if batch[0].best_effort else "batch")
    assert first.slo != second.slo != config.slo
    llm.chat([{"role": "user", "content": "hi"}], GREEDY, tier="flex", slo=SLO(ttft=7.0), priority=-3)
    assert (engine.submitted[-1].slo, engine.submitted[-1].tier) == (SLO(ttft=7.0), "best_effort")
    assert engine.submitted[-1].priority == -3
    llm.generate("a", GREEDY)
    assert (engine.submitted[-1].slo, engine.submitted[-1].tier) == (config.slo, "standard")
    allm = AsyncLLM(config=config, engine=engine, tokenizer_object=tokenizer)
    asyncio.run(last(allm.generate("a", GREEDY, tier="interactive")))
    assert (engine.submitted[-1].slo, engine.submitted[-1].tier) == (gold[1], "interactive")
    for wrong, said in (
        ({"tier": "silver"}, "service_tier='silver' is unknown"),
        ({"slo": 5.0}, "slo=5.0 must be an SLO"),
        ({"priority": "high"}, "priority='high' must be a whole number"),
        ({"sampling_params": {"max_tokens": 5}}, "must be SamplingParams"),
    ):
        with pytest.raises(InvalidValue, match=said):
            llm.generate("a", **wrong)


def test_the_tokenizer_matches_transformers(llm, allm):
    tokenizer = llm.get_tokenizer()
    assert tokenizer.encode("def main(") == llm.tokenizer.encode("def main(")
    assert "hi" in tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert asyncio.run(allm.get_tokenizer()) is tokenizer


def test_a_session_keeps_its_pages_until_it_ends(llm, allm, engine):
    def pinned() -> int:
        return sum(one.pages_pinned for one in engine.stats().instances)

    prompt = llm.tokenizer.encode("import os\n" * 20)
    llm.generate(prompt, GREEDY, session_id="offline")
    assert pinned() > 0 and llm.end_session("offline") and pinned() == 0

    async def turn() -> tuple[bool, bool]:
        async for _ in allm.generate(prompt, GREEDY, session_id="offline"):
            pass
        return await allm.end_session("offline"), await allm.end_session("offline")

    assert asyncio.run(turn()) == (True, False)
    with pytest.raises(InvalidValue, match="session_id=''"):
        llm.generate(prompt, GREEDY, session_id="")


def test_the_prefix_cache_is_reset_only_when_idle(llm, allm, engine):
    prompt = llm.tokenizer.encode("import os\n" * 20)
    llm.generate(prompt, GREEDY)

    def cached() -> int:
        return llm.generate(prompt, GREEDY)[0].metrics.cached

    assert cached() > 0 and llm.reset_prefix_cache() is True and cached() == 0 < cached()
    engine.check()

    async def busy() -> bool:
        stream = allm.stream("def main(", SamplingParams(max_tokens=200, ignore_eos=True))
        await anext(stream)
        answer = await allm.reset_prefix_cache()
        await stream.aclose()
        return answer

    assert asyncio.run(busy()) is False and cached() > 0


def test_prompts_with_different_cache_salts_share_no_pages(llm, allm):
    ids = llm.tokenizer.encode("import sys\n" * 20)

    def cached(prompt: Any) -> int:
        return llm.generate(prompt, GREEDY)[0].metrics.cached

    red, blue, green = ({"prompt_token_ids": ids, "cache_salt": salt} for salt in ("red", "blue", "green"))
    for prompt in (ids, red, blue):
        assert cached(prompt) == 0 < cached(prompt), "a prompt with another salt was a hit, or with its own was not"
    streamed = asyncio.run(last(allm.generate(green, GREEDY)))
    assert streamed.outputs[0].metrics.cached == 0 < cached(green)


def test_metrics_match_those_of_a_server(llm):
    llm.generate(["def main(", "import os"], GREEDY)
    found = {metric.name: metric for metric in llm.get_metrics()}
    tokens = found["jaxserve:generation_tokens"]
    assert isinstance(tokens, Counter) and tokens.value == 16 and tokens.labels == {"model_name": "jaxserve-demo"}
    first = found["jaxserve:time_to_first_token_seconds"]
    assert isinstance(first, Histogram) and first.count == first.buckets["+Inf"] == 2 and first.sum > 0
    running = found["jaxserve:num_requests_running"]
    assert isinstance(running, Gauge) and running.value == 0 and "engine" in running.labels
    assert all(name.startswith("jaxserve:") for name in found)


def test_chat(llm):
    talk = [{"role": "user", "content": "hi"}]
    (made,) = llm.chat(talk, GREEDY)
    assert made.prompt.endswith("<|assistant|>\n") and len(made.outputs[0].token_ids) == 8

    async def notebook() -> list[jaxserve.RequestOutput]:
        return llm.chat([talk, talk], GREEDY)  # inside of a running event loop

    both = asyncio.run(notebook())
    assert [one.outputs[0].token_ids for one in both] == [made.outputs[0].token_ids] * 2


def test_prompts_that_do_not_fit_are_refused_before_any_runs(llm):
    before = llm.engine.stats().counters.steps
    with pytest.raises(InvalidValue, match="300 in the prompt"):
        llm.generate(["a", [5] * 300], GREEDY)
    with pytest.raises(InvalidValue, match="empty"):
        llm.generate("", GREEDY)
    assert llm.engine.stats().counters.steps == before
    (made,) = llm.generate([5] * 250, SamplingParams(max_tokens=100, ignore_eos=True))
    assert len(made.outputs[0].token_ids) == 6 and made.outputs[0].finish_reason == "length"


def test_a_bounded_queue_only_delays_prompts(tokenizer):
    engine = Double(bound=3, delay=0.001)
    made = LLM(config=ServeConfig(), engine=engine, tokenizer_object=tokenizer).generate([[5, 6, 7]] * 10, GREEDY)
    assert all(len(one.outputs[0].token_ids) == 8 for one in made)


def test_an_interrupt_cancels(tokenizer):
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


def test_failures_are_reported_per_request(tokenizer):
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
        made = await asyncio.gather(*(last(allm.generate("def main(", GREEDY)) for _ in range(3)))
        assert all(one.outputs[0].token_ids == whole.token_ids for one in made)

    asyncio.run(main())


def test_generate_streams_the_whole_output_so_far_as_in_vllm(allm, llm):
    params = SamplingParams(n=2, seed=3, max_tokens=8, ignore_eos=True, logprobs=1)
    wholes = llm.generate("def main(", params)[0].outputs

    async def main() -> None:
        news = [output async for output in allm.generate({"prompt": "def main("}, params, "mine")]
        assert {one.request_id for one in news} == {"mine"} and {len(one.outputs) for one in news} == {2}
        assert [one.finished for one in news] == [False] * (len(news) - 1) + [True]
        counts = [sum(len(one.token_ids) for one in output.outputs) for output in news]
        assert counts == sorted(counts) and counts[0] < counts[-1] == 16, "earlier outputs changed"
        for mine, whole in zip(news[-1].outputs, wholes, strict=True):
            assert (mine.text, mine.token_ids, mine.finish_reason) == (whole.text, whole.token_ids, "length")
            assert len(mine.logprobs) == 8

    asyncio.run(main())


@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"model": "/nope"}, "model folder '/nope' does not exist; expected a folder with config.json"),
        ({"tokenizer": "./nope"}, "tokenizer folder './nope' does not exist"),
        ({"model": "no/such"}, "is not a local folder, and downloading it from the Hub failed"),
        ({"tensor_parallel_size": 2}, "unknown setting 'tensor_parallel_size'; use mesh=\"1xT\""),
        ({"data_parallel_size": 2}, 'use mesh="RxT" with mode="colocated"'),
        ({"disable_radix_cache": True}, "use enable_prefix_caching=False"),
        ({"trust_remote_code": True}, "code from a model's repository is never run"),
        ({"enable_chunked_prefill": True}, "chunks of at most max_num_batched_tokens"),
        ({"mseh": "2x1"}, "did you mean 'mesh'"),
        ({"mesh": "2y1"}, "mesh='2y1'"),
        ({"model": "x", "config": ServeConfig()}, "config is given"),
    ],
)
def test_invalid_settings_are_explained_as_in_the_cli(kind, given, said):
    with pytest.raises(jaxserve.JaxserveError, match=said):
        kind(**given)


def test_a_folder_without_a_tokenizer_says_so(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InvalidValue, match=r"no tokenizer could be loaded from .*--tokenizer"):
        LLM(model=str(tmp_path))


def test_closing_a_stream_cancels(allm):
    async def main() -> None:
        long = SamplingParams(max_tokens=200, ignore_eos=True)
        stream = allm.stream("def main(", long)
        await anext(stream)
        await stream.aclose()
        task = asyncio.ensure_future(last(allm.generate("def main(", long)))
        while not allm.engine.stats().running:
            await asyncio.sleep(0.01)
        task.cancel()
        while allm.engine.stats().running:
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(main(), 30))

"""Prompts from files: what is read, what is refused, and that sessions keep their order."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxserve.bench import load
from jaxserve.bench.datasets import Source, conversation, estimate, read_rows
from jaxserve.bench.load import Call, Objective, SloClass
from jaxserve.bench.slo_file import load_slo_file
from jaxserve.config import preset
from jaxserve.errors import InvalidValue
from jaxserve.sched.sim.scenarios import NAMED
from tests.support.examples import examples

WORDS = st.lists(st.sampled_from(["a", "bb", "ccc", "é", "\n"]), min_size=1, max_size=8).map(" ".join)
TURNS = st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=5)
SHAPES = (("conversations", "from", "value", "human", "gpt"), ("messages", "role", "content", "user", "assistant"))
LENIENT = settings(max_examples=examples(40), suppress_health_check=[HealthCheck.function_scoped_fixture])


def count(text: str) -> int:
    return len(text.split())


def told(turns: list[tuple[str, str]], shape: tuple[str, ...]) -> dict[str, Any]:
    listed, role, text, asks, answers = shape
    messages = [{role: who, text: said} for pair in turns for who, said in zip((asks, answers), pair, strict=True)]
    return {"id": "x", listed: messages}


@LENIENT
@given(st.lists(TURNS, min_size=1, max_size=4), st.sampled_from(SHAPES), st.booleans(), st.integers(1, 9))
def test_conversations_are_read_in_order(
    tmp_path: Path, chats: list[list[tuple[str, str]]], shape: tuple[str, ...], lines: bool, wanted: int
) -> None:
    path = tmp_path / "chats.json"
    rows = [told(turns, shape) for turns in chats]
    path.write_text("\n".join(map(json.dumps, rows)) if lines else json.dumps(rows), encoding="utf-8")
    assert [conversation(row.value, "") for row in read_rows(path)]
    calls = Source(path, count, think_time=2.0).conversations(wanted, seed=1)
    assert load.starts(calls) == wanted
    for index, call in enumerate(calls):
        if call.after is None:
            chat = next(turns for turns in chats if turns[0][0] == call.prompt)  # the first of equals will do
            position = 0
            assert call.delay == 0.0 and not call.grows
        else:
            position += 1
            assert call.after == index - 1 and call.grows and call.delay > 0
        assert call.output_tokens >= 1
        if sum(turns[0][0] == chat[0][0] for turns in chats) == 1:
            assert (call.prompt, call.output_tokens) == (chat[position][0], max(count(chat[position][1]), 1))


@LENIENT
@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=12), st.integers(8, 60))
def test_sharegpt_is_pruned_as_in_vllm(tmp_path: Path, sizes: list[tuple[int, int]], limit: int) -> None:
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps([told([("a " * n, "b " * m)], SHAPES[0]) for n, m in sizes]))
    fits = [(n, m) for n, m in sizes if n >= 4 and m >= 4 and 2 * n <= limit and n + m <= limit]
    source = Source(path, count, max_len=limit)
    if not fits:
        with pytest.raises(InvalidValue, match="no requests that can be sent"):
            source.sharegpt(5, seed=0)
        return
    calls = source.sharegpt(len(sizes), seed=0)
    drawn = [(count(str(call.prompt)), call.output_tokens) for call in calls]
    assert len(drawn) == len(sizes) and sorted(drawn[: len(fits)]) == sorted(fits)
    if any(n >= 4 and 2 * n <= limit and n + 7 <= limit for n, _ in sizes):
        shortened = Source(path, count, output_len=7, max_len=limit).sharegpt(3, seed=0)
        assert all(call.output_tokens == 7 for call in shortened)


def test_columns_of_a_hugging_face_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [
        {"q": "one two", "a": "x y z", "n": 9},
        {"q": [{"role": "system", "content": "s"}, *_asks("hello")], "n": 9},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    calls = Source(path, count, prompt_column="q", output_column="n").hugging_face(2, 0, 5)
    assert {call.prompt for call in calls} == {"one two", "hello"}
    assert {call.output_tokens for call in calls} == {9}
    assert {call.history for call in calls} == {(), (("system", "s"),)}
    texts = Source(path, count, prompt_column="q").hugging_face(2, 0, 5)
    assert {call.output_tokens for call in texts} == {5}
    told: list[str] = []
    calls = Source(path, count, told.append, prompt_column="q", output_column="a").hugging_face(2, 0, 5)
    assert [call.output_tokens for call in calls] == [3, 3]
    [said] = told
    assert re.search("1 of the 2 rows .*'a' is None; it must be a text or a positive number", said)
    with pytest.raises(InvalidValue, match="no column 'prompt'; there is 'q'"):
        Source(path).hugging_face(1, 0, 5)


def _asks(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_delays_of_the_file_come_before_think_times(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    messages = [*_asks("a"), {"role": "user", "content": "b", "delay": 0.25}, *_asks("c")]
    path.write_text(json.dumps({"messages": messages}))
    delays = [call.delay for call in Source(path, think_time=3.0).conversations(1, 0)]
    assert delays[:2] == [0.0, 0.25] and delays[2] > 0
    assert [call.prompt for call in Source(path, max_turns=2).conversations(1, 0)] == ["a", "b"]
    assert [call.prompt for call in Source(path, count, max_len=4).conversations(1, 0)] == ["a", "b"]


TURN = '{"messages": [{"role": "user", '
GOOD = '{"prompt": "x"}\n'
CHAT = [{"from": "human", "value": "a b c d e"}, {"from": "gpt", "value": "v w x y z"}]


def _openai(*contents: Any) -> list[dict[str, Any]]:
    return [{"role": role, "content": text} for role, text in zip(("user", "assistant"), contents, strict=True)]


@pytest.mark.parametrize(
    "row",
    [
        {"conversations": CHAT},
        {"items": CHAT},
        {"conversations": [{**one, "from": one["from"].upper()} for one in CHAT]},
        {"conversations": [CHAT[0], {**CHAT[1], "from": "bing"}]},
        {"conversations": [{"from": "tool", "value": None}, *CHAT]},
        {"conversation": [{"human": CHAT[0]["value"], "assistant": CHAT[1]["value"]}]},
        {"messages": _openai(CHAT[0]["value"], CHAT[1]["value"])},
        {"messages": _openai([{"type": "text", "text": CHAT[0]["value"]}], CHAT[1]["value"])},
    ],
)
def test_conversations_are_read_as_people_publish_them(row: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "chats.json"
    path.write_text(json.dumps([row]))
    [call] = Source(path, count).sharegpt(1, 0)
    assert (call.prompt, call.output_tokens) == ("a b c d e", 5)


BAD = [
    {"conversations": None},
    {},
    {"conversations": [None]},
    {"messages": _openai(None, "x")},
    3,
    {"conversations": 3},
]


@pytest.mark.parametrize("form", ["list", "lines", "bom", "gz"])
@pytest.mark.parametrize("kind", ["sharegpt", "conversations"])
def test_conversations_that_cannot_be_used_are_skipped_and_counted(kind: str, form: str, tmp_path: Path) -> None:
    rows, told = [*BAD, {"conversations": CHAT}], list[str]()
    text = json.dumps(rows) if form == "list" else "\n".join(map(json.dumps, rows)) + "\n{cut\n"
    raw = text.encode("utf-8-sig" if form == "bom" else "utf-8")
    path = tmp_path / "chats.json"
    path.write_bytes(gzip.compress(raw) if form == "gz" else raw)
    calls = getattr(Source(path, count, told.append), kind)(2, 0)
    assert [call.prompt for call in calls] == ["a b c d e"] * 2
    [said] = told
    bad = len(BAD) + (form != "list")
    assert f"{bad} of the {bad + 1} rows read cannot be used and are skipped" in said and len(said) < 1000


def test_files_of_bad_rows_alone_are_refused_early(tmp_path: Path) -> None:
    path = tmp_path / "chats.json"
    path.write_text(json.dumps([{"conversations": None}] * 20_000))
    with pytest.raises(
        InvalidValue, match=r"none of its first 10000 rows can be used: 10000 as .*no list `conv"
    ) as raised:
        Source(path).sharegpt(1, 0)
    assert len(str(raised.value)) < 1000


def test_a_csv_of_hugging_face_is_read(tmp_path: Path) -> None:
    path = tmp_path / "train.csv"
    path.write_text('question,answer\n"one\ntwo",x y z\n')
    [call] = Source(path, count, prompt_column="question", output_column="answer").hugging_face(1, 0, 5)
    assert (call.prompt, call.output_tokens) == ("one\ntwo", 3)


def test_skipped_rows_of_a_trace_are_told_by_bench(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "azure.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-12 01:00:00,5,0\n2024-05-12 01:00:00,5,6\n")
    assert len(load.trace_calls(path, count=None, vocabulary=range(9))) == 1
    assert "1 of the 2 rows read cannot be used and are skipped" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "text", "part"),
    [
        ("conversations", "[1]", r"\[0\]: '1' must be an object"),
        ("conversations", "[{", "not JSON"),
        ("conversations", '{"a": 1}', "no list `conversations` or `messages`"),
        ("conversations", TURN[:-2] + "}]}", "a message must be"),
        ("conversations", TURN + '"content": "a", "delay": -1}]}', "delay=-1 must be a number, at least 0"),
        ("conversations", '{"messages": []}', "no requests that can be sent"),
        ("custom", '{"prompt": "x", "output_tokens": 0}', "output_tokens=0 must be a number, positive"),
        ("custom", '{"prompt": "x", "tpot_slo_ms": "fast"}', "tpot_slo_ms='fast' must be a number"),
        ("custom", '{"prompt": "x", "class": 3}', "class=3 must be a text"),
        ("custom", GOOD + "{", "2: not JSON"),
        ("custom", GOOD + '{"text": "x"}', "2: the line must be an object"),
        ("custom", GOOD + '{"prompt": "x", "ttft": 1}', "2: unknown .'ttft'."),
        ("custom", "", "no request"),
    ],
)
def test_malformed_files_name_their_place(kind: str, text: str, part: str, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(text)
    with pytest.raises(InvalidValue, match=part):
        Source(path).conversations(1, 0) if kind == "conversations" else Source(path).custom(3, 4)


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match="is not a file"):
        Source(tmp_path).custom(1, 4)
    (tmp_path / "x.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidValue, match="is not UTF-8"):
        Source(tmp_path / "x.jsonl").custom(1, 4)
    (tmp_path / "x.parquet").write_bytes(b"PAR")
    with pytest.raises(InvalidValue, match=r"pyarrow|not a parquet file"):
        Source(tmp_path / "x.parquet").hugging_face(1, 0, 4)


@given(st.text(max_size=200))
def test_an_estimate_is_at_least_one_token(text: str) -> None:
    assert estimate(text) >= 1


def test_named_classes_get_the_objectives_of_their_class(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"prompt": "x", "class": "chat"}\n{"prompt": "y", "class": "other", "ttft_slo_ms": 5}')
    chat = Objective(100.0, name="chat")
    first, second = load.with_classes(Source(path).custom(2, 4), [SloClass(1.0, chat)], 0)
    assert first.slo == chat and second.slo == Objective(5.0, name="other")


def test_calls_of_a_session_are_of_one_class() -> None:
    calls = [Call(0.0, "x", 1, 1, after=index - 1 if index % 3 else None) for index in range(60)]
    classes = [SloClass(1.0, Objective(name=name)) for name in "ab"]
    drawn = load.with_classes(calls, classes, 0)
    assert all(call.after is None or call.slo == drawn[call.after].slo for call in drawn)
    assert {call.slo.name for call in drawn} == {"a", "b"}
    timed = load.schedule(calls, [float(n) for n in range(load.starts(calls))])
    assert [call.at for call in timed] == [index // 3 for index in range(60)]


@pytest.mark.parametrize("name", [name for name in NAMED if name.startswith("slos-serve")])
def test_scenarios_keep_rounds_stages_and_classes(name: str) -> None:
    calls = load.workload_calls(
        NAMED[name], count=12, rate=4.0, vocabulary=range(50), prompt_scale=16, output_scale=64, seed=2
    )
    assert load.starts(calls) == 12 and all(len(call.prompt) == call.prompt_tokens for call in calls)
    assert all(call.slo.name for call in calls)
    for call in calls:
        if call.after is not None:
            before = calls[call.after]
            assert call.prompt[: before.prompt_tokens] == before.prompt and call.at == before.at
    assert any(call.after is not None for call in calls) is (name == "slos-serve-toolllm")
    assert any(call.thinking_tokens for call in calls) is (name == "slos-serve-reasoning")
    assert any(call.slo.service_tier for call in calls) is (name == "slos-serve-mixed-best-effort")


def test_a_file_of_classes(tmp_path: Path) -> None:
    path = tmp_path / "slo.yaml"
    path.write_text(
        "classes:\n  chat: {share: 0.7, ttft: 500ms, tpot: 50ms, tbt: 0.2, tier: interactive}\n"
        "  think: {stages: {thinking: {tpot: 20ms}, answer: {tpot: 60ms}}}\n  night: {best_effort: true}\n"
    )
    assert load_slo_file(path) == (
        SloClass(0.7, Objective(500.0, 50.0, "chat", 200.0, "interactive")),
        SloClass(1.0, Objective(name="think", stages=(("thinking", 20.0), ("answer", 60.0)))),
        SloClass(1.0, Objective(name="night", service_tier="best_effort")),
    )


def test_the_servers_file_of_tiers_gives_a_class_for_each() -> None:
    classes = load_slo_file(preset("slo", "tiers"))
    assert [one.slo.service_tier for one in classes] == [one.slo.name for one in classes]
    assert classes[0].slo == Objective(1000.0, 50.0, "interactive", service_tier="interactive")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("classes: {a: {ttft: -1s}}", "positive"),
        ("classes: {a: {share: 0}}", "share=0"),
        ("classes: {a: {ttfd: 1s}}", "did you mean 'ttft'"),
        ("classes: {a: {tier: x, best_effort: true}}", "tier='x' out"),
        ("classes: {a: {stages: {dreaming: {tpot: 1s}}}}", "dreaming"),
        ("{}", "must have `classes`, or `tiers`"),
        ("classes: {a: {}}\ntiers: {b: {}}", "must have `classes`, or `tiers`"),
    ],
)
def test_mistakes_in_a_file_of_classes_are_named(text: str, part: str, tmp_path: Path) -> None:
    path = tmp_path / "slo.yaml"
    path.write_text(text)
    with pytest.raises(InvalidValue, match=part):
        load_slo_file(path)
    with pytest.raises(InvalidValue, match="is not a file"):
        load_slo_file(tmp_path)

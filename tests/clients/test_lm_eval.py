"""lm-eval scores and generates through `local-completions`, with requests and a task that need no download."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import jaxserve.demo
from tests.support.server.live import MODEL, Live

PROMPT = "def main("
QUESTIONS = [
    {"text": "import", "choices": [" os", " zebra!"], "right": 0},
    {"text": "def __init__(", "choices": ["?? no", "self"], "right": 1},
    {"text": "for i in", "choices": [" range", " zebra!"], "right": 0},
]


@pytest.fixture(scope="module")
def lm(base: str) -> Any:
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    return LocalCompletionsAPI(
        model=MODEL, base_url=f"{base}/completions", tokenizer=str(jaxserve.demo.model_path()),
        tokenizer_backend="huggingface", max_length=512, num_concurrent=1, max_retries=1,
    )  # fmt: skip


@pytest.fixture
def remote(base: str, live: Live) -> Any:
    """A client that has no tokenizer and asks the server for all it needs of one."""
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    return LocalCompletionsAPI(
        model=MODEL, base_url=f"{base}/completions", tokenizer_backend="remote", max_length=512, num_concurrent=1,
        max_retries=1,
    )  # fmt: skip


def instances(kind: str, *arguments: tuple[Any, ...]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, one, at) for at, one in enumerate(arguments)]


def scored(live: Live, tokens: list[int]) -> list[float | None]:
    made = live.client.completions.create(model=MODEL, prompt=tokens, max_tokens=0, echo=True, logprobs=1)
    return list(made.choices[0].logprobs.token_logprobs)


def test_likelihoods_are_those_of_the_server(lm: Any, live: Live) -> None:
    texts = (" self)", " zebra!")
    found = lm.loglikelihood(instances("loglikelihood", *((PROMPT, text) for text in texts)))
    for (value, _), text in zip(found, texts, strict=True):
        context, rest = lm._encode_pair(PROMPT, text)
        assert value == pytest.approx(sum(scored(live, context + rest)[len(context) :]), abs=1e-3)


def test_what_the_model_would_say_is_greedy(lm: Any, live: Live) -> None:
    whole = live.client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=4, temperature=0)
    text = whole.choices[0].text
    (value, greedy), (other, not_greedy) = lm.loglikelihood(
        instances("loglikelihood", (PROMPT, text), (PROMPT, " zebra!"))
    )
    assert greedy and not not_greedy and value > other


def test_a_whole_text(lm: Any) -> None:
    short, long = lm.loglikelihood_rolling(instances("loglikelihood_rolling", ("def f",), ("def f(x): return",)))
    assert long < short < 0


def test_generation(lm: Any, live: Live) -> None:
    (made,) = lm.generate_until(instances("generate_until", (PROMPT, {"until": ["\n"], "max_gen_toks": 12})))
    whole = live.client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=12, temperature=0, stop=["\n"])
    assert made == whole.choices[0].text


def test_a_task(lm: Any, tmp_path: Path) -> None:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    file = tmp_path / "questions.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in QUESTIONS))
    task = {
        "task": "tiny_code", "dataset_path": "json", "test_split": "test", "output_type": "multiple_choice",
        "dataset_kwargs": {"data_files": {"test": str(file)}, "cache_dir": str(tmp_path / "cache")},
        "doc_to_text": "{{text}}", "doc_to_choice": "{{choices}}", "doc_to_target": "{{right}}",
        "target_delimiter": "", "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }  # fmt: skip
    none = TaskManager(include_defaults=False)  # to read the thousands of lm-eval's own takes 13 s
    made = simple_evaluate(lm, tasks=[task], bootstrap_iters=0, task_manager=none)
    assert made["results"]["tiny_code"]["acc,none"] == 1.0


def test_a_remote_tokenizer_is_the_local_one(lm: Any, remote: Any) -> None:
    asked = instances("loglikelihood", (PROMPT, " self)"))
    assert remote.tok_encode(PROMPT) == lm.tok_encode(PROMPT)
    assert remote.loglikelihood(asked) == lm.loglikelihood(asked)
    (made,) = remote.generate_until(instances("generate_until", (PROMPT, {"until": ["\n"], "max_gen_toks": 12})))
    assert [made] == lm.generate_until(instances("generate_until", (PROMPT, {"until": ["\n"], "max_gen_toks": 12})))

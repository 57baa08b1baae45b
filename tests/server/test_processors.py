"""Logits processors of an installed package, over HTTP and offline, on one engine of the demo model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from jaxserve import LLM, SamplingParams
from jaxserve.config import ServeConfig
from jaxserve.errors import InvalidValue
from jaxserve.server.service import Service
from tests.support.processors import package
from tests.support.server.live import ALONE, MODEL, Live

TURNED = {"name": "turned", "argument": 0.5}
PROMPT = "def main("


@pytest.fixture(scope="module")
def processing(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server that was started with two logits processors."""
    from jaxserve.engine.engine import Engine

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(package(tmp_path_factory.mktemp("package")))
        config = ServeConfig.load(
            mesh="1x1", logits_processors=["emptied", "turned"], preempt_boundary="chunk", **ALONE
        )
        engine = Engine.start(config)
    live = Live(Service(engine, tokenizer, config))
    yield live
    live.stop()
    engine.close()


def complete(live: Live, **fields: Any) -> str:
    given = {"model": MODEL, "prompt": PROMPT, "max_tokens": 12, "temperature": 0.0, "ignore_eos": True}
    made = live.http.post("/v1/completions", json=given | fields)
    assert made.status_code == 200, made.text
    return str(made.json()["choices"][0]["text"])


@pytest.mark.parametrize("style", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 3}], ids=str)
def test_requests_ask_for_processors(processing: Live, live: Live, tokenizer: Any, style: dict[str, Any]) -> None:
    free, changed = complete(processing, **style), complete(processing, **style, logits_processors=[TURNED])
    assert free == complete(live, **style) and changed != free  # `live` has no processors
    assert (complete(processing, **style, logits_processors=["turned"]) == changed) is (style["temperature"] == 0.0)
    assert complete(processing, **style, logits_processors=[TURNED], logprobs=1) == changed  # by the other program
    llm = LLM(config=ServeConfig(), engine=processing.engine, tokenizer_object=tokenizer)
    params = SamplingParams(max_tokens=12, ignore_eos=True, logits_processors=[TURNED], **style)  # type: ignore[arg-type]
    assert llm.generate(PROMPT, params, use_tqdm=False)[0].outputs[0].text == changed
    assert processing.engine.stats().compilations_after_warmup == 0


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_all_apis_take_the_field(processing: Live, route: str) -> None:
    name, limit = ("input", "max_output_tokens") if route.endswith("responses") else ("messages", "max_tokens")
    given = {"model": MODEL, name: [{"role": "user", "content": "Hello"}], limit: 1, "temperature": 0.0}
    refused = processing.http.post(route, json=given | {"logits_processors": ["tuned"]})
    assert refused.status_code == 400 and "'tuned'" in refused.text and "emptied, turned" in refused.text
    texts = [processing.http.post(route, json=given | more).text for more in ({}, {"logits_processors": [TURNED]})]
    words = [re.sub(r'"(id|created|created_at)": ?("[^"]*"|[0-9.]+)', "", text) for text in texts]
    assert words[0] != words[1]


@pytest.mark.parametrize("stream", [False, True])
def test_unknown_and_malformed_processors_are_refused(processing: Live, live: Live, stream: bool) -> None:
    given = {"prompt": "x", "stream": stream}
    for server, wrong, why in (
        (processing, ["tuned"], "logits_processors='tuned' is not one of this server's (emptied, turned)"),
        (live, ["turned"], "'turned' is not one of this server's (none: start it with --logits-processors)"),
        (processing, [{"qualname": "a.b"}], "logits_processors=[{'qualname': 'a.b'}] must be a list of names"),
        (processing, "turned", "logits_processors='turned'"),
    ):
        refused = server.http.post("/v1/completions", json=given | {"logits_processors": wrong})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "logits_processors"
        assert why in refused.json()["error"]["message"]


def test_a_structured_output_stays_valid(processing: Live) -> None:
    given = {"temperature": 1.0, "ignore_eos": False, "max_tokens": 40, "guided_regex": "[0-9]{4}-[a-f]{1,6}!"}
    texts = [complete(processing, **given, seed=seed, logits_processors=[TURNED]) for seed in range(3)]
    assert all(re.fullmatch(given["guided_regex"], text) for text in texts)  # type: ignore[call-overload]


@pytest.mark.parametrize("more", [{}, {"guided_regex": "[0-9]{4}"}, {"logprobs": 1}], ids=str)
def test_a_processor_that_leaves_no_token_ends_its_request_alone(processing: Live, more: dict[str, Any]) -> None:
    ended = processing.http.post("/v1/completions", json={"prompt": "x", "logits_processors": ["emptied"], **more})
    assert (ended.status_code, ended.json()["error"]["code"]) == (400, "rejected")
    assert "no token is left to sample after logits_processors" in ended.json()["error"]["message"]
    assert complete(processing) and processing.engine.healthy


def test_a_server_with_an_unknown_processor_does_not_start() -> None:
    from jaxserve.engine.engine import Engine

    with pytest.raises(InvalidValue, match=r"logits_processors='missing': no installed package declares"):
        Engine.start(ServeConfig.load(mesh="1x1", logits_processors=["missing"], **ALONE))

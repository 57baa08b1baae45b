"""Roles of a running server: read, changed during streams, and refused if prefill or decode would be left out."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxserve import LLM, SamplingParams
from jaxserve.errors import InvalidValue
from jaxserve.sched.api.policy import Role

PATH = "/v1/admin/roles"
ADMIN = {"Authorization": "Bearer boss"}
PROMPTS = [f"def add_{n}(a, b):\n    return " for n in range(6)]


@pytest.fixture
def two(live):
    """The real server with its roles restored afterwards."""
    before = dict(enumerate(live.engine.roles))
    yield live
    live.engine.set_roles(before)
    live.quiet()
    live.engine.check()


def texts(live) -> list[str]:
    """Return the texts of concurrent greedy streams of all prompts."""

    def ask(prompt: str) -> str:
        stream = live.client.completions.create(
            model="jaxserve-demo", prompt=prompt, max_tokens=60, temperature=0, stream=True,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        return "".join(chunk.choices[0].text for chunk in stream)

    with ThreadPoolExecutor(len(PROMPTS)) as threads:
        said = threads.map(ask, PROMPTS)
        for roles in (["decode", "prefill"], ["mixed", "mixed"], ["prefill", "decode"], ["mixed", "decode"]) * 2:
            answer = live.http.post(PATH, headers=ADMIN, json={"roles": roles})
            assert answer.status_code == 200 and answer.json()["roles"] == roles
        return list(said)


def test_roles_change_during_streams(two):
    at_rest = [
        two.client.completions.create(
            model="jaxserve-demo", prompt=prompt, max_tokens=60, temperature=0, extra_body={"ignore_eos": True}
        ).choices[0].text
        for prompt in PROMPTS
    ]  # fmt: skip
    assert texts(two) == at_rest
    assert two.engine.stats().compilations_after_warmup == 0


def test_changing_one_instance_returns_all_roles(two):
    before = two.engine.stats().role_changes
    answer = two.http.post(PATH, headers=ADMIN, json={"instance": 0, "role": "mixed"}).json()
    assert answer["object"] == "roles" and answer["roles"] == ["mixed", "decode"]
    assert two.engine.stats().role_changes == before + 1
    told = two.http.get(PATH, headers=ADMIN).json()
    assert told["roles"] == ["mixed", "decode"]
    assert [set(one) for one in told["instances"]] == [{"instance", "name", "role", "running", "waiting"}] * 2


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({}, "instance", "is missing"),
        ({"instance": 0}, "role", "is missing"),
        ({"roles": ["prefill", "prefill"]}, "roles", "incomplete"),
        ({"roles": ["prefill"]}, "roles", "must be a list of 2"),
        ({"roles": "mixed"}, "roles", "list"),
        ({"roles": ["mixed", "boss"]}, "role", "must be one of prefill, decode, mixed"),
        ({"instance": 5, "role": "mixed"}, "instance", "must be 0 to 1"),
        ({"instance": 1, "role": "prefill"}, "roles", "incomplete"),
        ({"instance": 1, "role": "mixed", "roles": ["mixed", "mixed"]}, "roles", "either"),
    ],
)
def test_invalid_roles_are_refused(two, body, param, says):
    answer = two.http.post(PATH, headers=ADMIN, json=body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == param and says in error["message"], error
    assert two.http.get(PATH, headers=ADMIN).json()["roles"] == ["prefill", "decode"]


def test_roles_in_python(two, tokenizer):
    llm = LLM(engine=two.engine, tokenizer_object=tokenizer)
    assert llm.roles == ("prefill", "decode")
    assert llm.set_roles({1: "mixed", 0: "mixed"}) == llm.roles == ("mixed", "mixed")
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    assert llm.generate("def main(", greedy)[0].outputs[0].finish_reason == "length"
    assert llm.set_roles(["decode", "prefill"]) == ("decode", "prefill")
    with pytest.raises(InvalidValue, match="incomplete"):
        llm.set_roles({0: "prefill"})
    assert two.engine.roles == (Role.DECODE, Role.PREFILL)

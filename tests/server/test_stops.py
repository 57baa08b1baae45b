"""Stop strings: bounded in number and length, one automaton per request, constant work per character."""

from __future__ import annotations

import pytest

from jaxserve.errors import InvalidValue
from jaxserve.generation.stops import Automaton, StopStrings
from jaxserve.sched.api.params import SamplingParams


@pytest.mark.parametrize(
    ("stop", "says"),
    [
        (["x" * 1025], "the longest of 1025"),
        ([f"stop{number}" for number in range(65)], "there are 65"),
        ([f"stop{number}" for number in range(10_000)], "at most 64 strings of at most 1024 characters"),
        (["", "a"], "not empty"),
    ],
)
def test_too_many_or_too_long_stop_strings_are_refused_with_the_limits(plain, stop, says):
    for path, body in (
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    ):
        answer = plain.http.post(path, json={**body, "stop": stop})
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["param"] == "stop" and says in error["message"], error
        assert len(error["message"]) < 300
    with pytest.raises(InvalidValue, match="stop_token_ids"):
        SamplingParams(stop_token_ids=tuple(range(1025)))
    allowed = plain.http.post("/v1/completions", json={"prompt": "x", "stop": ["y" * 1024] * 64, "max_tokens": 2})
    assert allowed.status_code == 200


def test_work_per_character_does_not_grow_with_the_number_of_stop_strings():
    """Count visited states per character, over the worst text for the worst stop strings."""

    class Counting(Automaton):
        visited = 0

        def _find(self, node, character):
            self.visited += 1
            return super()._find(node, character)

    text = ("a" * 1023 + "b") * 20
    for stops in (["a" * 1024], [f"{'a' * 1000}{chr(200 + number)}" for number in range(64)]):
        automaton = Counting(stops)
        assert automaton.visited <= 3 * sum(map(len, stops)), "nor does that of building it"
        automaton.visited, state = 0, 0
        for character in text:
            state, _, found = automaton.scan(state, character)
            assert not found
        assert automaton.visited <= 2 * len(text)


def test_of_two_matches_at_one_end_the_longer_wins():
    for stops in (["b", "ab"], ["ab", "b"], ["b", "aab", "ab"]):
        assert StopStrings(stops).add("xaabc")[1] == max(stops, key=len)
    assert StopStrings(["abcd", "bc"]).add("abcd") == ("a", "bc")  # the first match to end


def test_outputs_of_a_request_share_one_automaton(fake, monkeypatch):
    made = []
    init = Automaton.__init__

    def counted(self, stops):
        made.append(tuple(stops))
        init(self, stops)

    monkeypatch.setattr(Automaton, "__init__", counted)
    live = fake()
    body = {"prompt": ["x y z", "z y x"], "stop": ["never"], "n": 5, "max_tokens": 3}
    assert live.http.post("/v1/completions", json=body).status_code == 200
    assert made.count(("never",)) == 1

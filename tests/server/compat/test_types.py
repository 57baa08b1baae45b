"""A value of another type, at every place of a body as agents send it: a refusal that names a field, or an answer."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.fuzz.mutation import AGENTS

VALUES: tuple[Any, ...] = (None, [1], {"type": ["x"]})
BODIES = {path: body for path, body in AGENTS if not path.endswith("input_tokens")}  # whose body is of /v1/responses
Place = tuple[Any, ...]


def places(value: Any, before: Place = ()) -> Iterator[Place]:
    """Yield the keys and indexes that lead to each value within another."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inner:
        yield (*before, key)
        yield from places(one, (*before, key))


def replaced(body: dict[str, Any], place: Place, value: Any) -> dict[str, Any]:
    made = holder = copy.deepcopy(body)
    for key in place[:-1]:
        holder = holder[key]
    holder[place[-1]] = value
    return made


@pytest.mark.parametrize("path", BODIES)
def test_no_type_is_an_error_of_the_server(roomy: Any, path: str) -> None:
    body = {name: value for name, value in BODIES[path].items() if name != "regex"}  # the double has no end of text
    assert roomy.http.post(path, json=body).status_code == 200
    for place in places(body):
        for value in VALUES:
            answer = roomy.http.post(path, json=replaced(body, place, value))
            assert answer.status_code in (200, 400, 404), (place, value, answer.text)
            assert answer.status_code == 200 or answer.json()["error"]["param"], (place, value, answer.text)

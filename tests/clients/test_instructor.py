"""instructor: a class from tools, from JSON and from a schema."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict

from tests.support.server.live import MODEL, Live
from tests.support.shapes import ASK, Trip


def patched(live: Live, mode: str) -> Any:
    import instructor

    return instructor.from_openai(live.client, mode=instructor.Mode[mode])


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
def test_modes_that_force_the_class(live: Live, mode: str) -> None:
    made = patched(live, mode).chat.completions.create(
        model=MODEL, messages=ASK, response_model=Trip, max_tokens=150, max_retries=0
    )
    assert isinstance(made, Trip)


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
def test_partial_answers(live: Live, mode: str) -> None:
    made = list(patched(live, mode).chat.completions.create_partial(
        model=MODEL, messages=ASK, response_model=Trip, max_tokens=150, max_retries=0
    ))  # fmt: skip
    assert len(made) > 1 and Trip.model_validate(made[-1].model_dump())


def test_json(live: Live) -> None:
    """Mode JSON demands any JSON object, and the demo model may write one without end."""
    from instructor.core.exceptions import IncompleteOutputException, InstructorRetryException

    class Anything(BaseModel):
        model_config = ConfigDict(extra="allow")

    asked: dict[str, Any] = {"model": MODEL, "messages": ASK, "response_model": Anything, "max_retries": 0}
    try:
        assert isinstance(patched(live, "JSON").chat.completions.create(**asked, max_tokens=60), Anything)
    except (IncompleteOutputException, InstructorRetryException) as cut:
        assert cut.last_completion.choices[0].message.content.startswith("{")

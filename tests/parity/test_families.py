"""The law of tokens for every model family: meshes, chunks, small pools and migration change no token."""

from __future__ import annotations

import pytest

from jaxserve.models import registry
from tests.support.parity.asks import ROOMY, asks
from tests.support.parity.families import FAMILIES, model
from tests.support.parity.law import LENGTH, PAGE, hold

TIGHT = LENGTH // PAGE + 4
BARE = (("Gemma3", "2x1", 64, TIGHT), ("DeepseekV2", "2x1", 64, TIGHT))
CASES = [
    (name, mesh, chunk, pages) for name in FAMILIES for mesh, chunk, pages in (("2x1", 16, TIGHT), ("2x2", 64, ROOMY))
]
CASES += BARE  # with programs of their own


@pytest.mark.parametrize(("name", "mesh", "chunk", "pages"), BARE)
def test_no_schedule_changes_the_tokens_of_a_family(name: str, mesh: str, chunk: int, pages: int) -> None:
    hold(model(name), asks(1, 6), mesh, chunk, pages, ROOMY, narrow=True)


@pytest.mark.full
@pytest.mark.parametrize(("name", "mesh", "chunk", "pages"), CASES)
def test_no_schedule_changes_the_tokens_of_any_family(name: str, mesh: str, chunk: int, pages: int) -> None:
    hold(model(name), asks(1, 6), mesh, chunk, pages, ROOMY)


def test_every_family_is_tested() -> None:
    assert set(registry.FAMILIES) - {f"{name}ForCausalLM" for name in FAMILIES} == {"Qwen3ForCausalLM"}  # law.SPEC

"""The law of tokens for every model family: meshes, chunks, small pools and migration change no token."""

from __future__ import annotations

import pytest

from jaxserve.models import registry
from tests.support.examples import cases
from tests.support.parity.asks import ROOMY, asks
from tests.support.parity.families import FAMILIES, model
from tests.support.parity.law import LENGTH, PAGE, hold

TIGHT = LENGTH // PAGE + 4
BARE = [(name, "2x1", 64, TIGHT, True) for name in ("Gemma3", "DeepseekV2")]
SHAPES = (("2x1", 16, TIGHT), ("2x2", 64, ROOMY))
CASES = [(name, *shape, False) for name in FAMILIES for shape in SHAPES]
CASES += [(*case[:4], False) for case in BARE]  # with programs of their own


@pytest.mark.parametrize(("name", "mesh", "chunk", "pages", "narrow"), cases(BARE, CASES, apart=True))
def test_no_schedule_changes_the_tokens_of_a_family(name: str, mesh: str, chunk: int, pages: int, narrow: bool) -> None:
    hold(model(name), asks(1, 6), mesh, chunk, pages, ROOMY, narrow=narrow)


def test_every_family_is_tested() -> None:
    others = set(registry.FAMILIES) - {f"{name}ForCausalLM" for name in FAMILIES}
    assert others == {"Qwen3ForCausalLM", "Gemma3ForConditionalGeneration"}  # that of law.SPEC, and Gemma3

"""Each agent reads a file, follows what it says to a second one, and gives an answer that only that file holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxserve.tokenizer import Tokenizer
from tests.support.agents.scripted import Treasure, serving
from tests.support.agents.started import AGENTS, answer


@pytest.mark.parametrize("agent", AGENTS)
def test_an_agent_finishes_a_tool_loop(agent: str, installed: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    treasure = Treasure(tmp_path / "work", mentions=agent == "aider")
    said = answer(agent, installed, tmp_path, treasure, serving(tokenizer, treasure))
    assert treasure.value in said, said[-4000:]
    assert len(treasure.turns) >= 3, treasure.turns

"""Agents as people install them, in tool loops and with errors: `.ci/agents` installs them and runs these tests.

`pytest -n 0 -m agents -W default tests/agents` alone takes what lies in the folder that AGENTS names.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import jaxserve.demo
from jaxserve.tokenizer import Tokenizer

FOLDER = Path(__file__).parent


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    """Leave these files out of other runs."""
    marks = str(config.getoption("markexpr", default=""))
    return None if "agents" in marks and "not agents" not in marks else True


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == FOLDER:
            item.add_marker(pytest.mark.agents)
            item.add_marker(pytest.mark.timeout(400))


@pytest.fixture(scope="session")
def installed() -> Path:
    """The folder in which `.ci/agents` installs."""
    folder = os.environ.get("AGENTS")
    if folder is None:
        pytest.skip("AGENTS names no folder with agents: run .ci/agents")
    return Path(folder)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(jaxserve.demo.model_path())

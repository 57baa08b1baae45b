"""The dashboard in a headless Chromium: `.ci/browser` installs what these tests need, and runs them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import jaxserve.demo
from jaxserve.config import ServeConfig
from jaxserve.server.service import Service
from jaxserve.tokenizer import Tokenizer
from tests.support.browser import Page
from tests.support.server.double import Double
from tests.support.server.live import Live

FOLDER = Path(__file__).parent


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    """Leave these files out of other runs."""
    marks = str(config.getoption("markexpr", default=""))
    return None if "browser" in marks and "not browser" not in marks else True


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == FOLDER:
            item.add_marker(pytest.mark.browser)


@pytest.fixture(scope="session")
def _driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A headless Chromium."""
    missing = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"no {' and no '.join(missing)} on this machine: run .ci/browser on one that has them")
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed: run .ci/browser")
    service = pytest.importorskip("selenium.webdriver.chrome.service")
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for flag in (
        "headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking",
        "disable-component-update", "disable-sync", f"user-data-dir={tmp_path_factory.mktemp('profile')}",
    ):  # fmt: skip
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    made = webdriver.Chrome(options=options, service=service.Service(shutil.which("chromedriver")))
    yield made
    made.quit()


@pytest.fixture
def page(_driver: Any) -> Iterator[Page]:
    """A page without storage, light, of 1200 x 900."""
    made = Page(_driver)
    made.size(1200, 900)
    made.scheme("light")
    yield made
    made.leave()


@pytest.fixture(scope="session")
def axe() -> str:
    """The script that checks accessibility."""
    file = os.environ.get("AXE")
    if file is None:
        pytest.skip("AXE names no file of axe-core: run .ci/browser")
    return Path(file).read_text(encoding="utf-8")


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(jaxserve.demo.model_path())


@pytest.fixture
def serve(tokenizer: Tokenizer) -> Iterator[Callable[..., Live]]:
    """A factory of servers with an engine double that writes a text: `serve("answer")`, with settings."""
    made: list[Live] = []

    def start(writes: str = "Hello.", **settings: Any) -> Live:
        engine = Double()
        engine.writes = tokenizer.encode(writes)
        made.append(Live(Service(engine, tokenizer, ServeConfig.load(disable_log_stats=True, **settings))))
        return made[-1]

    yield start
    for one in made:
        one.stop()

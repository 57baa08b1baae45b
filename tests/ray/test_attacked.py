"""Two fronts of engines in Ray get requests that once ended or stopped servers; those of others are served."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.server.live import connect
from tests.support.server.processes import JOIN, alive, children, served

PROMPT: dict[str, Any] = {"prompt": "x", "max_tokens": 4}
DEFINITIONS = {f"d{at}": {"type": "array", "items": {"$ref": f"#/$defs/d{at + 1}"}} for at in range(2_000)}
BOMBS: list[dict[str, Any]] = [
    {"guided_json": {"$defs": {**DEFINITIONS, "d2000": {"type": "integer"}}, "$ref": "#/$defs/d0"}},
    {"guided_json": {"type": "integer", "multipleOf": 99_999_989}},
    {"guided_json": {"type": "integer", "multipleOf": 99_999_988}},
    {"guided_choice": ["a" * 1_048_566], "n": 200},
    {"guided_choice": ["b" * 524_288 + "c" * 524_278]},
]


@pytest.mark.full
def test_bombs_cost_others_nothing(tmp_path: Path) -> None:
    with served("--ray local --api-server-count 2", tmp_path / "log", replicas=2) as server, ExitStack() as held:
        for _ in range(200):
            held.enter_context(connect(server.url, b"POST /v1/completions HTTP/1.1\r\n"))

        def ask(more: dict[str, Any]) -> int:
            body = {**PROMPT, **more}
            return httpx.post(f"{server.url}/v1/completions", json=body, timeout=JOIN, verify=False).status_code

        fronts = children(server.process.pid)
        assert len(fronts) == 2
        with ThreadPoolExecutor(len(BOMBS)) as clients:
            asked = [clients.submit(ask, bomb) for bomb in BOMBS]
            assert {ask({}) for _ in range(10)} == {200}
            assert {one.result() for one in asked} <= {400, 413, 503}
        assert ask({"guided_regex": "[a-z]{3}"}) == 200 and all(map(alive, fronts))
        assert "is lost" not in server.log.read_text()

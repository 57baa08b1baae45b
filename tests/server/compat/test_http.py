"""HTTP as Java's and Go's clients and proxies use it, and templates as operators give them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

import jaxserve.demo
from jaxserve.config import ServeConfig
from jaxserve.engine.startup.assemble import markers_of
from jaxserve.server.serving import _server
from jaxserve.tokenizer import Tokenizer, template_of
from jaxserve.tools.families import Parsers
from tests.support.server.live import Live

HI = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI, "max_tokens": 1},
    "/v1/completions": {"prompt": "Hi", "max_tokens": 1},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 1},
    "/v1/messages": {"messages": HI, "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": HI},
    "/tokenize": {"prompt": "Hi"},
}


# F1: Java's client offers HTTP/2 with every request.
@pytest.mark.parametrize("path", BODIES)
def test_an_offer_of_http2_is_ignored(plain: Live, path: str) -> None:
    offer = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2-Settings": "AAEAAEAAAAIAAAABAAMAAABk"}
    answer = plain.http.post(path, json=BODIES[path], headers=offer)
    assert answer.status_code == 200, answer.text


# F14: a proxy keeps connections for 60 s, and must be the first to close them.
def test_one_connection_serves_a_client(plain: Live) -> None:
    assert _server(None, ServeConfig.load()).config.timeout_keep_alive > 60
    opened = list[str]()

    def trace(name: str, info: Any) -> None:
        if name == "connection.connect_tcp.complete":
            opened.append(name)

    with httpx.Client(base_url=plain.url, verify=False) as client:
        for path, body in BODIES.items():
            assert client.post(path, json=body, extensions={"trace": trace}).status_code == 200
    assert len(opened) == 1


# F20: the parser and the engine read the thinking tags of the same template.
@pytest.mark.parametrize(("tags", "thinks"), [("<think></think>", True), ("<think>", True), ("no tags", False)])
def test_parser_and_engine_agree_about_a_template(tmp_path: Path, tags: str, thinks: bool) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% if false %}" + tags + "{% endif %}{% endfor %}")
    folder = jaxserve.demo.model_path()
    config = ServeConfig.load(chat_template=str(template))
    markers = markers_of(config, folder, [0])
    parsers = Parsers.of("auto", "auto", template_of(config.chat_template) or "")
    assert bool(markers.closes) is (parsers.tags is not None) is thinks
    if parsers.tags is not None:
        [closing] = parsers.tags.closings
        written = Tokenizer.load(folder).encode(closing, add_special_tokens=False)
        assert tuple(written) in markers.closes

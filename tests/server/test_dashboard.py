"""The page of the dashboard: served without a key, and with a policy that lets nothing foreign in."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import pytest

from jaxserve.report.dashboard_page import FOLDER, files
from tests.support.server.live import Live

SCRIPTS = sorted(path.name for path in FOLDER.glob("*.js"))


def test_the_page_is_there_with_its_policy(plain: Live) -> None:
    for path, kind in (
        ("/", "text/html"),
        ("/dashboard/app.js", "text/javascript"),
        ("/dashboard/style.css", "text/css"),
    ):
        answer = plain.http.get(path)
        assert answer.status_code == 200 and answer.headers["content-type"].startswith(kind)
        policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
        assert policy["default-src"] == "'none'" and policy["script-src"] == policy["connect-src"] == "'self'"
        assert answer.headers["x-content-type-options"] == "nosniff"
    assert plain.http.head("/").status_code == 200


def test_everything_that_the_page_names_is_there(plain: Live) -> None:
    page = plain.http.get("/").text
    named = set(re.findall(r'(?:src|href)="([^"]+)"', page))
    assert named and all(plain.http.get(f"/{one}").status_code == 200 for one in named)
    for name in SCRIPTS:
        for module in re.findall(r'from "\./([\w.]+)"', (FOLDER / name).read_text()):
            assert plain.http.get(f"/dashboard/{module}").status_code == 200, (name, module)


def test_nothing_comes_from_elsewhere_or_is_inline() -> None:
    for path, file in files().items():
        text = file.body.decode()
        urls = [one for one in re.findall(r"https?://[^\s\"'<>)]+", text) if one != "http://www.w3.org/2000/svg"]
        assert not urls, (path, urls)
    page = files()["/"].body.decode()
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=", page)


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_never_make_html_of_text(name: str) -> None:
    text = (FOLDER / name).read_text()
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text)


def test_it_says_which_tiers_there_are(plain: Live) -> None:
    about = plain.http.get("/dashboard/about.json").json()
    assert about["recorded"] is None and "interactive" in about["tiers"]


@pytest.mark.parametrize(
    "path", ["/dashboard/none.js", "/dashboard/app.js/x", "/dashboard/%2e%2e%2fpage.py", "/dashboard/"]
)
def test_other_files_are_not_served(plain: Live, path: str) -> None:
    answer = plain.http.get(path)
    assert answer.status_code == 404 and "error" in json.loads(answer.text)


def test_the_page_needs_no_key_and_its_data_does(fake: Callable[..., Live]) -> None:
    server = fake({"api_key": ("secret",), "protect_metrics": True})
    assert server.http.get("/").status_code == server.http.get("/dashboard/app.js").status_code == 200
    for path in ("/metrics", "/load", "/v1/live", "/v1/requests", "/v1/models"):
        assert server.http.get(path).status_code == 401
    assert server.http.get("/v1/requests", headers={"Authorization": "Bearer secret"}).status_code == 200


def test_it_can_be_turned_off(fake: Callable[..., Live]) -> None:
    server = fake({"dashboard": False})
    for path in ("/", "/dashboard/app.js", "/v1/live", "/v1/requests", "/v1/requests/0"):
        answer = server.http.get(path)
        assert answer.status_code == 404 and answer.json()["error"]["code"] == "unknown_route"

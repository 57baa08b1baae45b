"""The documentation: generated pages are current, links resolve, and figures name their source."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from jaxserve.sched import admission, policies, routing
from jaxserve.sched.api.policy import QueueView

LINK = re.compile(r"\]\(([^)\s#]*)(?:#([^)\s]+))?\)")


def pages(repo: Path) -> list[Path]:
    return sorted((repo / "docs").rglob("*.md"))


def prose(text: str) -> str:
    """Return the text without code blocks."""
    return re.sub(r"(?ms)^ *```.*?^ *```", "", text)


def anchors(path: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and MkDocs make them."""
    heads = re.findall(r"(?m)^#+ +(.*)$", prose(path.read_text(encoding="utf-8")))
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


def test_generated_pages_are_current(repo: Path) -> None:
    """Regenerate flags, metrics and names with `python scripts/docs.py`."""
    command = [sys.executable, "scripts/docs.py", "--check"]
    done = subprocess.run(command, cwd=repo, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_links_resolve_to_files_and_headings(repo: Path) -> None:
    broken = []
    for page in pages(repo):
        for path, anchor in LINK.findall(prose(page.read_text(encoding="utf-8"))):
            if "://" in path:
                continue
            target = page.parent / path if path else page
            if not target.exists():
                broken.append(f"{page.relative_to(repo)}: {path}")
            elif anchor and target.suffix == ".md" and anchor not in anchors(target):
                broken.append(f"{page.relative_to(repo)}: {path}#{anchor}")
    assert broken == []


def test_every_page_is_in_the_navigation(repo: Path) -> None:
    navigation = (repo / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    listed = re.findall(r"([\w/.-]+\.md)$", navigation, re.MULTILINE)
    assert sorted(listed) == [str(page.relative_to(repo / "docs")) for page in pages(repo)]


def test_the_site_loads_nothing_from_elsewhere(repo: Path) -> None:
    """Fonts, diagrams and pictures: Material would fetch Mermaid from a CDN, and rich a font in its pictures."""
    settings = (repo / "mkdocs.yml").read_text(encoding="utf-8")
    assert "font: false" in settings and "http" not in settings.partition("\ntheme:")[2]
    assert [
        page.name for page in pages(repo) if re.search(r"(?m)^ *```mermaid|<script|<iframe", page.read_text())
    ] == []
    assert [
        one.name for one in (repo / "docs").rglob("*.svg") if re.search(r"url\(.?http|href=.http", one.read_text())
    ] == []


def test_pages_hold_no_history(repo: Path) -> None:
    """Commits, and figures without a command, belong in docs/log.md."""
    found = []
    for page in pages(repo):
        if page.name == "log.md":
            continue
        text = page.read_text(encoding="utf-8")
        hashes = [word for word in re.findall(r"\b[0-9a-f]{7,40}\b", text) if re.search("[a-f]", word)]
        found += [f"{page.relative_to(repo)}: {word}" for word in hashes if re.search("[0-9]", word)]
        found += [f"{page.relative_to(repo)}: by hand" for _ in re.findall(r"by\s+hand\b(?!-)", text)]
    assert found == []


def test_links_outside_the_site_are_rewritten(load_file: Callable[[str], ModuleType]) -> None:
    hook = load_file("scripts/docs_links.py")
    page = "guide/plan.md"
    text = "[presets](../../configs/device/published.yaml), [kernels](../reference/kernels.md#a), [x](../../nowhere)"
    assert hook.rewrite(text, page, None) == (
        "presets (`configs/device/published.yaml`), [kernels](../reference/kernels.md#a), [x](../../nowhere)"
    )
    assert hook.rewrite("[README](../../README.md#more)", page, "https://example.org/jaxserve") == (
        "[README](https://example.org/jaxserve/blob/main/README.md#more)"
    )
    assert hook.rewrite("[README.md](../../README.md)", page, None) == "`README.md`"


@pytest.mark.parametrize("names", [policies.names(), sorted(routing.ROUTERS), sorted(admission.ADMISSIONS)])
def test_the_page_of_policies_has_every_name(repo: Path, names: list[str]) -> None:
    page = (repo / "docs" / "reference" / "policies.md").read_text(encoding="utf-8")
    assert [name for name in names if not re.search(rf"`{name}[`:]", page)] == []


def test_the_guide_to_policies_has_every_column(repo: Path) -> None:
    text = (repo / "docs/guide/own-policy.md").read_text(encoding="utf-8").split("## Columns")[1]
    named = {name for row in re.findall(r"(?m)^\| (`.*?) \|", text) for name in re.findall(r"`(\w+)`", row)}
    columns = {name for name, value in vars(QueueView).items() if isinstance(value, property)}
    assert named == columns - {"version", "members", "standard"}, "these describe the queue"


def test_the_status_names_every_jax_that_is_installed(repo: Path) -> None:
    """Those of `pip install` and of the nightly steps."""
    constraints = (repo / ".ci" / "constraints.txt").read_text(encoding="utf-8")
    steps = "".join((repo / ".ci" / name).read_text(encoding="utf-8") for name in ("run", "nightly"))
    wanted = {*re.findall(r"(?m)^jax==(\d+\.\d+)", constraints), *re.findall(r'"jax>=(\d+\.\d+)', steps)}
    [row] = re.findall(r"(?m)^\| Versions \|.*$", (repo / "docs" / "status.md").read_text(encoding="utf-8"))
    assert len(wanted) > 1 and {*re.findall(r"jax (\d+\.\d+)", row)} == wanted

"""Messages name an extra by a command that works, and nothing installs another project's package."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.requirements import Requirement

from jaxserve import install

# The registry's `jaxserve` is not ours. `python -m pip` and options may stand between, and quotes around it.
OTHERS = re.compile(r"""pip3? install\b[^\n`&;|#]{0,80}?[ \t'"]jaxserve(?=$|[\s\['"`,;)=<>~!])""", re.MULTILINE)
TEXT = {".py", ".md", ".ipynb", ".toml", ".yaml", ".yml", ".sh", ".txt", ""}
FOLDERS = (".ci", "benchmarks", "configs", "deploy", "docs", "examples", "jaxserve", "pallas_kernels", "sched")
FOLDERS += ("scripts", "tests")


def test_nothing_installs_the_package_of_that_name_on_the_registry(repo: Path) -> None:
    texts = [path for path in repo.iterdir() if path.is_file()]
    for folder in FOLDERS:
        texts += (repo / folder).rglob("*")
    read = [path for path in texts if path.is_file() and path.suffix in TEXT and path != Path(__file__)]
    assert len(read) > 500
    found = {path: OTHERS.findall(path.read_text(encoding="utf-8", errors="ignore")) for path in read}
    assert {str(path): said for path, said in found.items() if said} == {}
    extras = re.compile(r"\bjaxserve\[[a-z0-9, ]+\]")  # in a requirement, or in words that a reader would paste
    assert [str(path) for path in read if extras.search(path.read_text(encoding="utf-8", errors="ignore"))] == []


REQUIRES = [
    "numpy>=2.0",
    'optax>=0.2.5; extra == "train"',
    'pyzmq>=26; extra == "events"',
    'jaxserve-llm[events,train]; extra == "test"',
    'pytest>=8.3; extra == "test"',
]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let `install` be in site-packages, of a distribution with this direct_url.json (PEP 610)."""
    site = tmp_path / "site-packages"
    monkeypatch.setattr(install, "__file__", str(site / "jaxserve" / "install.py"))

    def install_as(told: dict[str, Any] | None) -> None:
        text = None if told is None else json.dumps(told)
        made = SimpleNamespace(read_text=lambda name: text, requires=REQUIRES)
        monkeypatch.setattr(install, "distributions", lambda name, path: [made] if path == [str(site)] else [])

    return install_as


def test_an_extra_comes_from_where_jaxserve_came(installed: Any, tmp_path: Path) -> None:
    installed({"url": tmp_path.as_uri(), "dir_info": {}})
    assert install.needs("train") == f"pip install '{tmp_path}[train]'"
    wheel = tmp_path / "with space-1.whl"
    wheel.touch()
    installed({"url": wheel.as_uri(), "archive_info": {}})
    assert install.needs("train") == f"pip install '{wheel}[train]'"
    git = {"vcs": "git", "commit_id": "abc123"}
    installed({"url": "https://example.org/x.git", "vcs_info": git})
    assert install.needs("train") == "pip install 'jaxserve-llm[train] @ git+https://example.org/x.git@abc123'"
    installed({"url": "https://example.org/x.git", "vcs_info": {**git, "requested_revision": "v1"}})
    asked = Requirement(install.needs("train").removeprefix("pip install ").strip("'"))
    assert (asked.name, asked.extras, asked.url) == ("jaxserve-llm", {"train"}, "git+https://example.org/x.git@v1")


@pytest.mark.parametrize("told", [None, {"url": "file:///gone/jaxserve_llm-1.whl", "archive_info": {}}])
def test_packages_are_named_if_the_source_is_unknown(installed: Any, told: dict[str, Any] | None) -> None:
    installed(told)
    assert install.needs("events") == "pip install 'pyzmq>=26'"
    assert install.needs("test") == "pip install 'pyzmq>=26' 'optax>=0.2.5' 'pytest>=8.3'"


def test_a_checkout_names_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "__file__", str(tmp_path / "jaxserve" / "install.py"))
    (tmp_path / "pyproject.toml").touch()
    assert install.needs("otel") == f"pip install -e '{tmp_path}[otel]'"

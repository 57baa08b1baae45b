"""scripts/imports prints the import graph and finds circles."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def imports(load_file: Callable[[str], ModuleType]) -> ModuleType:
    return load_file("scripts/imports.py")


def plant(root: Path, **texts: str) -> Path:
    """Write the files of a tree: `sched__policies__edf` is sched/policies/edf.py."""
    for name, text in texts.items():
        path = root / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for package in [path for path in root.rglob("*") if path.is_dir()]:
        (package / "__init__.py").touch()
    return root


TREE = {
    "sched__scheduler": "from .policies.edf import Edf\nfrom . import plan",
    "sched__policies__edf": "from ..plan import Span\nfrom .base import Base",
    "sched__policies__base": "import numpy",
    "sched__plan": "from jaxserve.sched import errors",
    "sched__errors": "import sched",
    "jaxserve__run": "def main():\n    import jaxserve.sched.scheduler",
}


def test_rooms_levels_and_arrows(imports: ModuleType, tmp_path: Path) -> None:
    graph = imports.module_graph(plant(tmp_path, **TREE))
    rooms = imports.room_graph(graph, "jaxserve.sched")
    assert rooms == {"scheduler": {"policies", "plan"}, "policies": {"plan"}, "plan": {"errors"}, "errors": set()}
    assert imports.levels(rooms) == {"errors": 1, "plan": 2, "policies": 3, "scheduler": 4}
    assert graph["jaxserve.run"] == {"jaxserve.sched.scheduler"}, "imports in functions count"
    lines = list(imports.picture(graph, "jaxserve.sched", "sched"))
    assert lines[0] == "sched: 4 rooms on 4 levels, 4 arrows, circles: 0 of rooms, 0 of modules"
    assert "      scheduler -> plan policies" in lines
    assert "  scheduler --> policies" in list(imports.mermaid(rooms))


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("sched__policies__base", "from .edf import Edf", "modules: jaxserve.sched.policies.base <-> "),
        ("sched__errors", "def f():\n    from .plan import Span", "modules: jaxserve.sched.errors <-> "),
        ("sched__plan", "if TYPE_CHECKING:\n    from .scheduler import S", "modules: jaxserve.sched.plan <-> "),
        ("sched__errors", "import jaxserve.sched.plan", "modules: jaxserve.sched.errors <-> jaxserve.sched.plan"),
        ("sched__plan", "from .policies import base", "rooms: jaxserve.sched.plan <-> jaxserve.sched.policies"),
        ("sched__errors", "import jaxserve.run", "rooms: jaxserve.run <-> jaxserve.sched"),
    ],
)
def test_a_planted_circle_is_found(imports: ModuleType, tmp_path: Path, name: str, text: str, found: str) -> None:
    said: list[str] = []
    root = plant(tmp_path, **TREE)
    assert imports.check(root, (), said.append) == 0 and said == []
    assert imports.check(plant(root, **{name: text}), (), said.append) == 1
    assert any(line.startswith(f"circle of {found}") for line in said), said


def test_scripts_that_import_each_other_by_bare_names(imports: ModuleType, tmp_path: Path) -> None:
    said: list[str] = []
    root = plant(tmp_path, benchmarks__common="import soak", benchmarks__soak="from common import ROOT")
    assert imports.check(root, (), said.append) == 1
    assert said == [
        "circle of modules: benchmarks.common <-> benchmarks.soak",
        "circle of rooms: benchmarks.common <-> benchmarks.soak",
    ]


def test_an_allowed_circle_passes_until_it_grows_and_is_reported_once_gone(imports: ModuleType, tmp_path: Path) -> None:
    said: list[str] = []
    root = plant(tmp_path, **{**TREE, "sched__errors": "from . import plan"})
    known = frozenset({"jaxserve.sched.errors", "jaxserve.sched.plan"})
    assert imports.check(root, (known,), said.append) == 0 and said == []
    grown = plant(root, sched__errors="from . import plan, scheduler")
    assert imports.check(grown, (known,), said.append) == 1 and len(said) == 3
    assert said[-1].startswith("note: no circle is left among jaxserve.sched.errors, jaxserve.sched.plan")


def test_the_repository_has_no_other_circle(repo: Path) -> None:
    done = subprocess.run([repo / "scripts" / "imports", "--check"], capture_output=True, text=True, env={**os.environ})
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("flags", "why"),
    [([], "give a package, or --check"), (["no/such"], "package='no/such' must be a folder of Python files")],
)
def test_invalid_flags_are_reported(
    imports: ModuleType, capsys: pytest.CaptureFixture[str], flags: list[str], why: str
) -> None:
    with pytest.raises(SystemExit):
        imports.main(flags)
    assert why in capsys.readouterr().err

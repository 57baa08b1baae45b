"""The repository as a whole: installed files, module names, and allowed imports."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from functools import cache
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from jaxserve.config import ServeConfig

SOURCES = ("jaxserve", "sched", "configs", "pallas_kernels", "pyproject.toml", "README.md", "LICENSE")


def python(code: str, *flags: str, cwd: Path, path: Path | None = None) -> str:
    """Return the output of `code` in a new interpreter with this environment and, before it, `path`."""
    environment = {**os.environ, "PYTHONPATH": str(path) if path else ""}
    done = subprocess.run(
        [sys.executable, *flags, "-c", code], cwd=cwd, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def wheel(repo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An unpacked wheel of the checkout."""
    pytest.importorskip("setuptools", minversion="77")
    work = tmp_path_factory.mktemp("wheel")
    source = work / "source"
    source.mkdir()
    for name in SOURCES:
        if (repo / name).is_dir():
            shutil.copytree(repo / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(repo / name, source / name)
    code = f"from setuptools.build_meta import build_wheel; build_wheel({str(work)!r})"  # as pip does
    subprocess.run([sys.executable, "-c", code], cwd=source, check=True, capture_output=True, timeout=120)
    (built,) = work.glob("jaxserve_llm-*.whl")
    with zipfile.ZipFile(built) as archive:
        archive.extractall(work / "site")
    return work / "site"


def expected(repo: Path, folder: str, installed: str) -> set[str]:
    """Return the files of a folder that users need, by their installed names."""
    kept = {".py", ".yaml", ".json", ".safetensors", ".html", ".jinja"}
    return {
        f"{installed}/{path.relative_to(repo / folder)}"
        for path in (repo / folder).rglob("*")
        if path.is_file() and path.suffix in kept and "__pycache__" not in path.parts
    }


def test_the_wheel_holds_every_module_preset_and_the_demo_model(repo: Path, wheel: Path) -> None:
    have = {str(path.relative_to(wheel)) for path in wheel.rglob("*") if path.is_file()}
    need = expected(repo, "jaxserve", "jaxserve") | expected(repo, "pallas_kernels", "pallas_kernels")
    need |= expected(repo, "sched", "jaxserve/sched") | expected(repo, "configs", "jaxserve/presets")
    assert sorted(need - have) == []


def test_packaged_patterns_match_files(repo: Path) -> None:
    """A pattern without a match is a file that was renamed or never existed."""
    project = tomllib.loads((repo / "pyproject.toml").read_text())
    for package, patterns in project["tool"]["setuptools"]["package-data"].items():
        root = repo if package == "*" else repo / package.replace(".", "/")
        for pattern in patterns:
            found = pattern.removeprefix("**/")
            assert any(root.rglob(found)), f"{package}: {pattern} matches no file"


def test_the_wheel_leaves_the_standard_librarys_sched_alone(wheel: Path, tmp_path: Path) -> None:
    assert {path.name for path in wheel.iterdir() if not path.name.endswith(".dist-info")} == {
        "jaxserve",
        "pallas_kernels",
    }
    code = "import sched, jaxserve.sched as ours; print(sched.scheduler.__module__, ours.__file__)"
    module, file = python(code, cwd=tmp_path, path=wheel).split()
    assert module == "sched"
    assert Path(file) == wheel / "jaxserve/sched/__init__.py"


def test_a_copy_without_the_symlink_is_reported(repo: Path, tmp_path: Path) -> None:
    (tmp_path / "jaxserve").mkdir()
    shutil.copy(repo / "jaxserve/__init__.py", tmp_path / "jaxserve/__init__.py")
    code = "try:\n    import jaxserve\nexcept ImportError as error:\n    print(error)"
    # -S: an editable install would find the checkout's jaxserve.sched.
    assert "jaxserve/sched is missing" in python(code, "-S", cwd=tmp_path, path=tmp_path)


def test_the_symlinks_are_symlinks(repo: Path) -> None:
    assert os.readlink(repo / "jaxserve/sched") == "../sched"
    assert os.readlink(repo / "jaxserve/presets") == "../configs"


# The simulator, the benchmark client and the reports run on a laptop without jax.
WITHOUT_JAX = """
import importlib, pkgutil, sys
import jaxserve, jaxserve.sched, jaxserve.bench, jaxserve.report
for package in (jaxserve.sched, jaxserve.bench, jaxserve.report):
    for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(found.name)
print(*[name for name in ("jax", "flax", "torch", "transformers") if name in sys.modules])
"""


def test_simulator_client_and_reports_import_no_jax(repo: Path) -> None:
    assert python(WITHOUT_JAX, cwd=repo, path=repo) == ""


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_links_and_python_blocks_in_pages_are_valid(repo: Path, page: str) -> None:
    text = (repo / page).read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)#]+)", text):
        assert link.startswith("https://") or (repo / link).exists(), f"{page} links to {link}, which does not exist"
    for block in blocks(re.sub(r"(?m)^   ", "", text), "python"):
        compile(block, page, "exec")


def test_the_readme_requests_the_served_model(repo: Path) -> None:
    text = (repo / "README.md").read_text(encoding="utf-8")
    asked = set(re.findall(r'"model": "([^"]+)"', text) + re.findall(r'model="([^"]+)"', text))
    assert asked == {ServeConfig().names[0]}


def test_what_contributing_says_adds_what_it_says(repo: Path, tmp_path: Path) -> None:
    for name in ("jaxserve", "sched", "configs"):
        ignore = shutil.ignore_patterns("__pycache__", "engine", "models", "*.safetensors")
        shutil.copytree(repo / name, tmp_path / name, symlinks=True, ignore=ignore)
    page = (repo / "CONTRIBUTING.md").read_text(encoding="utf-8")
    page = re.sub(r"(?m)^   (?! )", "", page[: page.index("## Work on it")])
    policy, half, router = blocks(page, "python")
    registry, halves, routers, metric, field, handed, held = blocks(page, "text")
    simulate, serve, checks, decoded, routed = blocks(page, "bash")
    assert serve.startswith("python -m jaxserve.run ") and checks.startswith("scripts/test ")

    def insert(file: str, before: str, line: str) -> None:
        path = tmp_path / file
        text = path.read_text()
        assert text.count(before) == 1, (file, before)
        path.write_text(text.replace(before, f"{line}{before}"))

    simulations: list[tuple[list[str], str]] = []
    for folder, file, text, line, before, command, shows in (
        ("policies", "longest.py", policy, registry, '    "sedf":', simulate, "longest"),
        ("policies", "oldest.py", half, halves, '    "kairos": "kairos.decode', decoded, "decode=oldest"),
        ("routing", "shortest_queue.py", router, routers, '    "unified":', routed, "distserve"),
    ):
        (tmp_path / "sched" / folder / file).write_text(text)
        insert(f"sched/{folder}/__init__.py", before, f"    {line}")
        words = command.replace("--num-requests 200", "--num-requests 10").split()
        assert words[:2] == ["jaxserve", "simulate"]
        simulations.append(([*words[1:], "--out", str(tmp_path / "out"), "--jobs", "1"], shows))
    insert("sched/instance/stats.py", "    generated_tokens: int = 0\n", f"    {metric}")
    insert("jaxserve/server/openai.py", "    request_id: str | None = None\n\n\nclass Drawn", field)
    insert("jaxserve/server/service.py", "                session=session,\n            )\n", handed)
    insert("sched/api/new_request.py", "    waited: float = 0.0", held)
    compile((tmp_path / "jaxserve/server/service.py").read_text(), "service.py", "exec")
    code = f"""
import sys
simulations = {[words for words, _ in simulations]!r}
"""
    code += """
from jaxserve.cli.main import main
from jaxserve.cli.simulate import plots
plots.draw = lambda out, results: []  # they take seconds
for words in simulations:
    assert main(words) == 0
    print("simulated")
assert "jax" not in sys.modules
from jaxserve.sched.api.metric import metrics_of
from jaxserve.sched.api.new_request import NewRequest
from jaxserve.sched.api.params import SamplingParams
from jaxserve.sched.api.slo import SLO
from jaxserve.sched.instance.stats import Counters
from jaxserve.server.openai import CompletionBody, parse
print(sum(one.name == "prompt_chunks" for one in metrics_of(Counters)), Counters.total([Counters(), Counters()]))
label = parse(b'{"prompt": "x", "label": "mine"}', CompletionBody).label
print(NewRequest((), SamplingParams(), SLO(), label=label).described()["label"])
"""
    *simulated, said = python(code, cwd=tmp_path, path=tmp_path).split("simulated\n")
    assert all(shows in table for table, (_, shows) in zip(simulated, simulations, strict=True))
    assert "1 Counters(" in said and "prompt_chunks=0" in said and said.split()[-1] == "mine"


@pytest.mark.parametrize(
    ("file", "extras"),
    [
        ("constraints.txt", ("train", "test", "dev", "audit", "fuzz", "ray")),
        ("constraints-clients.txt", ("train", "test", "clients")),
    ],
)
def test_ci_pins_a_version_of_everything_it_installs(repo: Path, file: str, extras: tuple[str, ...]) -> None:
    """New or stricter dependencies need new pins, as the head of the file says."""
    project = tomllib.loads((repo / "pyproject.toml").read_text())["project"]
    asked = list(project["dependencies"])
    for extra in extras:
        asked += project["optional-dependencies"][extra]
    pins: dict[str, list[Requirement]] = {}
    for line in (repo / ".ci" / file).read_text().splitlines():
        if line and not line.startswith("#"):
            pin = Requirement(line)
            pins.setdefault(canonicalize_name(pin.name), []).append(pin)
    for requirement in map(Requirement, asked):
        name = canonicalize_name(requirement.name)
        if name == project["name"]:
            continue
        assert name in pins, f"{name} is not in .ci/{file}"
        for pin in pins[name]:
            (version,) = (one.version for one in pin.specifier)
            assert requirement.specifier.contains(version), (
                f"{pin} is pinned, and pyproject.toml requires {requirement}"
            )
    run = (repo / ".ci" / "run").read_text()
    assert run.count("pip install --quiet --no-compile -c .ci/constraints.txt") == 3
    assert run.count("install --quiet --no-compile -c .ci/constraints-clients.txt") == 1


@pytest.mark.parametrize("name", ["run", "nightly", "compiler"])
def test_ci_scripts_are_valid_bash(repo: Path, name: str) -> None:
    subprocess.run(["bash", "-n", str(repo / ".ci" / name)], check=True)


def test_the_nightly_script_names_what_is_there(repo: Path) -> None:
    path = repo / ".ci" / "nightly"
    assert os.access(path, os.X_OK)
    text = path.read_text()
    (extras,) = re.findall(r"pip install .*'\.\[(.*)\]'", text)
    assert {"dev", "audit", "fuzz"} <= set(extras.split(",")), "without schemathesis its test is skipped"
    ours = set(re.findall(r"tested ((?:\.ci|scripts)/\w+)", text))
    assert ours == {".ci/audit", ".ci/agents", ".ci/browser", "scripts/mutants"} and all(
        os.access(repo / command, os.X_OK) for command in ours
    )
    places = set(re.findall(r"tests/\w+", " ".join(re.findall(r"(?m)^step full-.* full (.*)$", text))))
    marked = {file for file in (repo / "tests").rglob("test_*.py") if "mark.full" in file.read_text(encoding="utf-8")}
    folders = {file.relative_to(repo).parts[1] for file in marked if file.parent != repo / "tests"}
    assert folders and folders <= {place.removeprefix("tests/") for place in places}
    for given in re.findall(
        r'(?m)^(?:step [\w.-]+ |(?:base|product|support|processes|computes|planted|kernels)\+?=)"([^"]*)"', text
    ):
        for read in re.sub(r"\$\w+|\+compiled", "", given).split():
            assert (repo / read).exists(), f"a step reads {read}, which does not exist"


def test_nightly_steps_read_the_helpers_of_their_tests(repo: Path) -> None:
    """Otherwise a changed helper would leave the step of its tests passed."""
    text = (repo / ".ci" / "nightly").read_text()
    steps = text[text.index('\nbase="') : text.index("\n[[ ${wanted")]
    shown = ["bash", "-c", 'step() { echo "$@"; }\n' + steps]
    said = subprocess.run(shown, cwd=repo, capture_output=True, text=True, check=True).stdout
    checked = 0
    for paths, folders in re.findall(r"(?m)^full-\w+ (.*) full (.*)$", said):
        read = paths.split()
        files = [file for folder in folders.split() for file in (repo / folder).rglob("*.py")]
        for file in files if "." not in read else ():
            for name in re.findall(r"(?m)^from tests\.support\.([\w.]+) import", file.read_text(encoding="utf-8")):
                helper = f"tests/support/{name.replace('.', '/')}"
                checked += 1
                assert any(f"{helper}.py" == one or f"{helper}/".startswith(f"{one}/") for one in read), (file, helper)
    assert checked > 100


def nightly_of(repo: Path, tmp_path: Path, steps: str) -> Path:
    """Return a repository whose nightly script has these steps."""
    head, rest = (repo / ".ci" / "nightly").read_text().split('\nbase="', 1)
    tail = rest[rest.index("[[ ${wanted[0]:-} == --list ]] && exit") :]
    tree = tmp_path / "tree"
    (tree / ".ci").mkdir(parents=True)
    (tree / ".ci" / "nightly").write_text(f"{head}\n{steps}{tail}")
    (tree / ".ci" / "compiler").write_text("")
    shutil.copy(repo / ".ci" / "digest.py", tree / ".ci")
    (tree / "src").mkdir()
    (tree / "src" / "a.py").write_text("1")
    (tree / "pyproject.toml").write_text("[project]\n")
    subprocess.run(["git", "init", "-q"], cwd=tree, check=True)
    return tree


def test_the_nightly_script_resumes(repo: Path, tmp_path: Path) -> None:
    """A step runs again after it failed, or after a change of what it reads; nothing else makes it run."""
    steps = 'step one "src pallas_kernels" bash -c "echo one >>../log"\n'
    steps += 'step two . bash -c "echo two >>../log; test ! -e broken"\n'
    steps += 'step three examples bash -c "echo three >>../log"\n'
    tree = nightly_of(repo, tmp_path, steps)
    (tree / "examples").mkdir()
    (tree / "examples" / "a.ipynb").write_text("1")

    def run(*names: str) -> tuple[int, list[str]]:
        log = tmp_path / "log"
        log.unlink(missing_ok=True)
        done = subprocess.run(["bash", ".ci/nightly", *names], cwd=tree, capture_output=True, text=True)
        return done.returncode, log.read_text().split() if log.exists() else []

    assert run("two", "three") == (0, ["two", "three"])
    assert run() == (0, ["one"])
    (tree / "README.md").write_text("docs change no step")
    assert run() == (0, [])
    (tree / "broken").touch()
    assert run() == (1, ["two"]), "two reads everything"
    assert run() == (1, ["two"]), "a step that failed is not recorded"
    (tree / "broken").unlink()
    assert run() == (0, []), "this digest has passed"
    for path, text, ran in (
        ("examples/a.ipynb", "2", "three"),  # only a step that names the notebooks reads them
        ("src/a.py", '"""What it does."""\n2  # why', "one two"),
        ("src/a.py", '"""What else it does."""\n2  # why not', "two"),  # comments and docstrings do nothing
        ("pallas_kernels/gate/a.py", "", "two"),  # a step that compiles no kernels reads neither
        ("pallas_kernels/ops/b/hopper.py", "", "two"),
        ("pyproject.toml", "[project]\nname\n[tool.importlinter]\n1", "one two three"),
        ("pyproject.toml", "[project]\nname\n[tool.importlinter]\n2", "two"),
    ):
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        (tree / path).write_text(text)
        assert run() == (0, ran.split()), path


def test_a_nightly_step_that_cannot_run_here_is_named_and_not_recorded(repo: Path, tmp_path: Path) -> None:
    tree = nightly_of(repo, tmp_path, 'step far src bash -c "exit $(cat status)"\n')
    for status, code, word in ((75, 0, "not run, for what this machine lacks: far"), (1, 1, "failed: far")):
        (tree / "status").write_text(str(status))
        done = subprocess.run(["bash", ".ci/nightly"], cwd=tree, capture_output=True, text=True)
        assert done.returncode == code and word in done.stdout
        assert not (tree / ".ci" / "nightly.passed").exists()


@pytest.mark.parametrize(
    ("said", "status", "audited"),
    [
        ("No known vulnerabilities found", 0, True),
        ("Found 2 known vulnerabilities in 1 package\nName Version ID\njinja2 3.1.5 PYSEC-1", 1, True),
        ("ERROR:pip_audit._cli:absl-py: Dependency not found on PyPI and could not be audited: absl-py (2.5.1)", 1,
         False),
        ("", 127, False),
    ],
)  # fmt: skip
def test_an_audit_without_a_database_has_not_run(
    repo: Path, tmp_path: Path, said: str, status: int, audited: bool
) -> None:
    fake = tmp_path / "pip-audit"
    fake.write_text(f'#!/bin/sh\n[ -f .ci/constraints.txt ] || exit 9\ncat <<"."\n{said}\n.\nexit {status}\n')
    fake.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run([repo / ".ci" / "audit"], env={**os.environ, "PATH": path}, capture_output=True, text=True)
    assert done.returncode == (status if audited else 75) and said in done.stdout
    assert ("NOT AUDITED" in done.stderr) is not audited


@cache
def defined(path: Path) -> set[str]:
    """Return the tests in a module: functions, methods as `Class::method`, and classes made by assignment."""
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}::{one.name}" for one in node.body if isinstance(one, ast.FunctionDef)}
        if isinstance(node, ast.Assign):
            for target in (one for one in node.targets if isinstance(one, ast.Name)):
                names |= {target.id, f"{target.id}::runTest"}  # TestPool = Pool.TestCase
    return names


def test_every_named_test_exists(repo: Path) -> None:
    """This covers names in the docs and in the table of scripts/mutants."""
    pages = [*repo.glob("*.md"), *(repo / "docs").rglob("*.md"), repo / "scripts" / "mutants.yaml"]
    named = {
        (file, name, page.name)
        for page in pages
        for file, name in re.findall(r"(tests/[\w/]+\.py)::(\w+(?:::\w+)?)", page.read_text(encoding="utf-8"))
    }
    assert len(named) > 50
    wrong = [one for one in named if not (repo / one[0]).is_file() or one[1] not in defined(repo / one[0])]
    assert not wrong

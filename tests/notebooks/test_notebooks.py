"""The notebooks run from their first cells to their last in a real kernel with a running event loop."""

from __future__ import annotations

import glob
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatch
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nbformat
import pytest

from jaxserve.cli import flags
from tests.support.examples import cases

# Appended to the notebook's cells: start an engine and read from it on the kernel's loop.
ASYNC = """
import asyncio

from jaxserve import AsyncLLM

assert asyncio.get_running_loop().is_running()
allm = AsyncLLM(max_model_len=256, max_num_seqs=8, profile_time="1s")
async for output in allm.generate("def main(", params):
    pass
print("the same tokens:", output.outputs[0].token_ids == outputs[0].outputs[0].token_ids)
allm.close()
"""


NAMES = ("quickstart", "write_a_policy", "slack_decoding", "serve", "plan_a_cluster")
SAID = {  # what the cells print, whatever the speed of the machine
    "quickstart": ("def main(", "class Stack:", "kept: ", "programs compiled while serving: 0"),
    "write_a_policy": ("file:./on_time.py:OnTime at 12/s: ", "kairos at 12/s: "),
    "slack_decoding": ("kairos: long ", "Attained both objectives."),
    "serve": ("ready after ", "http://127.0.0.1:", "first token after ", "ended with status 0"),
    "plan_a_cluster": ("recommended mesh ", "v5e:8: mesh ", "instances: 4, 32/s: "),
}


@pytest.fixture(scope="module")
def books(repo: Path) -> dict[str, Any]:
    return {name: nbformat.read(repo / "examples" / f"{name}.ipynb", as_version=4) for name in NAMES}


@pytest.fixture(scope="module")
def notebook(books: dict[str, Any]) -> Any:
    return books["quickstart"]


def printed(cell: Any) -> str:
    return "".join(output.text for output in cell.outputs if output.output_type == "stream" and output.name == "stdout")


def codes(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_every_notebook_is_clean_listed_and_installs_in_the_same_way(repo: Path, books: dict[str, Any]) -> None:
    assert {path.stem for path in (repo / "examples").glob("*.ipynb")} == set(NAMES)
    page = (repo / "docs" / "guide" / "notebooks.md").read_text(encoding="utf-8")
    first = [cell.source for cell in codes(books["quickstart"])[:2]]
    for name, book in books.items():
        nbformat.validate(book)
        assert not any(cell.outputs or cell.execution_count for cell in codes(book)), "no outputs are committed"
        assert [cell.source for cell in codes(book)[:2]] == first
        assert f"examples/{name}.ipynb" in page
        for cell in book.cells:
            for link in re.findall(r"\]\((\.\.[^)#]+)", cell.source):
                assert (repo / "examples" / link).exists(), f"{name} links to {link}, which does not exist"


# In a separate process: nbclient leaves sockets open, and the warning would be an error here.
EXECUTE = """
import sys

import nbformat
from nbclient import NotebookClient

path, folder = sys.argv[1:]
notebook = nbformat.read(path, as_version=4)
NotebookClient(notebook, kernel_name="python3", timeout=900, resources={"metadata": {"path": folder}}).execute()
nbformat.write(notebook, path)
"""


def executed(notebook: Any, repo: Path, folder: Path, *more: str) -> Any:
    """Run a notebook, and `more` cells behind it, in a kernel that finds jaxserve. Its files go to `folder`."""
    run, path = nbformat.from_dict(notebook), folder / "run.ipynb"
    run.cells += [nbformat.v4.new_code_cell(cell) for cell in more]
    nbformat.write(run, path)
    command = [sys.executable, "-c", EXECUTE, str(path), str(folder)]
    environment = os.environ | {"PYTHONPATH": str(repo), "MPLBACKEND": "module://matplotlib_inline.backend_inline"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return nbformat.read(path, as_version=4)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", cases(["slack_decoding"], [name for name in NAMES if name != "slack_decoding"]))
def test_a_notebook_runs_in_a_kernel(name: str, books: dict[str, Any], repo: Path, tmp_path: Path) -> None:
    run = executed(books[name], repo, tmp_path, *([ASYNC] if name == "quickstart" else []))
    said = [printed(cell) for cell in codes(run)]
    assert said[:2] == ["", ""], "the install cell found jaxserve and changed nothing"
    missing = [text for text in SAID[name] if text not in "".join(said)]
    assert not missing, f"{missing} in {said}"
    pictures = [one for cell in codes(run) for one in cell.outputs if "image/png" in one.get("data", {})]
    assert pictures, "a notebook draws something"
    if name == "quickstart":
        assert "the same tokens: True" in said[-1]
    if name == "write_a_policy":
        shares = [tuple(map(float, re.findall(rf"{policy} at \d+/s: ([\d.]+)%", "".join(said)))) for policy in
                  ("OnTime", "kairos")]  # fmt: skip
        assert len(shares[0]) == 3 and all(mine > theirs for mine, theirs in zip(*shares, strict=True))


@pytest.mark.parametrize(("machine", "devices"), [("v5e-1", ["/dev/vfio/0"]), ("v5e-8", ["/dev/accel0"] * 8)])
def test_the_compile_gate_has_the_server_of_a_tpu(
    machine: str, devices: list[str], books: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its programs are compiled for what the notebook's cell asks on that machine."""
    from jaxserve.engine.startup.aot_tpu import NOTEBOOK

    (source,) = (cell.source for cell in codes(books["serve"]) if "DEVICE = extra()" in cell.source)
    monkeypatch.setattr("glob.glob", lambda pattern: [name for name in devices if fnmatch(name, pattern)])
    names: dict[str, Any] = {"extra": lambda: "[tpu]", "glob": glob}
    exec(source, names)
    parser = flags.TeachingParser()
    flags.add_arguments(parser)
    asked = flags.config_of(parser.parse_args(names["flags"]))
    assert replace(asked, port=NOTEBOOK[machine].port) == NOTEBOOK[machine]


@pytest.fixture
def install_cell(notebook: Any, repo: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Run the install cell as on another machine; returns the arguments of each pip call."""
    (source,) = (cell.source for cell in notebook.cells if cell.get("id") == "install")

    def run(
        *,
        smi: str | None = None,
        tpu: bool = False,
        environ: dict[str, str] | None = None,
        given: str = str(repo),
        found: bool = False,
    ) -> list[str]:
        called: list[str] = []

        def ran(command: list[str], **_: Any) -> SimpleNamespace:
            if command == ["nvidia-smi"]:
                return SimpleNamespace(stdout=smi)
            assert command[:3] == [sys.executable, "-m", "pip"]
            called.append(" ".join(command[3:]))
            return SimpleNamespace(stdout="")

        with monkeypatch.context() as patch:
            patch.setattr("importlib.util.find_spec", lambda name: found or None)
            patch.setattr("shutil.which", lambda name: None if smi is None else f"/usr/bin/{name}")
            patch.setattr("glob.glob", lambda pattern: ["/dev/accel0"] if tpu and "accel" in pattern else [])
            patch.setattr(subprocess, "run", ran)
            patch.delenv("TPU_ACCELERATOR_TYPE", raising=False)
            for name, value in (environ or {}).items():
                patch.setenv(name, value)
            exec(source, {"SOURCE": given})
        return called

    return run


def test_the_install_cell_selects_the_extra_for_the_machine(install_cell: Callable[..., list[str]], repo: Path) -> None:
    old, new = "| Driver Version: 550.54.15  CUDA Version: 12.4 |", "| CUDA Version: 13.0 |"
    assert install_cell() == [f"install --quiet {repo}"]
    assert install_cell(smi=old) == [f"install --quiet {repo}[cuda12]"]
    assert install_cell(smi=new) == [
        "uninstall --quiet --yes jax-cuda12-plugin jax-cuda12-pjrt",
        f"install --quiet {repo}[cuda]",
    ]
    assert install_cell(smi="NVIDIA-SMI has failed") == [f"install --quiet {repo}"]
    assert install_cell(tpu=True) == [f"install --quiet {repo}[tpu]"]
    assert install_cell(environ={"TPU_ACCELERATOR_TYPE": "v5e-1"}) == [f"install --quiet {repo}[tpu]"]
    extras = tomllib.loads((repo / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {"cuda", "cuda12", "tpu"} <= set(extras)


def test_the_install_cell_takes_a_wheel_or_a_git_url(install_cell: Callable[..., list[str]]) -> None:
    (wheel, url) = "/content/jaxserve_llm-0.1.0-py3-none-any.whl", "git+https://example.org/jaxserve"
    assert install_cell(given=wheel, tpu=True) == [f"install --quiet {wheel}[tpu]"]
    assert install_cell(given=url, tpu=True) == [f"install --quiet jaxserve-llm[tpu] @ {url}"]
    with pytest.raises(SystemExit, match=r"SOURCE = '/nowhere' is no checkout: set it to one, to a wheel, or to git"):
        install_cell(given="/nowhere")


@pytest.mark.parametrize("found", [False, True], ids=["installs", "finds jaxserve"])
def test_the_install_cell_stops_where_an_older_jax_is_loaded(
    found: bool, install_cell: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cells after it would fail deep in jax, and a second run without a restart would not install again."""
    monkeypatch.setitem(sys.modules, "jax", SimpleNamespace(__version__="0.1"))
    with pytest.raises(SystemExit, match=r"^Restart the runtime, .*: an older jax is still loaded\.$"):
        install_cell(found=found)


def test_the_install_cell_says_what_it_does(
    install_cell: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert not install_cell(found=True)
    assert not capsys.readouterr().out
    install_cell()
    told = capsys.readouterr().out
    assert told.startswith("Installing jaxserve") and f"Installed, with jax {version('jax')}." in told

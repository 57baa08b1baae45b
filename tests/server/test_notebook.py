"""The notebook runs from its first cell to its last in a real kernel with a running event loop."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nbformat
import pytest

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


@pytest.fixture(scope="module")
def notebook(repo: Path) -> Any:
    return nbformat.read(repo / "examples" / "quickstart.ipynb", as_version=4)


def printed(cell: Any) -> str:
    return "".join(output.text for output in cell.outputs if output.output_type == "stream" and output.name == "stdout")


def test_no_outputs_are_committed(notebook: Any) -> None:
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert len(code) > 4 and not any(cell.outputs or cell.execution_count for cell in code)


# In a separate process: nbclient leaves sockets open, and the warning would be an error here.
EXECUTE = """
import sys

import nbformat
from nbclient import NotebookClient

path, folder = sys.argv[1:]
notebook = nbformat.read(path, as_version=4)
NotebookClient(notebook, kernel_name="python3", timeout=240, resources={"metadata": {"path": folder}}).execute()
nbformat.write(notebook, path)
"""


@pytest.mark.full
def test_the_notebook_runs_in_a_kernel(
    notebook: Any, repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(repo))
    run, path = nbformat.from_dict(notebook), tmp_path / "run.ipynb"
    run.cells.append(nbformat.v4.new_code_cell(ASYNC))
    nbformat.write(run, path)
    command = [sys.executable, "-c", EXECUTE, str(path), str(repo / "examples")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    run = nbformat.read(path, as_version=4)
    said = [printed(cell) for cell in run.cells if cell.cell_type == "code"]
    assert said[:2] == ["", ""], "the install cell found jaxserve and changed nothing"
    assert "def main(" in said[3] and "class Stack:" in said[3]
    assert said[4].count("kept:") == 2
    assert "programs compiled while serving: 0" in said[5]
    assert "the same tokens: True" in said[-1]


@pytest.fixture
def install_cell(notebook: Any, repo: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Run the install cell as on another machine; returns the arguments of each pip call."""
    (source,) = (cell.source for cell in notebook.cells if cell.get("id") == "install")

    def run(
        *, smi: str | None = None, tpu: bool = False, environ: dict[str, str] | None = None, given: str = str(repo)
    ) -> list[str]:
        called: list[str] = []

        def ran(command: list[str], **_: Any) -> SimpleNamespace:
            if command == ["nvidia-smi"]:
                return SimpleNamespace(stdout=smi)
            assert command[:3] == [sys.executable, "-m", "pip"]
            called.append(" ".join(command[3:]))
            return SimpleNamespace(stdout="")

        with monkeypatch.context() as patch:
            patch.setattr("importlib.util.find_spec", lambda name: None)
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


def test_the_install_cell_asks_for_a_restart_if_needed(
    install_cell: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "jax", SimpleNamespace(__version__="0.1"))
    install_cell()
    assert "jax was imported before it was updated: restart the runtime" in capsys.readouterr().out

"""The embedded model: what the server serves when no `--model` is named. And its draft, for speculation.

A 5 M parameter Llama that was trained on CPython's standard library (see README.md beside this file), and a smaller one
that `jaxserve distill` trained on what it says. Both are ordinary Hugging Face folders; nothing in the engine knows
that they are special.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path


def model_path() -> Path:
    """Return the folder of the embedded model.

    Raises:
        FileNotFoundError: the installed package lacks the folder, or lies inside an archive.
    """
    return _folder("model", "`python -m jaxserve.demo.train`")


def draft_path() -> Path:
    """Return the folder of its draft model: `--speculative-config '{"method": "draft_model", "model": FOLDER}'`.

    Raises:
        FileNotFoundError: the installed package lacks the folder, or lies inside an archive.
    """
    return _folder("draft", "`jaxserve distill`")


def _folder(name: str, maker: str) -> Path:
    folder = Path(str(resources.files(__name__).joinpath(name)))
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"the embedded {name} is not at {folder}; {maker} makes it")
    return folder

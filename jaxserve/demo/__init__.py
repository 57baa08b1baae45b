"""The embedded model, which is served if no `--model` is given, and its draft for speculative decoding.

The model is a Llama with 5 M parameters that was trained on CPython's standard library (see README.md in
this folder). Its draft is a smaller Llama that `jaxserve distill` trained on its outputs. Both are
ordinary Hugging Face folders, which the engine loads like any other model.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path


def model_path() -> Path:
    """Return the folder of the embedded model.

    Raises:
        FileNotFoundError: the installed package lacks the folder, or is inside an archive.
    """
    return _folder("model", "`python -m jaxserve.demo.train`")


def draft_path() -> Path:
    """Return the folder of the draft, for `--speculative-config '{"method": "draft_model", "model": FOLDER}'`.

    Raises:
        FileNotFoundError: the installed package lacks the folder, or is inside an archive.
    """
    return _folder("draft", "`jaxserve distill`")


def _folder(name: str, maker: str) -> Path:
    folder = Path(str(resources.files(__name__).joinpath(name)))
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"the embedded {name} is not at {folder}; {maker} creates it")
    return folder

"""The embedded model: what the server serves when no `--model` is named.

A 5 M parameter Llama that was trained on CPython's standard library (see README.md beside this file). It is
an ordinary Hugging Face folder; nothing in the engine knows that it is special.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path


def model_path() -> Path:
    """Return the folder of the embedded model.

    Raises:
        FileNotFoundError: the installed package lacks the folder, or lies inside an archive.
    """
    folder = Path(str(resources.files(__name__).joinpath("model")))
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"the embedded model is not at {folder}; `python -m jaxserve.demo.train` makes it")
    return folder

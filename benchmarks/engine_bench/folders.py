"""Folders of models without weights, to serve with `--load-format dummy`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxserve.demo import model_path


def without_weights(folder: Path, changes: Mapping[str, Any]) -> Path:
    """Write a model folder: the demo model's tokenizer, and its config with changes."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in model_path().iterdir():
        if path.suffix in (".json", ".jinja"):
            shutil.copy(path, folder / path.name)
    config = json.loads((model_path() / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, **changes}), encoding="utf-8")
    return folder

"""From a model's name to a folder of its files."""

from __future__ import annotations

from pathlib import Path

from jaxserve.sched.api.errors import InvalidValue, JaxserveError

DESCRIPTION = ("*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken")  # what configs and tokenizers are made of
WEIGHTS = ("*.safetensors",)  # not the same weights in other formats
FILES = (*WEIGHTS, *DESCRIPTION)
SKIPPED = ("original/*", "onnx/*", "consolidated*.safetensors")


class ModelNotFound(JaxserveError):
    """A model that is neither a folder here nor to be had from the Hub."""


def resolve_model(
    name_or_path: str, revision: str | None = None, *, weights: bool = True, setting: str = "model"
) -> Path:
    """Return the folder of a model: `name_or_path` where it is a folder, else a snapshot of the Hub's repository.

    Downloads on first use, without `weights` only config and tokenizer. The environment is huggingface_hub's: HF_HOME,
    HF_TOKEN, HF_HUB_OFFLINE, HF_ENDPOINT. Raises InvalidValue naming `setting`, or ModelNotFound.
    """
    path = Path(name_or_path).expanduser()
    if name_or_path and path.is_dir():
        return path
    check_folder(name_or_path, setting)
    return _fetch(name_or_path, revision, FILES if weights else DESCRIPTION, setting)


def check_folder(name_or_path: str, setting: str = "model") -> None:
    """Raise InvalidValue where the name can only be a folder's, and there is no such folder. Asks no network."""
    if name_or_path and Path(name_or_path).expanduser().is_dir():
        return
    if name_or_path.count("/") > 1 or name_or_path.startswith((".", "/", "~")) or not name_or_path:
        files = {"model": "config.json and *.safetensors", "tokenizer": "tokenizer.json or the like"}
        raise InvalidValue(
            f"{setting} folder {name_or_path!r} does not exist; expected a folder with {files[setting]}, or a Hugging "
            "Face Hub id such as Qwen/Qwen3-8B",
            setting,
        )


def fetch_config(name: str, revision: str | None = None) -> Path:
    """A folder with the config.json of a repository of the Hub, without weights. Raises ModelNotFound."""
    return _fetch(name, revision, ("config.json",))


def _fetch(name: str, revision: str | None, files: tuple[str, ...], setting: str = "model") -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(name, revision=revision, allow_patterns=list(files), ignore_patterns=list(SKIPPED))
        )
    except Exception as error:  # its errors come from five libraries; each means: no such files
        at = f" at revision {revision!r}" if revision else ""
        raise ModelNotFound(
            f"{setting} {name!r}{at} is not a folder here, and the Hub did not give it: "
            f"{type(error).__name__}: {_in_a_line(error)}\nWhere there is a network, run `hf download {name}` "
            "(private and gated models need HF_TOKEN); then either copy the Hub cache (HF_HOME) to this machine, or "
            f"copy config.json, *.safetensors and the tokenizer's files into a folder and pass its path as --{setting}"
        ) from error


def _in_a_line(error: Exception, limit: int = 300) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= limit else text[:limit] + " …"

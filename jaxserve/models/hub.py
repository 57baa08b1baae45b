"""Find the folder of a model by name, downloading it from the Hugging Face Hub if necessary."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from jaxserve.sched.api.errors import InvalidValue, JaxserveError

DESCRIPTION = ("*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken")  # files of configs and tokenizers
WEIGHTS = ("*.safetensors",)  # repositories may also hold the same weights in other formats
FILES = (*WEIGHTS, *DESCRIPTION)
OLDER = (".bin", ".pt", ".pth", ".gguf")  # weights in formats that are not read
SKIPPED = ("original/*", "onnx/*", "consolidated*.safetensors")


class ModelNotFound(JaxserveError):
    """Raised for a model that is neither a local folder nor available from the Hub."""


def resolve_model(
    name_or_path: str, revision: str | None = None, *, weights: bool = True, setting: str = "model"
) -> Path:
    """Return `name_or_path` if it is a folder, else the folder of a snapshot of the Hub repository.

    Downloads on first use; with `weights` False only config and tokenizer. Honors huggingface_hub's
    HF_HOME, HF_TOKEN, HF_HUB_OFFLINE and HF_ENDPOINT. Raises InvalidValue that names `setting`, or
    ModelNotFound.
    """
    path = Path(name_or_path).expanduser()
    if name_or_path and path.is_dir():
        return path
    check_folder(name_or_path, setting)
    return _fetch(name_or_path, revision, FILES if weights else DESCRIPTION, setting)


def check_folder(name_or_path: str, setting: str = "model") -> None:
    """Raise InvalidValue if the name can only be a path and that folder does not exist. Needs no network."""
    if name_or_path and Path(name_or_path).expanduser().is_dir():
        return
    if name_or_path.endswith(".gguf"):
        raise InvalidValue(f"{setting} {name_or_path!r} is a GGUF file{_gguf(Path(name_or_path))}", setting)
    if name_or_path.count("/") > 1 or name_or_path.startswith((".", "/", "~")) or not name_or_path:
        files = {"model": "config.json and *.safetensors", "tokenizer": "tokenizer.json or the like"}
        raise InvalidValue(
            f"{setting} folder {name_or_path!r} does not exist; expected a folder with {files[setting]}, or a Hugging "
            "Face Hub id such as Qwen/Qwen3-8B",
            setting,
        )


def other_format(folder: Path) -> str:
    """Return what a folder holds instead of a model's weights, and how to serve it; "" if that is not known."""
    if (folder / "adapter_config.json").is_file():
        return (
            "it is a LoRA adapter, which is not read: merge it with peft, "
            f"`AutoPeftModelForCausalLM.from_pretrained({str(folder)!r}).merge_and_unload().save_pretrained(NEW)`, "
            "and serve NEW"
        )
    files = sorted(file for suffix in OLDER for file in folder.glob(f"*{suffix}"))
    if not files:
        return ""
    if files[0].suffix == ".gguf":
        return f"{files[0].name} is a GGUF file{_gguf(files[0])}"
    return f"{files[0].name} is of another format{_rewritten(f'{str(folder)!r}')}"


def _gguf(file: Path) -> str:
    return _rewritten(f"{str(file.parent)!r}, gguf_file={file.name!r}") + ", or the model that it was made from"


def _rewritten(arguments: str) -> str:
    return (
        ", which is not read: convert it with transformers, "
        f"`AutoModelForCausalLM.from_pretrained({arguments}).save_pretrained(NEW)`, and serve NEW"
    )


def fetch_config(name: str) -> Path:
    """Download config.json of a Hub repository and return its folder. Raises ModelNotFound."""
    return _fetch(name, None, ("config.json",))


@cache  # several parts of a server need the same files: the Hub is asked once
def _fetch(name: str, revision: str | None, files: tuple[str, ...], setting: str = "model") -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(name, revision=revision, allow_patterns=list(files), ignore_patterns=list(SKIPPED))
        )
    except Exception as error:  # huggingface_hub passes on errors of several other libraries
        at = f" at revision {revision!r}" if revision else ""
        raise ModelNotFound(
            f"{setting} {name!r}{at} is not a local folder, and downloading it from the Hub failed: "
            f"{type(error).__name__}: {_in_a_line(error)}\nOn a machine with network access, run `hf download {name}` "
            "(private and gated models need HF_TOKEN); then either copy the Hub cache (HF_HOME) to this machine, or "
            f"copy config.json, *.safetensors and the tokenizer's files into a folder and pass its path as --{setting}"
        ) from error


def _in_a_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else text[:300] + " …"

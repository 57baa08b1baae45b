"""Find the parts of a configured model: its spec, the folder of its weights, and its tokenizer."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxserve.config import ServeConfig
from jaxserve.demo import model_path
from jaxserve.models.generation_config import AUTO, defaults_in, defaults_of
from jaxserve.models.hub import ModelNotFound, check_folder, resolve_model
from jaxserve.models.published import published_spec, repository_of, short_name
from jaxserve.tokenizer import Tokenizer

if TYPE_CHECKING:
    from jaxserve.models.spec import ModelSpec

log = logging.getLogger(__name__)

DUMMY = "dummy"


class Model(NamedTuple):
    """A model and its folder, which is None for random weights of a published model."""

    spec: ModelSpec
    folder: Path | None


def check_names(config: ServeConfig) -> None:
    """Raise InvalidValue if the model or tokenizer is a missing folder, or `generation_config` none of use.

    Imports nothing slow.
    """
    check_folder(config.model_source)
    if config.tokenizer is not None:
        check_folder(config.tokenizer, "tokenizer")
    if config.generation_config != AUTO:
        defaults_of(config.generation_config)


def sampling_defaults(config: ServeConfig) -> dict[str, Any]:
    """Return the sampling parameters of requests that leave them out, by name; {}: those of SamplingParams.

    Those of random weights are never looked for. Raises InvalidValue.
    """
    if config.generation_config != AUTO:
        return defaults_of(config.generation_config)
    if config.load_format == DUMMY:
        return {}
    try:
        return defaults_in(model_folder(config.model_source, config.revision, weights=False))
    except ModelNotFound as error:  # the engine runs elsewhere, and has the model
        log.warning("requests that set no sampling get vLLM's defaults: %s", str(error).partition("\n")[0])
        return {}


def model_folder(name: str, revision: str | None = None, *, weights: bool = True) -> Path:
    """Return the folder of a model given by path, Hub id or published short name. Downloads on first use."""
    return resolve_model(repository_of(name), revision, weights=weights)


def find_model(name: str, revision: str | None, load_format: str) -> Model:
    """Find a model given by path, Hub id or published short name. Raises InvalidValue or ModelNotFound.

    With `load_format` dummy no weights are downloaded, and a short name needs no files.
    """
    from jaxserve.models.registry import load_spec  # imported late: it imports jax

    short = short_name(name)
    if load_format == DUMMY and short is not None:
        return Model(published_spec(short), None)
    folder = model_folder(name, revision, weights=load_format != DUMMY)
    return Model(load_spec(folder), folder)


def find_tokenizer(config: ServeConfig) -> Tokenizer:
    """Load the tokenizer of a configured model. Raises InvalidValue or ModelNotFound."""
    return Tokenizer.load(tokenizer_folder(config), chat_template=config.chat_template)


def tokenizer_json(config: ServeConfig) -> str:
    """Return the tokenizer of a configured model as the text of its tokenizer.json. Raises like `find_tokenizer`."""
    path = tokenizer_folder(config) / "tokenizer.json"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    return find_tokenizer(config).json()


def tokenizer_folder(config: ServeConfig) -> Path:
    """Find the folder of a configured model's tokenizer. Raises InvalidValue or ModelNotFound.

    Random weights of a published short name use the demo model's tokenizer if the model's own cannot be
    downloaded, because their output is meaningless in any vocabulary.
    """
    try:
        return _tokenizer_folder(config)
    except ModelNotFound as error:
        if config.tokenizer is not None or config.load_format != DUMMY or short_name(config.model_source) is None:
            raise
        log.warning(
            "downloading the tokenizer of %s failed (%s); random weights are served with the demo model's tokenizer, "
            "--tokenizer sets another",
            repository_of(config.model_source),
            str(error).partition("\n")[0],
        )
        return model_path()


def _tokenizer_folder(config: ServeConfig) -> Path:
    if config.tokenizer is not None:
        name = repository_of(config.tokenizer)
        return resolve_model(name, config.revision, weights=False, setting="tokenizer")
    return model_folder(config.model_source, config.revision, weights=False)

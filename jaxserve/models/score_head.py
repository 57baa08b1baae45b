"""The head of a model that scores pairs of texts: a row of numbers, multiplied by the last token's hidden state.

The score is the sigmoid of that product. A checkpoint for sequence classification has the row. A Qwen3 reranker as
published answers "yes" or "no": the softmax of the two is the sigmoid of their difference, and so is the row.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError

from jaxserve.errors import InvalidValue
from jaxserve.models.registry import CLASSIFIER, read_config
from jaxserve.models.spec import architecture
from jaxserve.models.tensor_file import TensorFile
from jaxserve.settings.overrides import Overrides

TABLES = ("lm_head.weight", "embed_tokens.weight")  # where the rows of tokens are; the latter if the two are tied


def score_head(folder: Path, overrides: Overrides, tokenizer_json: Callable[[], str]) -> bytes:
    """Return the row [E] of a model that scores, as little-endian float32; b"": the model does not score.

    Raises InvalidValue.
    """
    config = read_config(folder)
    tokens = tuple(overrides.classifier_from_token or config.get("classifier_from_token") or ())
    name = overrides.architectures[0] if overrides.architectures else architecture(config)
    if not tokens:
        if not name.endswith(CLASSIFIER):
            return b""
        rows = _tensor(folder, ("score.weight",))
        if len(rows) != 1:
            raise InvalidValue(f"{name} with {len(rows)} labels is not supported: a model that scores has 1", "model")
        return _packed(rows[0])
    original = overrides.is_original_qwen3_reranker or config.get("is_original_qwen3_reranker")
    if len(tokens) != 2 or not original or not architecture(config).startswith("Qwen3For"):
        raise InvalidValue(
            f"classifier_from_token={list(tokens)} of {architecture(config)} is not supported: it must name the tokens "
            'for "no" and "yes" of a Qwen3ForCausalLM, with is_original_qwen3_reranker: true',
            "hf_overrides",
        )
    from tokenizers import Tokenizer

    vocabulary = Tokenizer.from_str(tokenizer_json())
    no, yes = (_id(token, vocabulary.token_to_id(token)) for token in tokens)
    table = _tensor(folder, TABLES[1:] if config.get("tie_word_embeddings") else TABLES)
    return _packed(table[yes].astype(np.float32) - table[no].astype(np.float32))


def _packed(row: npt.NDArray[Any]) -> bytes:
    return row.astype("<f4").tobytes()


def _id(token: str, id: int | None) -> int:
    if id is None:
        raise InvalidValue(f"classifier_from_token: {token!r} is no token of the model's tokenizer", "hf_overrides")
    return id


def _tensor(folder: Path, names: tuple[str, ...]) -> npt.NDArray[Any]:
    """Return the first of the tensors that the files of a folder have, as a memory map. Raises InvalidValue."""
    try:
        files = [TensorFile(path) for path in sorted(folder.glob("*.safetensors"))]
        where = {name: file for file in files for name in file.keys()}  # noqa: SIM118
        for wanted in names:
            for name, file in where.items():
                if f".{name}".endswith(f".{wanted}"):
                    return file.get_tensor(name)
    except (SafetensorError, OSError, ValueError) as error:
        raise InvalidValue(f"{folder}: its safetensors cannot be read: {error}", "model") from error
    raise InvalidValue(
        f"{folder} has no safetensors with {' or '.join(names)}, from which scores are computed", "model"
    )

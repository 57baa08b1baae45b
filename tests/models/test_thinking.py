"""Where a model's thinking ends is read from its tokenizer's files."""

from __future__ import annotations

import json
from pathlib import Path

from jaxserve.models.thinking import end_thinking


def test_either_file_may_name_the_end(tmp_path: Path) -> None:
    assert end_thinking(tmp_path) == frozenset()
    tokens = [{"id": 7, "content": "<think>"}, {"id": 8, "content": "</think>"}]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": tokens}))
    assert end_thinking(tmp_path) == {8}
    config = {"added_tokens_decoder": {"9": {"content": "[/THINK]"}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert end_thinking(tmp_path) == {8, 9}

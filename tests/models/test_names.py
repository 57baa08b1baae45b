"""Checkpoints whose tensors have other names: models with images, bare decoders, fused projections."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

from jaxserve.models import registry
from jaxserve.models.names import renamed
from tests.support.models.configs import GEMMA, TOKENS
from tests.support.models.driver import SMALL, Driver, expected, peer

VISION: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip


def _weights(path: Path, **renames: str) -> None:
    """Rename the tensors of a checkpoint by prefix."""


def test_the_text_of_a_model_with_images_is_served(tmp_path: Path) -> None:
    torch.manual_seed(0)
    text = transformers.Gemma3TextConfig(**{**SMALL, **GEMMA}).to_dict()
    config = transformers.Gemma3Config(text_config=text, vision_config=VISION, mm_tokens_per_image=4)
    config._attn_implementation = "eager"
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path)
    driver = Driver.of(tmp_path)
    np.testing.assert_allclose(driver.feed(TOKENS[:16]), expected(model, TOKENS[:16]), atol=2e-5, rtol=0)

"""A tiny random Llama on disk, executors for it, and engines to break."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:  # pytest may read this file before tests/conftest.py has configured jax
    from jaxserve.engine.runtime.executor import JaxExecutor
    from jaxserve.engine.startup.assemble import Machine
    from tests.support.engine.faults import Starter


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two layers, 4 heads, 2 KV heads, a vocabulary of 96, and separate embeddings and head."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=False,
    )
    folder = tmp_path_factory.mktemp("tiny")
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def executor(tiny: Path) -> JaxExecutor:
    from tests.support.engine.steps import executors

    return executors(tiny, warm=False)[0]


@pytest.fixture(scope="session")
def pair(tiny: Path) -> list[JaxExecutor]:
    """An executor with two instances of two devices."""
    from tests.support.engine.steps import executors

    return executors(tiny, "2x2")


@pytest.fixture(scope="module")
def machine(request: pytest.FixtureRequest) -> Iterator[Machine]:
    """Executors of the demo model on the mesh named as MESH in the test module."""
    from jaxserve.config import ServeConfig
    from jaxserve.engine.runtime.gc_control import uncollected
    from jaxserve.engine.startup.assemble import assemble
    from tests.support.engine.faults import SMALL

    made = assemble(ServeConfig.load(mesh=request.module.MESH, **SMALL))
    with uncollected():  # objects stay frozen from one engine to the next: each would scan all of them at its start
        yield made
    asyncio.run(made.close())


@pytest.fixture
def start(machine: Machine) -> Iterator[Starter]:
    """A factory of engines on that machine, closed at the end of the test."""
    from tests.support.engine.faults import Starter

    starter = Starter(machine)
    yield starter
    starter.end()

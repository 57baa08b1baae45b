"""No schedule changes the tokens that come through the compiled kernels, and nothing compiles after warm-up.

One test per family of models; `benchmarks.gpu_day` runs two.
"""

from __future__ import annotations

import pytest

from tests.support.kernels.interpreted import on_gpu
from tests.support.parity.asks import asks
from tests.support.parity.wide import hold, model, pressing

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1800)]  # in the interpreter, minutes


def check(name: str) -> None:
    if on_gpu():
        hold(model(name), pressing(), "mosaic_gpu")
    else:  # slow, and its memory is that of one instance
        hold(model(name), asks(1, 2), "mosaic_gpu", "1x1", interpret=True)


def test_llama() -> None:
    check("Llama")


def test_qwen() -> None:
    check("Qwen3")


def test_gemma() -> None:
    check("Gemma3")


def test_gpt_oss() -> None:
    check("GptOss")


def test_opt() -> None:
    check("OPT")


def test_minimax() -> None:
    check("MiniMaxM2")


def test_deepseek() -> None:
    check("DeepseekV2")

"""Request formats of servers, by the values of `--backend`."""

from __future__ import annotations

from typing import NamedTuple


class Backend(NamedTuple):
    """The prompts and fields that a server accepts."""

    chat: bool = False  # /v1/chat/completions
    text: bool = False  # prompts as text, even without a tokenizer
    ignore_eos: bool = True  # default of --ignore-eos
    objectives: bool = False  # ttft_slo_ms and other objectives


BACKENDS = {
    "jaxserve": Backend(objectives=True),
    "jaxserve-chat": Backend(chat=True, text=True, objectives=True),
    "openai": Backend(text=True, ignore_eos=False),  # only what OpenAI's API has
    "openai-chat": Backend(chat=True, text=True, ignore_eos=False),
    "vllm": Backend(),
    "sglang": Backend(),
}

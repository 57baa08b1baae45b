"""What servers of each kind take, by the name of `--backend`."""

from __future__ import annotations

from typing import NamedTuple


class Backend(NamedTuple):
    """Fields and prompts that a server takes."""

    chat: bool = False  # /v1/chat/completions
    text: bool = False  # prompts as text, also where no tokenizer is named
    ignore_eos: bool = True  # unless the command line says otherwise
    objectives: bool = False  # ttft_slo_ms and the like


BACKENDS = {
    "jaxserve": Backend(objectives=True),
    "jaxserve-chat": Backend(chat=True, text=True, objectives=True),
    "openai": Backend(text=True, ignore_eos=False),  # nothing but what OpenAI's API has
    "openai-chat": Backend(chat=True, text=True, ignore_eos=False),
    "vllm": Backend(),
    "sglang": Backend(),
}

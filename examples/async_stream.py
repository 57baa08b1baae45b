"""Stream several prompts concurrently, and cancel one of them early: `python examples/async_stream.py`."""

import asyncio

from jaxserve import SLO, AsyncLLM, SamplingParams

PARAMS = SamplingParams(temperature=0.0, max_tokens=32)


async def read(llm: AsyncLLM, name: str, prompt: str, slo: SLO) -> None:
    async for news in llm.stream(prompt, PARAMS, slo=slo):
        print(f"[{name}] {news.outputs[0].text!r}")


async def first_words(llm: AsyncLLM, prompt: str) -> str:
    """Read a few tokens, then close the stream, which cancels the request in the engine."""
    text, stream = "", llm.stream(prompt, PARAMS)
    async for news in stream:
        text += news.outputs[0].text
        if len(text) > 20:
            break
    await stream.aclose()
    return text


async def main(llm: AsyncLLM) -> None:
    _, _, words = await asyncio.gather(
        read(llm, "urgent", "def main(", SLO(ttft=0.5, tpot=0.03)),
        read(llm, "relaxed", "import os\n", SLO(ttft=30.0, tpot=0.5)),
        first_words(llm, "class Stack:\n"),
    )
    print("cancelled after", repr(words))


if __name__ == "__main__":
    llm = AsyncLLM(max_model_len=512, max_num_seqs=16)
    try:
        asyncio.run(main(llm))
    finally:
        llm.close()

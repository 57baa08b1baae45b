"""Prompts of a request: checked for size before encoding, then rendered and tokenized off the event loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from jaxserve.errors import InvalidValue, short
from jaxserve.server.openai import (
    ChatBody,
    CompletionBody,
    Sampled,
    TokenizeBody,
    check_token,
    messages_of,
    prompt_count,
    prompts_of,
)
from jaxserve.server.texts import TextThreads
from jaxserve.tokenizer import Tokenizer

T = TypeVar("T")

MAX_OUTPUTS = 1024  # per HTTP request: prompts times n

Prompt = tuple[str | None, list[int]]  # the text, if the request has one, and its token ids


class Prompts:
    """The conversion of request bodies to token ids. `context` is the model's context length in tokens."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, context: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._context = context
        self._longest = tokenizer.longest_piece
        self._threads = TextThreads()

    def close(self) -> None:
        """Stop the tokenizer threads."""
        self._threads.close()

    @property
    def waiting(self) -> int:
        """The number of texts that no thread has begun to process."""
        return self._threads.waiting

    async def run(self, work: Callable[[], T], size: int) -> T:
        """Run `work`, which reads `size` characters or tokens, on one of the threads."""
        return await self._threads.run(work, size)

    async def of(self, body: Sampled, n: int, check: Callable[[int, int], None]) -> list[Prompt]:
        """Return the prompts of a body, each of which gets `n` outputs.

        `check(prompts, n)` may raise InvalidValue; it is called before any text is encoded. Raises
        InvalidValue.
        """
        count = prompt_count(body.prompt) if isinstance(body, CompletionBody) else 1
        if count * n > MAX_OUTPUTS:
            message = f"{count} prompts times n={short(n)} are {short(count * n)} outputs: at most {MAX_OUTPUTS}"
            raise InvalidValue(message, "n")
        check(count, n)
        if isinstance(body, ChatBody):
            return [await self._conversation(body, bool(body.add_special_tokens))]  # templates contain special tokens
        assert isinstance(body, CompletionBody)
        special = body.add_special_tokens is not False
        return [await self._completion(prompt, special) for prompt in prompts_of(body.prompt)]

    async def tokenize(self, body: TokenizeBody) -> list[int]:
        """Return the token ids of a prompt or a conversation. Raises InvalidValue."""
        if (body.prompt is None) == (body.messages is None):
            raise InvalidValue("give either prompt or messages", "prompt")
        if body.prompt is not None:
            return (await self._completion(body.prompt, body.add_special_tokens is not False))[1]
        return (await self._conversation(body, bool(body.add_special_tokens)))[1]

    async def _completion(self, prompt: str | list[int], special: bool) -> Prompt:
        if isinstance(prompt, str):
            return prompt, await self._encode(prompt, special, "prompt")
        if len(prompt) >= self._context:  # before the check of each id
            raise self._too_long(f"the prompt has {len(prompt)} tokens", "prompt")
        for token in prompt:
            check_token(token, self._vocab_size, "prompt")
        return None, prompt

    async def _conversation(self, body: ChatBody | TokenizeBody, special: bool) -> Prompt:
        given: Sequence[dict[str, Any]] = body.messages or []
        if len(given) > self._context:  # a template writes at least one token per message
            raise self._too_long(f"messages has {len(given)} entries", "messages")
        messages = messages_of(given)
        arguments = body.chat_template_kwargs if isinstance(body, ChatBody) else None
        render = partial(
            self._tokenizer.chat,
            messages,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            arguments=arguments,
        )
        text = await self.run(render, sum(len(message["content"]) for message in messages))
        return text, await self._encode(text, special, "messages")

    async def _encode(self, text: str, special: bool, param: str) -> list[int]:
        most = self._context * self._longest
        if len(text) > most:
            raise self._too_long(
                f"the prompt has {len(text)} characters, more than {most} (the longest token has {self._longest})",
                param,
            )
        return await self.run(lambda: self._tokenizer.encode(text, special), len(text))

    def _too_long(self, what: str, param: str) -> InvalidValue:
        return InvalidValue(
            f"{what}, and this model's context of {self._context} tokens must hold it and at least one token of output",
            param,
        )

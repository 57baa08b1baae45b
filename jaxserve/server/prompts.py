"""Prompts of a request: checked for size before encoding, then rendered and tokenized off the event loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from jaxserve.errors import ContextOverflow, InvalidValue, short
from jaxserve.sched.api.new_request import check_length
from jaxserve.sched.api.params import SamplingParams
from jaxserve.server.failures import wrong
from jaxserve.server.openai import (
    ChatBody,
    CompletionBody,
    Sampled,
    TokenizeBody,
    check_token,
)
from jaxserve.server.texts import TextThreads, size_of
from jaxserve.tokenizer import Tokenizer
from jaxserve.tools.definitions import calls_in_history, tools_of

TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}  # parts, and their fields
MAX_OUTPUTS = 1024  # per HTTP request: prompts times n
MAX_PAIRED = 1 << 24  # characters of all pairs of an HTTP request

Prompt = tuple[str | None, list[int]]  # the text, if the request has one, and its token ids


class Prompts:
    """The conversion of request bodies to token ids. `context` is the model's context length in tokens."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, context: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._context = context
        self._longest = tokenizer.longest_piece
        self.texts = TextThreads()

    async def of(self, body: Sampled, params: SamplingParams, check: Callable[[int, int], None]) -> list[Prompt]:
        """Return the prompts of a body, each of which gets `params.n` outputs, truncated if `params` says so.

        `check(prompts, n)` may raise InvalidValue; it is called before any text is encoded. Raises
        InvalidValue.
        """
        n, room = params.n, params.room(self._context)
        count = prompt_count(body.prompt) if isinstance(body, CompletionBody) else 1
        if count * n > MAX_OUTPUTS:
            message = f"{count} prompts times n={short(n)} are {short(count * n)} outputs: at most {MAX_OUTPUTS}"
            raise InvalidValue(message, "n")
        if count * n > 1:  # any queue can hold one
            check(count, n)
        if isinstance(body, ChatBody):
            # Templates contain special tokens.
            prompts = [await self._conversation(body, bool(body.add_special_tokens))]
        else:
            assert isinstance(body, CompletionBody)
            special = body.add_special_tokens is not False
            prompts = [await self._completion(prompt, special, room) for prompt in prompts_of(body.prompt)]
        if room is not None and isinstance(body, ChatBody):  # of which only the end of the text is read
            return [(text, tokens[-room:]) for text, tokens in prompts]
        return _truncated(prompts, room)

    async def texts_of(
        self, given: Any, name: str, special: bool, params: SamplingParams, check: Callable[[int, int], None]
    ) -> list[Prompt]:
        """Return the prompts of the field `name`: a text, token ids, or a list of either. `check`: as in `of`."""
        _check_count(prompt_count(given), name, check)
        room = params.room(self._context)
        prompts = [await self._completion(prompt, special, room, name) for prompt in prompts_of(given, name)]
        return _truncated(prompts, room)

    async def pairs_of(
        self,
        pairs: Sequence[tuple[Any, Any]],
        names: tuple[str, ...],
        special: bool | None,
        params: SamplingParams,
        check: Callable[[int, int], None],
    ) -> list[Prompt]:
        """Return a prompt for each pair of texts of the fields `names`, for a model that scores; `check` as in `of`."""
        _check_count(len(pairs), names[1], check)
        for name, texts in zip(names, zip(*pairs, strict=True), strict=True):
            for text in texts:
                if not isinstance(text, str):
                    raise wrong(name, text, "must be texts, which this model reads in pairs")
        if (total := sum(len(text) for pair in pairs for text in pair)) > MAX_PAIRED:  # a body has the first text once
            what = f"the {len(pairs)} pairs have {total} characters: at most {MAX_PAIRED} are allowed"
            raise InvalidValue(f"{what}; shorten {names[0]}, or send fewer {names[1]} at a time", names[0])
        room = params.room(self._context)
        prompts: list[Prompt] = []
        for pair in pairs:
            text, beginning = await self.texts.run(partial(self._tokenizer.pair, *pair), sum(map(len, pair)))
            tokens = await self._encode(text, beginning if special is None else special, names[1])
            if room is None:  # at once: the first text is in every pair
                check_length(len(tokens), self._context, param=names[1])
            prompts.append((text, tokens))
        return _truncated(prompts, room)

    async def tokenize(self, body: TokenizeBody) -> list[int]:
        """Return the token ids of a prompt or a conversation. Raises InvalidValue."""
        if (body.prompt is None) == (body.messages is None):
            raise InvalidValue("give either prompt or messages", "prompt")
        if body.prompt is not None:
            return (await self._completion(body.prompt, body.add_special_tokens is not False))[1]
        return (await self._conversation(body, bool(body.add_special_tokens)))[1]

    async def _completion(
        self, prompt: str | list[int], special: bool, room: int | None = None, name: str = "prompt"
    ) -> Prompt:
        if isinstance(prompt, str):
            return prompt, await self._encode(prompt, special, name)
        prompt = prompt if room is None else prompt[-room:]
        check_length(len(prompt), self._context, param=name)  # before the check of each id
        for token in prompt:
            check_token(token, self._vocab_size, name)
        return None, prompt

    async def _conversation(self, body: ChatBody | TokenizeBody, special: bool) -> Prompt:
        given: Sequence[dict[str, Any]] = body.messages or []
        if len(given) > self._context:  # a template writes at least one token per message
            raise ContextOverflow(self._context, len(given), 1, "messages", least=True)
        messages = messages_of(given)
        choice = body.tool_choice if isinstance(body, ChatBody) else None
        tools = tools_of(body.tools, choice)
        render = partial(
            self._tokenizer.chat,
            messages,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            arguments=body.template_arguments,
            tools=None if tools is None else tools.definitions,
        )
        text = await self.texts.run(render, size_of(messages, body.tools, body.template_arguments))
        return text, await self._encode(text, special, "messages")

    async def _encode(self, text: str, special: bool, param: str) -> list[int]:
        if len(text) > self._context * self._longest:
            raise ContextOverflow(self._context, -(-len(text) // self._longest), 1, param, least=True)
        return await self.texts.run(lambda: self._tokenizer.encode(text, special), len(text))


def _check_count(count: int, name: str, check: Callable[[int, int], None]) -> None:
    """Raise InvalidValue unless a request may have so many entries in its field `name`."""
    if not 1 <= count <= MAX_OUTPUTS:
        raise InvalidValue(f"{name} has {count} entries: 1 to {MAX_OUTPUTS} are allowed", name)
    try:
        check(count, 1)
    except InvalidValue as error:
        raise InvalidValue(f"{name} has too many entries: {error}", name) from error


def prompts_of(prompt: Any, name: str = "prompt") -> list[str | list[int]]:
    """Return the prompts of the field `name`: a text, token ids, or a list of either. Raises InvalidValue."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if all(_is_id(item) for item in prompt):
            return [prompt]
        if all(isinstance(item, str) for item in prompt):
            return list(prompt)
        if all(isinstance(item, list) and item and all(map(_is_id, item)) for item in prompt):
            return list(prompt)
    raise wrong(name, prompt, "must be a text, a list of texts, a list of token ids, or a list of such lists")


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _truncated(prompts: list[Prompt], room: int | None) -> list[Prompt]:
    """Return prompts with at most `room` tokens, their last; None: all."""
    if room is None:
        return prompts
    return [(text, tokens) if len(tokens) <= room else (None, tokens[-room:]) for text, tokens in prompts]


def prompt_count(prompt: Any) -> int:
    """Return the number of prompts of a text completion without validating them."""
    single = not isinstance(prompt, list) or not prompt or _is_id(prompt[0])
    return 1 if single else len(prompt)


def messages_of(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with plain text as content. Raises InvalidValue for content other than text."""
    if not messages:
        raise InvalidValue("messages=[] must hold at least one message", "messages")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: dict[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(message.get("role"), str):
        raise InvalidValue(
            f"{where}.role={short(message.get('role'))} must be a text: system, user, assistant or tool", "messages"
        )
    for name in ("function_call", "audio"):
        if message.get(name):
            raise InvalidValue(f"{where}.{name} is not supported by this server", "messages")
    if isinstance(message.get("reasoning"), str):  # vLLM's newer name; templates read the older one
        message = {"reasoning_content": message["reasoning"], **message}
    content, calls = message.get("content"), {}
    if message.get("tool_calls"):
        if message["role"] != "assistant":
            raise InvalidValue(f"{where}.tool_calls needs the role assistant", f"{where}.tool_calls")
        calls = {"tool_calls": calls_in_history(message["tool_calls"], f"{where}.tool_calls")}
        if not content:
            return {**message, "content": None, **calls}
    if content is None:
        content = ""
    if isinstance(content, list):
        content = "\n".join(_part(part, f"{where}.content[{i}]") for i, part in enumerate(content))
    if not isinstance(content, str):
        raise InvalidValue(f"{where}.content={short(content)} must be a text or a list of text parts", "messages")
    return {**message, "content": content, **calls}


def _part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    field = TEXTS.get(kind) if isinstance(part, dict) and isinstance(kind, str) else None
    if field is not None and isinstance(part.get(field), str):
        return str(part[field])
    raise InvalidValue(
        f"{where} of type {short(kind)} is not supported: only parts of type 'text' with a text", "messages"
    )

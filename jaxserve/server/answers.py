"""Response bodies of text and chat completions in OpenAI's shapes, whole and in chunks."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxserve.generation.detokenize import end_of
from jaxserve.generation.generate import Piece, Submission
from jaxserve.generation.pieces import Pieces
from jaxserve.outputs import RequestMetrics, logprob_dicts
from jaxserve.sched.api.plan import TokenLogprobs
from jaxserve.server.message import Message
from jaxserve.server.objectives import Ended, outcome
from jaxserve.server.tracing import Trace
from jaxserve.tokenizer import Tokenizer
from jaxserve.tools.events import Parser


@dataclass(slots=True)
class Gathered:
    """One output as far as it is generated."""

    parts: list[str] = field(default_factory=list)
    count: int = 0
    thought: int = 0  # tokens that are thinking
    pieces: Pieces | None = None  # the texts of the tokens whose log-probabilities have been sent
    begun: bool = False
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    metrics: RequestMetrics | None = None
    message: Message | None = None  # the parts of a chat answer that has a parser

    @property
    def text(self) -> str:
        return "".join(self.parts)

    def add(self, piece: Piece) -> None:
        self.parts.append(piece.text)
        self.count += len(piece.tokens)
        self.thought = piece.thought
        self.logprobs.extend(piece.logprobs)
        self.prompt_logprobs.extend(piece.prompt_logprobs)
        if piece.finish_reason is not None:
            self.finish_reason, self.stop_reason, self.metrics = piece.finish_reason, piece.stop_reason, piece.metrics


@dataclass
class Answer:
    """The answer to one HTTP request as far as it is generated. Writer: the coroutine that serves the request."""

    id: str
    model: str
    chat: bool
    jobs: Sequence[Submission]
    tokenizer: Tokenizer
    top: int | None = None  # alternatives per token; None: no log-probabilities
    prompt_top: bool = False  # the request has `prompt_logprobs`
    echo: bool = False
    score_only: bool = False  # max_tokens is 0: generated tokens are hidden
    service_tier: str | None = None
    client: str = ""  # name of the API key
    reader: Callable[[], Parser] | None = None  # makes the parser of an output; None: the text is the answer
    reasoning: bool = True  # show the thinking
    custom: Collection[str] = ()  # the names of custom tools
    trace: Trace | None = None
    objectives: bool = False  # the request has some of its own: its usage says what was kept
    created: int = field(default_factory=lambda: int(time.time()))
    outputs: list[list[Gathered]] = field(default_factory=list)
    _begun: set[int] = field(default_factory=set)  # submissions with a piece
    _waiting: dict[int, list[Piece]] = field(default_factory=dict)  # by submission: their echo waits for its scores

    def __post_init__(self) -> None:
        for job in self.jobs:
            offset = len(self._prompt_text(job)) if self.echo and self.top is not None else 0
            skip, before = job.request.params.skip_special_tokens, list[int]()
            if self.top is not None:  # once for all outputs
                before = end_of(self.tokenizer, reversed(job.request.prompt), skip)
            self.outputs.append([self._blank(skip, before, offset) for _ in range(job.request.params.n)])

    def _blank(self, skip: bool, before: Sequence[int], offset: int) -> Gathered:
        message = None if self.reader is None else Message(self.reader(), self.reasoning, self.custom)
        if self.top is None:
            return Gathered(message=message)
        return Gathered(message=message, pieces=Pieces(self.tokenizer, skip, reversed(before), offset))

    def begin(self, number: int) -> bool:
        """Return whether this is the first call for submission `number`."""
        if number in self._begun:
            return False
        self._begun.add(number)
        return True

    def add(self, number: int, piece: Piece) -> Gathered:
        """Add a piece to an output of submission `number`, and return that output."""
        gathered = self.outputs[number][piece.choice]
        if self.score_only:
            piece = piece._replace(
                text="", tokens=(), logprobs=(), finish_reason=piece.finish_reason and "length", stop_reason=None
            )
        gathered.add(piece)
        return gathered

    @property
    def usage(self) -> dict[str, Any]:
        prompt = sum(len(job.request.prompt) for job in self.jobs)
        generated = sum(output.count for outputs in self.outputs for output in outputs)
        cached = sum(output.metrics.cached for outputs in self.outputs for output in outputs[:1] if output.metrics)
        usage: dict[str, Any] = {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        if self.chat:
            thought = sum(output.thought for outputs in self.outputs for output in outputs)
            usage["completion_tokens_details"] = {"reasoning_tokens": thought}
        if self.objectives and (kept := outcome(self._ended)) is not None:
            usage["slo"] = kept
        return usage

    @property
    def _ended(self) -> list[tuple[Ended, RequestMetrics]]:
        return [
            (
                Ended(
                    at, times.arrival, len(job.request.prompt), job.request.slo, times.token_times, output.finish_reason
                ),
                times,
            )
            for at, (job, outputs) in enumerate(zip(self.jobs, self.outputs, strict=True))
            for output in outputs
            if (times := output.metrics) is not None
        ]

    # whole

    def whole(self) -> dict[str, Any]:
        """Return the response body of a request that does not stream."""
        choices = [
            self._choice(number, which, output)
            for number, outputs in enumerate(self.outputs)
            for which, output in enumerate(outputs)
        ]
        body = self._head() | {"choices": choices, "usage": self.usage}
        if self.chat and self.prompt_top:
            body["prompt_logprobs"] = self._prompt_logprobs(0)
        return body

    def _choice(self, number: int, which: int, output: Gathered) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": number * len(self.outputs[number]) + which}
        if self.chat:
            message = {"content": output.text} if output.message is None else output.message.whole(output.text)
            choice["message"] = {"role": "assistant", **message}
            choice["logprobs"] = None if self.top is None else self._chat_logprobs(output, output.logprobs)
        else:
            job = self.jobs[number]
            choice["text"] = self._prompt_text(job) + output.text if self.echo else output.text
            choice["logprobs"] = self._text_logprobs(output, output.logprobs, number if self.echo else None)
            if self.prompt_top:
                choice["prompt_logprobs"] = self._prompt_logprobs(number)
        return {**choice, "finish_reason": self._reason(output), "stop_reason": output.stop_reason}

    @staticmethod
    def _reason(output: Gathered) -> str | None:
        """Return the finish reason: that of calls if the model stopped after them."""
        called = output.message is not None and output.message.called and output.finish_reason == "stop"
        return "tool_calls" if called else output.finish_reason

    # chunks

    def chunks(self, number: int, piece: Piece) -> list[dict[str, Any]]:
        """Add a piece, and return the chunks to send, which may be none.

        Only the first output of a submission computes the scores of an echo: the others wait until it begins.
        """
        first = self.outputs[number][0]
        if self.echo and self.top is not None and piece.choice and not first.begun:
            self._waiting.setdefault(number, []).append(piece)
            return []
        chunks = self._chunks_of(number, piece)
        if self._waiting and first.begun:
            chunks += [chunk for waiting in self._waiting.pop(number, ()) for chunk in self._chunks_of(number, waiting)]
        return chunks

    def _chunks_of(self, number: int, piece: Piece) -> list[dict[str, Any]]:
        output = self.add(number, piece)
        chunks = []
        if not output.begun and (piece.tokens or piece.finish_reason):
            output.begun = True
            chunks += self._opening(number, piece, output)
        if self.score_only:
            piece = piece._replace(text="", tokens=(), logprobs=())
        scored = self.top is not None and piece.logprobs
        if not self.chat:
            if piece.text or scored:
                chunks.append(
                    self._chunk(number, piece, {"text": piece.text}, self._text_logprobs(output, piece.logprobs))
                )
        else:
            chunks += self._deltas(number, piece, output)
        if piece.finish_reason is not None:  # in a chunk of its own: there are clients that read no text from it
            end: dict[str, Any] = {"delta": {}} if self.chat else {"text": ""}
            chunks.append(self._chunk(number, piece, end, ended=output))
        return chunks

    def _opening(self, number: int, piece: Piece, output: Gathered) -> list[dict[str, Any]]:
        """Return the first chunk of an output, if it has one before its text."""
        scored = self.prompt_top and piece.choice == 0
        scores = {"prompt_logprobs": self._prompt_logprobs(number)} if scored else {}
        if self.chat:
            return [{**self._chunk(number, piece, {"delta": {"role": "assistant", "content": ""}}), **scores}]
        if self.echo:
            logprobs = self._text_logprobs(output, [], number)
            return [self._chunk(number, piece, {"text": self._prompt_text(self.jobs[number]), **scores}, logprobs)]
        return [self._chunk(number, piece, {"text": "", **scores})] if scores else []

    def _deltas(self, number: int, piece: Piece, output: Gathered) -> list[dict[str, Any]]:
        """Return the chunks of a chat answer's piece; the first has the log-probabilities."""
        if output.message is None:
            deltas: list[dict[str, Any]] = [{"content": piece.text}] if piece.text else []
        else:
            deltas = output.message.add(piece.text)
            if piece.finish_reason is not None:
                deltas += output.message.finish()
        logprobs = self._chat_logprobs(output, piece.logprobs) if self.top is not None and piece.logprobs else None
        if logprobs and not deltas:
            deltas = [{} if output.message else {"content": ""}]
        return [
            self._chunk(number, piece, {"delta": delta}, None if at else logprobs) for at, delta in enumerate(deltas)
        ]

    def usage_chunk(self) -> dict[str, Any]:
        """Return the last chunk of a stream with `include_usage`."""
        return {**self._head(".chunk"), "choices": [], "usage": self.usage}

    def _chunk(
        self, number: int, piece: Piece, new: dict[str, Any], logprobs: Any = None, ended: Gathered | None = None
    ) -> dict[str, Any]:
        choice = {"index": number * len(self.outputs[number]) + piece.choice, **new, "logprobs": logprobs}
        choice["finish_reason"] = None if ended is None else self._reason(ended)
        if ended is not None:
            choice["stop_reason"] = ended.stop_reason
        return {**self._head(".chunk"), "choices": [choice]}

    # parts

    def _head(self, part: str = "") -> dict[str, Any]:
        kind = "chat.completion" + part if self.chat else "text_completion"
        head: dict[str, Any] = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        if self.service_tier is not None:
            head["service_tier"] = self.service_tier
        return head

    def _prompt_text(self, job: Submission) -> str:
        return self.tokenizer.decode(job.request.prompt) if job.text is None else job.text

    def _prompt_logprobs(self, number: int) -> list[Any]:
        positions: list[Any] = [None]  # the first token has no context
        pieces = Pieces(self.tokenizer, False, self.jobs[number].request.prompt[:1])
        for entries in logprob_dicts(self.outputs[number][0].prompt_logprobs, pieces):
            positions.append(
                {
                    str(t): {"logprob": e.logprob, "rank": e.rank, "decoded_token": e.decoded_token}
                    for t, e in entries.items()
                }
            )
        return positions

    def _chat_logprobs(self, output: Gathered, positions: Sequence[TokenLogprobs]) -> dict[str, Any]:
        pieces = output.pieces
        assert pieces is not None

        def entry(token: int, logprob: float) -> dict[str, Any]:
            raw = pieces.raw(token)
            return {"token": raw.decode("utf-8", "replace"), "logprob": _finite(logprob), "bytes": list(raw)}

        content = []
        for at in positions:
            best = [entry(*pair) for pair in at.top[: self.top or 0]]
            content.append({**entry(at.token, at.logprob), "top_logprobs": best})
            pieces.add(at.token)
        return {"content": content}

    def _text_logprobs(
        self, output: Gathered, positions: Sequence[TokenLogprobs], echoed: int | None = None
    ) -> dict[str, Any] | None:
        """Return log-probabilities as the parallel lists of text completions.

        echoed: the submission with whose prompt they begin; only its first output computes those.
        """
        if output.pieces is None:
            return None
        lists: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}

        def add(pieces: Pieces, at: TokenLogprobs, first: bool = False) -> None:
            name = _name(pieces, at.token)
            top = {_name(pieces, token): _finite(value) for token, value in at.top[: self.top]}
            logprob = _finite(at.logprob)
            offset = max(0, pieces.add(at.token))
            values = (name, None, None, offset) if first else (name, logprob, {**top, name: logprob}, offset)
            for key, value in zip(lists, values, strict=True):
                lists[key].append(value)

        if echoed is not None:
            pieces = self._pieces_of_prompt(self.jobs[echoed])
            add(pieces, TokenLogprobs(self.jobs[echoed].request.prompt[0], 0.0, 1, ()), True)
            for at in self.outputs[echoed][0].prompt_logprobs:
                add(pieces, at)
        for at in positions:
            add(output.pieces, at)
        return lists

    def _pieces_of_prompt(self, job: Submission) -> Pieces:
        """Return what places the tokens of a prompt in its echo.

        The echo may lack a BOS, or what a tokenizer does not keep: text and tokens then agree at the end. Special
        tokens have no text only if the echo is one without them.
        """
        text = self._prompt_text(job)
        decoded = self.tokenizer.decode(job.request.prompt)
        skip = not decoded.endswith(text)
        decoded = self.tokenizer.decode(job.request.prompt, skip) if skip else decoded
        return Pieces(self.tokenizer, skip, offset=len(text) - len(decoded))


def _name(pieces: Pieces, token: int) -> str:
    """Return a token as text, or as OpenAI's `bytes:` form if it is an incomplete character.

    Different incomplete characters therefore have different names.
    """
    raw = pieces.raw(token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _finite(logprob: float) -> float:
    """Replace minus infinity, which JSON cannot represent, by a very low log-probability."""
    return max(logprob, -9999.0)

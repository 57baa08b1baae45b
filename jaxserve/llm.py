"""Generation without a server: `LLM` for scripts and notebooks, `AsyncLLM` for event loops.

with LLM(mesh="2x1") as llm:
    for output in llm.generate(["Hello", "def main("], SamplingParams(max_tokens=20)):
        print(output.outputs[0].text)
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, nullcontext
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, cast

from jaxserve.config import ServeConfig
from jaxserve.errors import InvalidValue, JaxserveError, short
from jaxserve.generation.bad_words import with_bad_words
from jaxserve.generation.batch import Names, add_piece, blank_output, no_bar, run_batch, snapshot
from jaxserve.generation.beam_search import BeamSearchOutput, BeamSearchParams, search
from jaxserve.generation.generate import GenerationFailed, Mailbox, Piece, Submission, pieces
from jaxserve.generation.prompts import Parsed, Prompt, listed, parse_prompt, parse_prompts
from jaxserve.generation.sharing import salt_of, session_of
from jaxserve.generation.stops import thinking_of
from jaxserve.generation.vectors import check_dimensions, paired, pooling_params, relevance, similarity, vector_of
from jaxserve.generation.vectors import finished as finished_vector
from jaxserve.models.source import find_tokenizer, sampling_defaults, tokenizer_folder
from jaxserve.outputs import (
    CompletionOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from jaxserve.report.progress import bar
from jaxserve.sched.api.new_request import STANDARD, NewRequest, check_length
from jaxserve.sched.api.params import SamplingParams
from jaxserve.sched.api.plan import GIVEN_UP
from jaxserve.sched.api.policy import roles_of
from jaxserve.sched.api.pooling import LAST
from jaxserve.sched.api.slo import SLO
from jaxserve.server.metrics_reader import Metric, read_metrics
from jaxserve.tokenizer import Message, Tokenizer
from jaxserve.tools.definitions import tools_of
from jaxserve.tools.families import Parsers

if TYPE_CHECKING:
    from jaxserve.server.metrics import Metrics

__all__ = ["LLM", "AsyncLLM", "CompletionOutput", "Prompt", "RequestOutput"]


def _started(config: ServeConfig, tokenizer: Tokenizer | None) -> tuple[Any, Tokenizer]:
    """Start an engine, and load the tokenizer meanwhile. What is wrong with the tokenizer is said first."""
    from jaxserve.engine.engine import Engine  # imports jax, so only now

    if tokenizer is None:
        tokenizer_folder(config)  # raises at once if there is none
    with ThreadPoolExecutor(1) as beside:
        loading = beside.submit(lambda: tokenizer or find_tokenizer(config))
        try:
            with bar("warming up") as progress:
                engine = Engine.start(replace(config, dashboard=False), progress=progress)  # nothing would show it
        except JaxserveError:
            loading.result()
            raise
    try:
        return engine, loading.result()
    except JaxserveError:
        engine.close()
        raise


class _Base:
    """An engine with a tokenizer. Use it as a context manager, or call `close`."""

    def __init__(
        self,
        model: str | None = None,
        *,
        engine: Any = None,
        tokenizer_object: Tokenizer | None = None,
        config: ServeConfig | None = None,
        **settings: Any,
    ) -> None:
        """Load the model and warm up.

        `model` and `settings` are fields of ServeConfig (`mesh="2x1"`, `policy=…`, `ttft_slo="8s"`, …). A
        `config`, `engine` or `tokenizer_object` may be passed instead. Raises InvalidValue.
        """
        if config is None:
            settings.setdefault("queue_timeout", 0.0)  # no timeout by default: offline callers wait
            config = ServeConfig.load(**({} if model is None else {"model": model}), **settings)
        elif model is not None or settings:
            raise InvalidValue(f"config is given, so {', '.join(['model', *settings])} must not be", "config")
        self.config = config
        if engine is not None:
            self.tokenizer = tokenizer_object or find_tokenizer(config)
        else:
            engine, self.tokenizer = _started(config, tokenizer_object)
        self.engine: Any = engine
        self._defaults = sampling_defaults(config)
        from jaxserve.server.metrics import Metrics

        self._metrics: Metrics = Metrics(engine, config.names[0], config.metrics_prefix)

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters of requests that set none: those of the model's generation_config.json, as in vLLM."""
        return SamplingParams(**self._defaults)

    def close(self) -> None:
        """Close the engine and abort running requests."""
        self.engine.close()

    @property
    def roles(self) -> tuple[str, ...]:
        """The current role of each instance: `prefill`, `decode` or `mixed`."""
        return tuple(role.value for role in self.engine.roles)

    def set_roles(self, roles: Sequence[str] | Mapping[int, str]) -> tuple[str, ...]:
        """Set the roles of all instances, or of some by index, while serving; return the roles of all.

        No request is lost. Raises InvalidValue, and changes nothing, if a role is unknown or no instance
        would prefill or decode.
        """
        return tuple(role.value for role in self.engine.set_roles(roles_of(roles, len(self.engine.roles))))

    def _job(
        self,
        prompt: Parsed,
        params: SamplingParams | None = None,
        slo: SLO | None = None,
        priority: int | None = None,
        tier: str | None = None,
        session_id: str | None = None,
        request_id: str | None = None,
    ) -> Submission:
        """Check a request before it is submitted, and build the submission. Raises InvalidValue."""
        params = self.get_default_sampling_params() if params is None else params
        for name, given, kind, allowed in (
            ("sampling_params", params, SamplingParams, "SamplingParams"),
            ("slo", slo, SLO | None, "an SLO"),
            ("priority", priority, int | None, "a whole number, lower is earlier"),
            ("tier", tier, str | None, "the name of a tier"),
            ("session_id", session_id, str | None, "the name of a session"),
        ):
            if not isinstance(given, kind):
                raise InvalidValue(f"{name}={given!r} must be {allowed}", name)
        if params.n > 1:  # any queue can hold one
            self.engine.check_outputs(1, params.n)
        tokens = prompt.tokens if prompt.tokens is not None else self.tokenizer.encode(prompt.text or "")
        limit = self.engine.info.max_model_len
        if params.bad_words:
            params = with_bad_words(params, self.tokenizer)
        if (room := params.room(limit)) is not None:
            tokens = tokens[-room:]
        # The output may be longer than what is left of the context: it then ends there with `length`.
        check_length(len(tokens), limit, params if len(tokens) >= limit else None)
        objectives = self.config.tier(tier or STANDARD)
        request = NewRequest(
            tuple(tokens),
            params,
            objectives.slo if slo is None else slo,
            objectives.tier.priority if priority is None else priority,
            objectives.name,
            f"gen-{secrets.token_hex(8)}" if request_id is None else request_id,
            salt_of("", prompt.cache_salt),
            session_of("", session_id, {}),
        )
        return Submission(request, prompt.text, thinking=prompt.thinking)


class LLM(_Base):
    """Generates for many prompts at once and returns when all are done.

    Also works if an event loop is already running, as in a notebook.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        slo: SLO | Sequence[SLO] | None = None,
        priority: int | Sequence[int] | None = None,
        tier: str | Sequence[str] | None = None,
        session_id: str | Sequence[str] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Generate for each prompt and return the outputs in order.

        A prompt is a string, a list of token ids, `{"prompt": text}` or `{"prompt_token_ids": ids}`; a
        mapping may have a `cache_salt`: prompts with different salts share no pages of the prefix cache.

        `sampling_params`, `slo`, `priority`, `tier` and `session_id` are one value for all prompts or one per
        prompt. `tier` names a tier of the configuration; its SLO and priority hold unless `slo` or `priority`
        is given. The pages of a session stay in the prefix cache for its next turn, until `end_session` or the
        bounds of the configuration end that. `use_tqdm` shows a progress bar if generation takes longer than a moment.

        A request that fails has `finish_reason` "error" or "unavailable". Raises InvalidValue for a
        prompt that is malformed or does not fit, before anything runs.
        """
        given: dict[str, Any] = {"sampling_params": sampling_params, "slo": slo, "priority": priority}
        return self._outputs(parse_prompts(prompts), {**given, "tier": tier, "session_id": session_id}, use_tqdm)

    def _outputs(self, many: Sequence[Parsed], given: Mapping[str, Any], use_tqdm: bool) -> list[RequestOutput]:
        """Generate for each prompt. given: the arguments of `_job`, one for all prompts or one per prompt."""
        columns = (_each(value, len(many), name) for name, value in given.items())
        jobs = [self._job(*row) for row in zip(many, *columns, strict=True)]
        with bar("generating") if use_tqdm else nullcontext(no_bar) as progress:
            return run_batch(self.engine, self.tokenizer, jobs, progress, self._metrics)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        slo: SLO | Sequence[SLO] | None = None,
        priority: int | Sequence[int] | None = None,
        tier: str | Sequence[str] | None = None,
        session_id: str | Sequence[str] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Generate the next message of one conversation, or of several.

        `tools`, in OpenAI's form, are described to the model; `jaxserve.tools` reads the calls in its text.
        `chat_template_kwargs` are variables of the chat template. Stop strings end the answer, not the thinking.
        Raises InvalidValue for tools that are none.
        """
        callable_ = tools_of(None if tools is None else list(tools))
        single = bool(messages) and isinstance(messages[0], dict)
        talks = cast(Sequence[Sequence[Message]], [messages] if single else messages)
        texts = [
            self.tokenizer.chat(
                talk,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                template=chat_template,
                arguments=chat_template_kwargs,
                tools=None if callable_ is None else callable_.definitions,
            )
            for talk in talks
        ]
        parser, template = self.config.reasoning_parser, chat_template or self.tokenizer.template_text
        tags = Parsers.of("none", parser, template).tags
        prompts = [
            Parsed(None, self.tokenizer.encode(text, add_special_tokens=False), None, thinking_of(tags, text))
            for text in texts
        ]
        given: dict[str, Any] = {"sampling_params": sampling_params, "slo": slo, "priority": priority}
        outputs = self._outputs(prompts, {**given, "tier": tier, "session_id": session_id}, use_tqdm)
        for output, text in zip(outputs, texts, strict=True):
            output.prompt = text
        return outputs

    def beam_search(self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams) -> list[BeamSearchOutput]:
        """Search for the most likely outputs of each prompt, `params.beam_width` at a time, as vLLM does.

        Beams share the pages of their common beginning. Raises InvalidValue as `generate` does.
        """
        tokens = [list(self._job(prompt).request.prompt) for prompt in parse_prompts(prompts)]
        info = self.engine.info

        def step(beams: list[list[int]], sampling: SamplingParams) -> list[RequestOutput]:
            return self.generate(beams, sampling, use_tqdm=False)

        outputs = search(tokens, params, info.eos, info.max_model_len, step)
        for output in outputs:
            for beam in output.sequences:
                beam.text = self.tokenizer.decode(beam.tokens)
        return outputs

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_type: str | None = None,
        dimensions: int | None = None,
        normalize: bool = True,
        priority: int | Sequence[int] | None = None,
        tier: str | Sequence[str] | None = None,
        use_tqdm: bool = True,
    ) -> list[EmbeddingRequestOutput]:
        """Return an embedding of each prompt, in order; prompts, `priority` and `tier` are those of `generate`.

        `pooling_type` is "last" or "mean"; None: that of the configuration. `dimensions` keeps the first
        numbers only. `normalize` scales to length 1. Raises InvalidValue before anything runs, and
        GenerationFailed if a request fails.
        """
        check_dimensions(dimensions, self.engine.info.hidden_size)
        outputs = self._pooled(prompts, pooling_type, priority=priority, tier=tier, use_tqdm=use_tqdm)
        vectors = (finished_vector(vector_of(output.outputs[0].pooled), dimensions, normalize) for output in outputs)
        return [
            EmbeddingRequestOutput(output.request_id, EmbeddingOutput(vector.tolist()), output.prompt_token_ids)
            for output, vector in zip(outputs, vectors, strict=True)
        ]

    def score(
        self,
        data_1: Prompt | Sequence[Prompt],
        data_2: Prompt | Sequence[Prompt],
        *,
        pooling_type: str | None = None,
        use_tqdm: bool = True,
    ) -> list[ScoringRequestOutput]:
        """Return a score of one prompt and each of others, or of pairs of prompts.

        It is the cosine similarity of their embeddings. A model that scores reads both texts of a pair as one, and
        its score is from 0 to 1. Raises as `embed` does.
        """
        some, others = listed(data_1), listed(data_2)
        if head := self.engine.info.score_head:
            outputs = self._pooled(self._pairs(paired(some, others, ("data_1", "data_2"))), LAST, use_tqdm=use_tqdm)
            return [
                ScoringRequestOutput(
                    output.request_id,
                    ScoringOutput(relevance(vector_of(output.outputs[0].pooled), head)),
                    output.prompt_token_ids,
                )
                for output in outputs
            ]
        pairs = paired(list(range(len(some))), list(range(len(some), len(some) + len(others))), ("data_1", "data_2"))
        outputs = self._pooled([*some, *others], pooling_type, use_tqdm=use_tqdm)
        vectors = [vector_of(output.outputs[0].pooled) for output in outputs]
        return [
            ScoringRequestOutput(
                f"{outputs[one].request_id}_{outputs[other].request_id}",
                ScoringOutput(similarity(vectors[one], vectors[other])),
                outputs[one].prompt_token_ids + outputs[other].prompt_token_ids,
            )
            for one, other in pairs
        ]

    def _pairs(self, pairs: Sequence[tuple[Any, Any]]) -> list[list[int]]:
        """Return the token ids of pairs of texts, for a model that scores. Raises InvalidValue."""
        for text in (text for pair in pairs for text in pair):
            if not isinstance(text, str):
                raise InvalidValue(f"{short(text)} must be a text, which this model reads in pairs", "data_1")
        return [self.tokenizer.encode(*self.tokenizer.pair(*pair)) for pair in pairs]

    def _pooled(
        self, prompts: Prompt | Sequence[Prompt], pooling_type: str | None, **settings: Any
    ) -> list[RequestOutput]:
        params = pooling_params(self.config.pooling_type if pooling_type is None else pooling_type)
        outputs = self.generate(prompts, params, **settings)
        for output in outputs:
            first = output.outputs[0]
            if first.finish_reason in GIVEN_UP:
                reason = first.finish_reason or "error"
                raise GenerationFailed(first.error or "the engine gave the request up", reason)
        return outputs

    def get_tokenizer(self) -> Any:
        """Return the model's transformers tokenizer."""
        return self.tokenizer.hf

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache; return False, and change nothing, if requests run or wait."""
        return bool(self.engine.reset_prefix_cache())

    def end_session(self, session_id: str) -> bool:
        """Release the pages that a session keeps between turns; return whether it kept any."""
        return bool(self.engine.end_session(session_of("", session_id, {})))

    def get_metrics(self) -> list[Metric]:
        """Return the metrics that a server exports at /metrics, as in `jaxserve.server.metrics_reader`."""
        return read_metrics(self._metrics.registry, self._metrics.prefix)


class AsyncLLM(_Base):
    """Generates for one prompt per call, many calls at a time, on the caller's event loop."""

    _mailbox: Mailbox | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.close)

    def _open_mailbox(self) -> Mailbox:
        """Return the mailbox of the running loop; a program may use several loops in turn."""
        loop = asyncio.get_running_loop()
        if self._mailbox is None or self._mailbox.loop is not loop:
            self._mailbox = Mailbox(loop)
        return self._mailbox

    async def get_tokenizer(self) -> Any:
        """Return the model's transformers tokenizer."""
        return self.tokenizer.hf

    async def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache; return False, and change nothing, if requests run or wait."""
        return bool(await asyncio.to_thread(self.engine.reset_prefix_cache))

    async def end_session(self, session_id: str) -> bool:
        """Release the pages that a session keeps between turns; return whether it kept any."""
        return bool(await asyncio.to_thread(self.engine.end_session, session_of("", session_id, {})))

    async def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        slo: SLO | None = None,
        priority: int | None = None,
        tier: str | None = None,
        session_id: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Stream the outputs incrementally: each RequestOutput has only what is new since the last.

        The arguments are those of `generate`. Closing the iterator, or cancelling the task that reads it,
        cancels the request.
        """
        job = self._job(parse_prompt(prompt), sampling_params, slo, priority, tier, session_id, request_id)
        names, left = Names(job, self.tokenizer), job.request.params.n
        async with aclosing(self._pieces(job)) as news:
            async for piece in news:
                left -= piece.finish_reason is not None
                output = blank_output(job)
                output.outputs = [CompletionOutput(piece.choice)]
                add_piece(output, output.outputs[0], piece, names)
                output.finished = left == 0
                yield output

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        slo: SLO | None = None,
        priority: int | None = None,
        tier: str | None = None,
        session_id: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Stream the outputs as vLLM does: each RequestOutput has everything so far; the last is `finished`.

        Prompts are those of `LLM.generate`. `request_id` names the request in its outputs and in the
        journal. `tier` names a tier of the configuration; its SLO and priority hold unless `slo` or
        `priority` is given. `session_id` is as in `LLM.generate`. Closing the iterator, or cancelling the task
        that reads it, cancels the request. Raises InvalidValue for a prompt that is malformed or does not fit.
        """
        job = self._job(parse_prompt(prompt), sampling_params, slo, priority, tier, session_id, request_id)
        whole, names = blank_output(job), Names(job, self.tokenizer)
        left = job.request.params.n
        async with aclosing(self._pieces(job)) as news:
            async for piece in news:
                left -= piece.finish_reason is not None
                add_piece(whole, whole.outputs[piece.choice], piece, names)
                whole.finished = left == 0
                yield snapshot(whole)

    async def _pieces(self, job: Submission) -> AsyncGenerator[Piece, None]:
        """Yield the pieces of a job and count them in the metrics."""
        begun = False
        async with aclosing(pieces(self.engine, self.tokenizer, job, self._open_mailbox())) as news:
            async for piece in news:
                if not begun:
                    begun = True
                    self._metrics.begun(job)
                self._metrics.news(job, piece)
                yield piece


def _each(given: Any, count: int, name: str) -> list[Any]:
    """Expand one value for all prompts, or check that there is one per prompt."""
    if not isinstance(given, list | tuple):
        return [given] * count
    if len(given) != count:
        raise InvalidValue(f"{name} has {len(given)} entries for {count} prompts: give one, or one per prompt", name)
    return list(given)

"""Beam search over an engine, as in vLLM: each step generates one token after every beam."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

from jaxserve.errors import InvalidValue
from jaxserve.outputs import Logprob, RequestOutput
from jaxserve.sched.api.params import MAX_LOGPROBS, SamplingParams

MAX_BEAMS = MAX_LOGPROBS // 2  # a step looks at twice as many tokens as there are beams


@dataclass(frozen=True)
class BeamSearchParams:
    """Parameters of a beam search, with vLLM's names. Raises InvalidValue with the field and what is allowed."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0

    def __post_init__(self) -> None:
        for name, ok, allowed in (
            ("beam_width", 1 <= self.beam_width <= MAX_BEAMS, f"1 to {MAX_BEAMS}"),
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("temperature", self.temperature >= 0, "0 or more"),
        ):
            if not ok:
                raise InvalidValue(f"{name}={getattr(self, name)!r} must be {allowed}", name)


@dataclass
class BeamSearchSequence:
    """A beam: `tokens` and `text` with the prompt, `logprobs` of each generated token and its alternatives."""

    tokens: list[int]
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None  # "stop" or "length"
    stop_reason: int | str | None = None


@dataclass
class BeamSearchOutput:
    """The best beams of a prompt, best first."""

    sequences: list[BeamSearchSequence]


def score(beam: BeamSearchSequence, eos: Collection[int], length_penalty: float) -> float:
    """Return what beams are ranked by: the log-probability over a power of the length, with the prompt, without EOS."""
    length = len(beam.tokens) - (beam.tokens[-1] in eos)
    penalty: float = max(1, length) ** length_penalty
    return beam.cum_logprob / penalty


def search(
    prompts: Sequence[list[int]],
    params: BeamSearchParams,
    eos: Collection[int],
    context: int,
    step: Callable[[list[list[int]], SamplingParams], list[RequestOutput]],
) -> list[BeamSearchOutput]:
    """Search for all prompts together. context: most tokens of a beam. step: generates one token after each prompt."""
    step_params = SamplingParams(
        max_tokens=1, temperature=params.temperature, logprobs=2 * params.beam_width, ignore_eos=True
    )
    running = [[BeamSearchSequence(list(prompt))] for prompt in prompts]
    done: list[list[BeamSearchSequence]] = [[] for _ in prompts]

    def best(beams: list[BeamSearchSequence]) -> list[BeamSearchSequence]:
        return sorted(beams, key=lambda beam: score(beam, eos, params.length_penalty), reverse=True)[
            : params.beam_width
        ]

    for _ in range(params.max_tokens):
        for beams, ended in zip(running, done, strict=True):
            ended += [replace(beam, finish_reason="length") for beam in beams if len(beam.tokens) >= context]
            beams[:] = [beam for beam in beams if len(beam.tokens) < context]
        flat = [beam.tokens for beams in running for beam in beams]
        if not flat:
            break
        outputs = iter(step(flat, step_params))
        for number, beams in enumerate(running):
            longer = [new for beam in beams for new in _extended(beam, next(outputs))]
            ends = [beam for beam in longer if beam.tokens[-1] in eos and not params.ignore_eos]
            done[number] += [replace(beam, finish_reason="stop", stop_reason=beam.tokens[-1]) for beam in ends]
            running[number] = best([beam for beam in longer if beam.tokens[-1] not in eos or params.ignore_eos])
    results = []
    for beams, ended in zip(running, done, strict=True):
        results.append(BeamSearchOutput(best([*ended, *(replace(beam, finish_reason="length") for beam in beams)])))
    return results


def _extended(beam: BeamSearchSequence, output: RequestOutput) -> list[BeamSearchSequence]:
    """Return a beam with each of the most likely next tokens. Raises InvalidValue if its request failed."""
    completion = output.outputs[0]
    if not completion.logprobs:
        raise InvalidValue(f"a beam could not be continued: {completion.error or completion.finish_reason}", "prompts")
    position = completion.logprobs[0]
    return [
        BeamSearchSequence([*beam.tokens, token], [*beam.logprobs, position], beam.cum_logprob + entry.logprob)
        for token, entry in position.items()
    ]

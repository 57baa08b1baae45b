"""The target's answers to the prompts, generated once and stored in files."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from jaxserve import LLM, SamplingParams
from jaxserve.distillation.prompts import Asked, Prompts
from jaxserve.errors import JaxserveError
from jaxserve.report.progress import bar
from jaxserve.sched.api.plan import GIVEN_UP
from jaxserve.training.folder import write

PART = 256  # samples per file
HELD_OUT = 16  # one in so many prompts is held out


@dataclass(frozen=True, slots=True)
class Sample:
    """A prompt and its answer."""

    prompt: int  # number of the prompt
    temperature: float
    tokens: npt.NDArray[np.int32]  # of prompt and answer
    asked: int  # number of prompt tokens

    @property
    def held_out(self) -> bool:
        """Whether the sample is for measuring and not for training; equal for all samples of a prompt."""
        return self.prompt % HELD_OUT == HELD_OUT - 1


def generate(
    folder: Path, prompts: Prompts, count: int, temperatures: Sequence[float], length: int, seed: int,
    start: Callable[[], LLM],
) -> list[Sample]:  # fmt: skip
    """Return `count` samples of at most `length` tokens, prompt included, generating those missing in `folder`.

    `start` creates the engine, if it is needed. Raises JaxserveError if a request fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    starts = range(0, count, PART)
    samples: list[Sample] = []
    with ExitStack() as stack, bar("generating") as progress:
        llm: LLM | None = None
        for first in starts:
            file, last = folder / f"part-{first // PART:05d}.npz", min(first + PART, count)
            if not file.exists():
                llm = llm or stack.enter_context(start())
                rng = np.random.default_rng((seed, first))
                drawn = [float(t) for t in rng.choice(np.asarray(temperatures, float), last - first)]
                _write(file, _answers(llm, prompts(llm, first, last), drawn, length, seed + first))
            samples += read(file)
            progress(last, count, f"{sum(len(sample.tokens) for sample in samples)} tokens")
    return samples


def _answers(
    llm: LLM, asked: Sequence[Asked], temperatures: Sequence[float], length: int, seed: int
) -> list[Sample]:  # fmt: skip
    params = [
        SamplingParams(max_tokens=length - len(prompt), temperature=t, seed=seed + n)
        for n, ((_, prompt), t) in enumerate(zip(asked, temperatures, strict=True))
    ]
    samples = []
    outputs = llm.generate([prompt for _, prompt in asked], params, use_tqdm=False)
    for (number, prompt), t, output in zip(asked, temperatures, outputs, strict=True):
        said = output.outputs[0]
        if said.finish_reason in GIVEN_UP:
            raise JaxserveError(f"the model failed on a prompt of {len(prompt)} tokens: {said.error}")
        samples.append(Sample(number, t, np.asarray([*prompt, *said.token_ids], np.int32), len(prompt)))
    return samples


def _write(file: Path, samples: Sequence[Sample]) -> None:
    archive = io.BytesIO()
    np.savez(
        archive,
        tokens=np.concatenate([sample.tokens for sample in samples]),
        lengths=np.asarray([len(sample.tokens) for sample in samples]),
        asked=np.asarray([sample.asked for sample in samples]),
        prompts=np.asarray([sample.prompt for sample in samples]),
        temperatures=np.asarray([sample.temperature for sample in samples]),
    )
    write(file, archive.getvalue())


def read(file: Path) -> list[Sample]:
    with np.load(file) as archive:
        rows = np.split(archive["tokens"], np.cumsum(archive["lengths"])[:-1])
        columns = (archive["prompts"].tolist(), archive["temperatures"].tolist(), rows, archive["asked"].tolist())
    return [Sample(*row) for row in zip(*columns, strict=True)]


def stream(samples: Sequence[Sample]) -> npt.NDArray[np.int32]:
    """Concatenate the training samples to one array [tokens], from which rows are cut without padding.

    Rows may span several samples. Target and draft still see the same context, because they read the
    same rows.
    """
    return np.concatenate([sample.tokens for sample in samples if not sample.held_out])

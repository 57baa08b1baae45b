"""A run of `jaxserve distill`, from prompts to the folder of the draft. It resumes from its work folder."""

from __future__ import annotations

import gc
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxserve import LLM
from jaxserve.distillation import prompts, samples, teacher
from jaxserve.distillation.acceptance import Acceptance, measure
from jaxserve.distillation.objective import Inputs, divergence
from jaxserve.errors import InvalidValue
from jaxserve.models.registry import read_config
from jaxserve.report.progress import bar
from jaxserve.tokenizer import Tokenizer
from jaxserve.training import folder
from jaxserve.training.checkpoints import Checkpoints
from jaxserve.training.curve import plot
from jaxserve.training.loop import Report, Schedule, State, build_steps, rebuilder, run, shape_at
from jaxserve.training.net import EMBED_STD, Net, NetConfig

SETTINGS = "settings.json"
TOKENIZER_FILES = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "*.model", "*.tiktoken",
    "chat_template*", "generation_config.json",
)  # fmt: skip
SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
WATCHED = 8  # batches of held-out text on which the loss is reported during training


@dataclass(frozen=True, slots=True)
class DataSettings:
    """The settings that the generated text depends on."""

    model: str
    prompts: str | None
    samples: int
    length: int  # tokens of a prompt and its answer
    temperatures: tuple[float, ...]
    seed: int


@dataclass(frozen=True, slots=True)
class TrainingSettings:
    """The settings that the weights additionally depend on."""

    net: NetConfig
    steps: int
    rows: int
    length: int
    long_length: int
    long_share: float
    rate: float
    warm_up: float
    weight_decay: float
    tv_share: float  # final share of the run that trains on TV
    seed: int

    @property
    def shapes(self) -> tuple[int, int, int, float]:
        """The arguments of `shape_at` after `done`."""
        return self.rows, self.length, self.long_length, self.long_share


@dataclass(frozen=True, slots=True)
class DistillationRun:
    """The settings of a run."""

    path: Path  # folder of the target
    demo: bool  # whether the target is the embedded model
    out: Path
    work: Path
    data: DataSettings
    training: TrainingSettings
    engine: dict[str, Any]  # settings of the engine that generates text
    devices: int  # devices that hold the target during training
    dtype: str  # of the target
    drafted: int  # tokens per draft when acceptance is measured
    report_every: int
    save_every: float  # minutes


def settle(job: DistillationRun, resume: bool | None) -> None:
    """Compare the settings with those of the work folder, and store them there.

    resume: None resumes if there is a checkpoint, True requires one, False keeps the text and trains anew.
    Raises InvalidValue that names the settings that differ.
    """
    file, now = job.work / SETTINGS, {"data": asdict(job.data), "training": asdict(job.training)}
    now = json.loads(json.dumps(now))  # so that types equal those in the file
    if file.is_file():
        before = json.loads(file.read_text(encoding="utf-8"))
        parts = ("data",) if resume is False else ("data", "training")
        differing = [
            f"{name} was {_flat(before[part]).get(name)!r}, is {value!r}"
            for part in parts
            for name, value in _flat(now[part]).items()
            if _flat(before[part]).get(name) != value
        ]
        if differing:
            raise InvalidValue(
                f"{job.work} was begun with other settings: {'; '.join(differing)}. Give those, another --work, or "
                "--no-resume to keep the text and train anew (other steps, sizes, rates)",
                "work",
            )
    checkpoints = job.work / "checkpoints"
    if resume is False and checkpoints.exists():
        shutil.rmtree(checkpoints)
    if resume and not (checkpoints.is_dir() and any(checkpoints.iterdir())):
        raise InvalidValue(f"--resume: {checkpoints} has no checkpoint to resume from; omit it to begin", "resume")
    job.work.mkdir(parents=True, exist_ok=True)
    folder.write_json(file, now)


def _flat(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings with those of the net at the top level."""
    net = settings.get("net", {})
    return {**{key: value for key, value in settings.items() if key != "net"}, **net}


def text(job: DistillationRun) -> list[samples.Sample]:
    """Return prompts and answers, generating those that the work folder lacks."""
    data, tokenizer = job.data, Tokenizer.load(job.path)
    longest = max(1, data.length // 2)
    if data.prompts is not None:
        source = prompts.of_file(Path(data.prompts), tokenizer, longest)
    elif job.demo:
        source = prompts.of_demo(tokenizer, min(64, longest), data.seed)
    else:
        source = prompts.of_model(_begin(job.path), longest, data.seed)

    def start() -> LLM:
        return LLM(str(job.path), max_model_len=data.length, policy="vllm", **job.engine)

    generated = samples.generate(
        job.work / "text", source, data.samples, data.temperatures, data.length, data.seed, start
    )  # fmt: skip
    gc.collect()  # frees the engine's weights and pool, which reference cycles may keep alive
    return generated


def _begin(path: Path) -> int:
    """Return the token that texts begin with. Raises InvalidValue if the config names none."""
    config = read_config(path)
    token = config.get("bos_token_id", config.get("eos_token_id"))
    token = token[0] if isinstance(token, list) else token
    if token is None:
        raise InvalidValue(
            f"{path / 'config.json'} has no bos_token_id to generate prompts from: give --prompts", "prompts"
        )
    return int(token)


def distill(job: DistillationRun, tell: Callable[[str], None]) -> Acceptance:
    """Generate text, train the draft, write its folder, and measure acceptance. `tell` gets progress lines."""
    generated = text(job)
    kept = samples.stream(generated)
    held = [sample for sample in generated if sample.held_out and len(sample.tokens) > sample.asked]
    if not held:
        raise InvalidValue(f"{job.data.samples} samples leave none to measure on; must be at least 32", "samples")
    tell(f"{len(generated)} samples, {len(kept)} tokens to train on, {len(held)} samples held out")
    target = teacher.on(job.path, jax.devices()[: job.devices])
    weights = target.load(job.path, jnp.dtype(job.dtype))
    net = Net(job.training.net, nnx.Rngs(job.training.seed))
    net.embed_tokens.embedding[...] = begun_table(target.table(weights), job.training.net.dim)
    state = train(job, target, weights, net, kept, _watched(held, job.training.rows, job.training.length), tell)
    write(job, state)
    # Measure the weights as written, rounded to bfloat16.
    rounded = {name: value.astype(folder.DTYPE).astype(jnp.float32) for name, value in state.params.items()}
    measured = measure(
        target, weights, rebuilder(net), target.replicated(rounded), held, drafted=job.drafted, seed=job.data.seed
    )
    folder.write_json(job.out / "acceptance.json", {"model": job.data.model, **measured.as_json()})
    return measured


def begun_table(table: jax.Array, dim: int) -> jax.Array:
    """Project the target's embedding table [V, E] on its principal axes: [V, dim] float32.

    A draft with this initial table knows which tokens are similar, which would otherwise take most of a
    short training. Entries are scaled to the std of a new table, so that initial logits are small.
    """
    wide = np.asarray(table, np.float32)
    _, axes = np.linalg.eigh(wide.T @ wide)  # ascending
    projected = wide @ axes[:, ::-1][:, :dim]
    projected = np.pad(projected, ((0, 0), (0, dim - projected.shape[1])))  # a draft may be wider
    return jnp.asarray(projected * (EMBED_STD / np.sqrt(np.mean(projected**2))))


def _watched(held: Sequence[samples.Sample], rows: int, length: int) -> list[np.ndarray]:
    """Cut held-out text like training text, into at least one batch [rows, length], padded if necessary."""
    tokens = np.concatenate([sample.tokens for sample in held])
    tokens = np.pad(tokens, (0, max(0, rows * length - len(tokens))))
    count = min(WATCHED, len(tokens) // (rows * length))
    return list(tokens[: count * rows * length].reshape(count, rows, length))


def train(
    job: DistillationRun, target: teacher.Teacher, weights: Any, net: Net, tokens: np.ndarray,
    watched: Sequence[np.ndarray],
    tell: Callable[[str], None],
) -> State:  # fmt: skip
    """Train from the newest checkpoint in the work folder, or from the beginning."""
    given = job.training
    state, step, loss = build_steps(net, divergence(target), given.weight_decay)
    checkpoints = Checkpoints(job.work)
    if checkpoints.newest is not None:
        state = checkpoints.restore(state)
        tell(f"resuming from step {state.step} of {given.steps}")
    state.params, state.optimizer = target.replicated((state.params, state.optimizer))

    hidden, memories = jax.jit(partial(target.hidden, weights)), {}
    for shape in {shape_at(done, *given.shapes) for done in (0.0, 1.0 - 1e-9)}:
        memories[shape] = teacher.Memory(hidden, tokens, *shape, target.spec.dim)

    def inputs(step: int, done: float) -> Inputs:
        text, wanted = memories[shape_at(done, *given.shapes)].step(step, given.seed)
        return Inputs(weights, jnp.asarray(text), jnp.asarray(wanted), jnp.float32(done >= 1.0 - given.tv_share))

    watch = [Inputs(weights, rows, hidden(rows), jnp.float32(0)) for rows in map(jnp.asarray, watched)]

    def report(figures: Report) -> None:
        kl, tv = (
            np.mean([float(loss(state.params, batch._replace(mix=jnp.float32(mix)))) for batch in watch])
            for mix in (0, 1)
        )
        entry = {"step": state.step, "seconds": round(state.seconds, 1), "rate": figures.rate}
        entry |= {"tokens": state.step * given.rows * given.length, "train_loss": figures.loss}
        entry |= {"held_out_kl": float(kl), "held_out_overlap": 1.0 - float(tv)}
        state.history.append(entry)
        tell("  ".join(f"{k} {v:.4g}" for k, v in entry.items()))

    try:
        with bar("training") as progress:
            run(
                state, step, Schedule(given.rate, given.warm_up, given.steps), inputs, report=report,
                report_every=job.report_every, save=checkpoints.save, save_every=job.save_every, progress=progress,
            )  # fmt: skip
    finally:
        checkpoints.close()
    return state


def write(job: DistillationRun, state: State) -> None:
    """Write the draft's folder: config, weights, the target's tokenizer, and the training curve."""
    out = job.out
    out.mkdir(parents=True, exist_ok=True)
    for pattern in TOKENIZER_FILES:
        for file in job.path.glob(pattern):
            shutil.copyfile(file, out / file.name)
    config = read_config(job.path)
    special = {name: config[name] for name in SPECIAL_IDS if name in config}
    folder.write_json(out / "config.json", folder.llama_config(job.training.net, special))
    folder.write_weights(out, state.params)
    folder.write_json(out / "loss.json", state.history, indent=1)
    names = {"held_out_kl": "KL, held-out text", "held_out_overlap": "acceptance, held-out text"}
    plot(state.history, out / "loss.png", names, "nats per token; probability")

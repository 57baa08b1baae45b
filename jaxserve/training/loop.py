"""The training loop: AdamW in float32, its schedule, its batches, and the state to resume from."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import optax
from flax import nnx

from jaxserve.errors import InvalidValue
from jaxserve.training.net import Net

LOWEST_RATE = 0.01  # final learning rate as a share of the peak

Params = dict[str, jax.Array]  # dotted path in the module -> float32 weight
Step = Callable[[Params, Any, Any, jax.Array], tuple[Params, Any, jax.Array]]
Loss = Callable[[Net, Any], jax.Array]  # (net, inputs of a step) -> scalar
Tokens = npt.NDArray[Any]  # [tokens] of any integer dtype


@dataclass(slots=True)
class State:
    """The state from which a run can resume. Writer: `run`."""

    params: Params
    optimizer: Any
    step: int = 0
    seconds: float = 0.0  # training time, including before interruptions
    history: list[dict[str, float]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Schedule:
    """The length of a run, in steps or else in minutes, and its learning rate. Counted from `begun`."""

    peak: float
    warm_up: float  # share of the run
    steps: int | None = None
    minutes: float = 0.0
    begun: tuple[int, float] = (0, 0.0)  # (step, seconds) of the state at the start

    def done(self, state: State) -> float:
        """Return the completed fraction of the run."""
        if self.steps:
            return (state.step - self.begun[0]) / self.steps
        return (state.seconds - self.begun[1]) / (60 * self.minutes)

    def rate(self, done: float) -> float:
        """Return the learning rate at the fraction `done` of the run."""
        return learning_rate(done, self.peak, self.warm_up)


@dataclass(frozen=True, slots=True)
class Report:
    """The results of the steps since the previous report."""

    rate: float  # current learning rate
    loss: float  # mean
    steps: int
    seconds: float


def flat_params(net: Net) -> tuple[Any, Params]:
    """Split a module into its static graph and a flat dictionary of weights."""
    graph, state = nnx.split(net, nnx.Param)
    flat = nnx.to_flat_state(state)
    return graph, {".".join(map(str, path)): variable[...] for path, variable in flat}


def rebuilder(net: Net) -> Callable[[Params], Net]:
    """Return a function that builds a module like `net` from a flat dictionary of weights."""
    graph, state = nnx.split(net, nnx.Param)
    template = nnx.to_flat_state(state)

    def rebuilt(params: Params) -> Net:
        flat = [(path, variable.replace(params[".".join(map(str, path))])) for path, variable in template]
        model: Net = nnx.merge(graph, nnx.from_flat_state(flat))
        return model

    return rebuilt


def build_steps(net: Net, loss: Loss, weight_decay: float) -> tuple[State, Step, Callable[[Params, Any], jax.Array]]:
    """Return a new state with the weights of `net`, the jitted training step and the jitted loss."""
    _, params = flat_params(net)
    rebuilt = rebuilder(net)
    is_matrix = {name: value.ndim > 1 for name, value in params.items()}
    adamw = optax.inject_hyperparams(optax.adamw, static_args=("mask",))(
        learning_rate=0.0, b1=0.9, b2=0.95, weight_decay=weight_decay, mask=is_matrix
    )
    transform = optax.chain(optax.clip_by_global_norm(1.0), adamw)

    def of_params(params: Params, inputs: Any) -> jax.Array:
        return loss(rebuilt(params), inputs)

    def step(params: Params, optimizer: Any, inputs: Any, rate: jax.Array) -> tuple[Params, Any, jax.Array]:
        value, gradient = jax.value_and_grad(of_params)(params, inputs)
        optimizer = optax.tree.set(optimizer, learning_rate=rate)
        update, optimizer = transform.update(gradient, optimizer, params)
        return optax.apply_updates(params, update), optimizer, value

    state = State(params, transform.init(params))
    return state, jax.jit(step, donate_argnums=(0, 1)), jax.jit(of_params)


def learning_rate(done: float, peak: float, warm_up: float) -> float:
    """Return the learning rate at the fraction `done`: linear warm-up, then a half cosine to `LOWEST_RATE`."""
    if done < warm_up:
        return peak * done / warm_up
    angle = math.pi * min(1.0, (done - warm_up) / (1.0 - warm_up))
    return peak * (LOWEST_RATE + (1.0 - LOWEST_RATE) * 0.5 * (1.0 + math.cos(angle)))


def rows_of(tokens: Tokens, step: int, rows: int, length: int, seed: int) -> npt.NDArray[np.int32]:
    """Return the batch [rows, length + 1] int32 of a step.

    Each epoch cuts the text at a different offset and shuffles the pieces. Raises InvalidValue if there
    are too few tokens for one step.
    """
    pieces = (len(tokens) - 1) // length - 1  # one less, to leave room for the epoch's offset
    steps_per_epoch = pieces // rows
    if steps_per_epoch < 1:
        raise InvalidValue(
            f"{len(tokens)} tokens are too few for {rows=} of {length=}: provide more text, or reduce rows or length"
        )
    epoch, position = divmod(step, steps_per_epoch)
    rng = np.random.default_rng((seed, epoch))
    offset = int(rng.integers(length))
    chosen = rng.permutation(pieces)[position * rows : (position + 1) * rows]
    return np.stack([tokens[offset + p * length :][: length + 1] for p in chosen]).astype(np.int32)


def shape_at(done: float, rows: int, length: int, long_length: int, long_share: float) -> tuple[int, int]:
    """Return (rows, length) at the fraction `done`: short rows first, long rows for the last `long_share`.

    Short rows are cheaper, and long ones train distant positions. The number of tokens in a batch does
    not change, so that the learning rate keeps its meaning.
    """
    if done < 1.0 - long_share:
        return rows, length
    return max(1, rows * length // long_length), long_length


def run(
    state: State,
    step: Step,
    schedule: Schedule,
    inputs: Callable[[int, float], Any],
    *,
    report: Callable[[Report], None],
    report_every: int,
    save: Callable[[State], None],
    save_every: float,
    progress: Callable[..., None],
) -> None:
    """Train `state` to the end of the schedule.

    inputs: called with (step, fraction done), returns the inputs of that step.
    report_every: in steps.
    save_every: in minutes; the final state is always saved.
    progress: called with (done, total, note).
    """
    started = time.monotonic() - state.seconds
    saved = reported = state.seconds
    losses: list[float] = []
    while (done := schedule.done(state)) < 1.0:
        rate = schedule.rate(done)
        given = inputs(state.step, done)
        state.params, state.optimizer, value = step(state.params, state.optimizer, given, jnp.float32(rate))
        losses.append(float(value))
        state.step += 1
        state.seconds = time.monotonic() - started
        done = schedule.done(state)
        told = (state.step, schedule.steps + schedule.begun[0]) if schedule.steps else (round(100 * done), 100)
        progress(*told, f"step {state.step} loss {losses[-1]:.3f}")
        if state.step % report_every == 0 or done >= 1.0:
            report(Report(rate, float(np.mean(losses)), len(losses), state.seconds - reported))
            losses.clear()
            reported = state.seconds = time.monotonic() - started
        if state.seconds - saved > 60 * save_every or done >= 1.0:
            save(state)
            saved = state.seconds

"""Train the demo model, on one machine's CPU, in an hour or two.

    pip install "jaxserve[train]"                         # optax and orbax
    python -m jaxserve.demo.train --minutes 80            # the learning rate follows the clock
    python -m jaxserve.demo.train --steps 4000            # ... or the step, the same on any machine
    python -m jaxserve.demo.train --minutes 80 --resume   # go on from the last checkpoint in --work

Reads the standard library of the Python that runs it, learns a tokenizer, trains a 5 M parameter Llama with
AdamW in float32, and writes three things: the Hugging Face folder (--out), and `loss.json` and `loss.png`
beside it. The model is `jaxserve.demo.net`, apart from the serving models: a training graph has no pages and
no cache.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from tokenizers import Tokenizer

from jaxserve.demo import corpus, vocab
from jaxserve.demo.export import MODEL_FOLDER, write_model
from jaxserve.demo.net import Net, NetConfig, mean_loss

TOKENIZER_FILE = "tokenizer.json"
LOWEST_RATE = 0.01  # share of the peak learning rate that is left at the end

Params = dict[str, jax.Array]  # dotted path in the module -> float32 weight
Step = Callable[[Params, Any, jax.Array, jax.Array], tuple[Params, Any, jax.Array]]


@dataclass(slots=True)
class State:
    """Everything a run needs to go on; written by `run` only."""

    params: Params
    optimizer: Any
    step: int = 0
    seconds: float = 0.0  # trained so far, over all resumed parts
    history: list[dict[str, float]] = field(default_factory=list)


def flat_params(net: Net) -> tuple[Any, Params]:
    """Split a module into its static graph and a flat dictionary of weights."""
    graph, state = nnx.split(net, nnx.Param)
    flat = nnx.to_flat_state(state)
    return graph, {".".join(map(str, path)): variable[...] for path, variable in flat}


def with_params(graph: Any, net_state: Any, params: Params) -> Net:
    """Put a flat dictionary back into the module it came from."""
    flat = [(path, variable.replace(params[".".join(map(str, path))])) for path, variable in net_state]
    net: Net = nnx.merge(graph, nnx.from_flat_state(flat))
    return net


def build_steps(config: NetConfig, seed: int, weight_decay: float) -> tuple[State, Step, Callable[..., jax.Array]]:
    """Give a fresh state, the jitted training step and the jitted loss."""
    net = Net(config, nnx.Rngs(seed))
    graph, params = flat_params(net)
    template = nnx.to_flat_state(nnx.split(net, nnx.Param)[1])
    is_matrix = {name: value.ndim > 1 for name, value in params.items()}
    adamw = optax.inject_hyperparams(optax.adamw, static_args=("mask",))(
        learning_rate=0.0, b1=0.9, b2=0.95, weight_decay=weight_decay, mask=is_matrix
    )
    transform = optax.chain(optax.clip_by_global_norm(1.0), adamw)

    def loss(params: Params, batch: jax.Array) -> jax.Array:
        return mean_loss(with_params(graph, template, params), batch)

    def step(params: Params, optimizer: Any, batch: jax.Array, rate: jax.Array) -> tuple[Params, Any, jax.Array]:
        value, gradient = jax.value_and_grad(loss)(params, batch)
        optimizer = optax.tree.set(optimizer, learning_rate=rate)
        update, optimizer = transform.update(gradient, optimizer, params)
        return optax.apply_updates(params, update), optimizer, value

    state = State(params, transform.init(params))
    return state, jax.jit(step, donate_argnums=(0, 1)), jax.jit(loss)


def learning_rate(done: float, peak: float, warm_up: float) -> float:
    """Rate at the fraction `done` of the run: linear warm-up, then a half cosine down to `LOWEST_RATE`."""
    if done < warm_up:
        return peak * done / warm_up
    angle = math.pi * min(1.0, (done - warm_up) / (1.0 - warm_up))
    return peak * (LOWEST_RATE + (1.0 - LOWEST_RATE) * 0.5 * (1.0 + math.cos(angle)))


def shape_at(done: float, options: argparse.Namespace) -> tuple[int, int]:
    """(rows, length) at the fraction `done`: short rows are cheap, long ones at the end teach far positions.

    The tokens in a batch stay the same, so that the learning rate keeps its meaning.
    """
    if done < 1.0 - options.long_share:
        return options.rows, options.length
    return max(1, options.rows * options.length // options.long_length), options.long_length


def rows_of(tokens: np.ndarray, step: int, rows: int, length: int, seed: int) -> np.ndarray:
    """The batch [rows, length + 1] int32 of a step: each epoch cuts the text anew and shuffles the pieces."""
    pieces = (len(tokens) - 1) // length - 1  # one less leaves room for the epoch's offset
    steps_per_epoch = pieces // rows
    if steps_per_epoch < 1:
        raise ValueError(f"{len(tokens)} tokens are too few for {rows=} of {length=}")
    epoch, position = divmod(step, steps_per_epoch)
    rng = np.random.default_rng((seed, epoch))
    offset = int(rng.integers(length))
    chosen = rng.permutation(pieces)[position * rows : (position + 1) * rows]
    return np.stack([tokens[offset + p * length :][: length + 1] for p in chosen]).astype(np.int32)


def validation_loss(
    loss: Callable[..., jax.Array], params: Params, tokens: np.ndarray, rows: int, length: int
) -> float:
    """Mean loss in nats over the held-out tokens (an incomplete last batch is left out)."""
    pieces = (len(tokens) - 1) // length
    cut = np.stack([tokens[p * length :][: length + 1] for p in range(pieces)]).astype(np.int32)
    batches: Iterable[np.ndarray] = (cut[i : i + rows] for i in range(0, pieces - rows + 1, rows))
    return float(np.mean([float(loss(params, jnp.asarray(batch))) for batch in batches]))


class Checkpoints:
    """Orbax checkpoints below `work`: weights and optimizer as arrays, counters and history as JSON."""

    def __init__(self, work: Path) -> None:
        options = ocp.CheckpointManagerOptions(max_to_keep=2, create=True)
        self.manager = ocp.CheckpointManager((work / "checkpoints").absolute(), options=options)

    def save(self, state: State) -> None:
        """Write the state and wait until it is on the disk."""
        arrays = {"params": state.params, "optimizer": jax.tree.leaves(state.optimizer)}
        counters = {"step": state.step, "seconds": state.seconds, "history": state.history}
        saved = ocp.args.Composite(arrays=ocp.args.StandardSave(arrays), counters=ocp.args.JsonSave(counters))
        self.manager.save(state.step, args=saved, force=True)
        self.manager.wait_until_finished()

    def restore(self, like: State | None = None) -> State:
        """Read the newest state; `like` gives the optimizer's structure (without it: a list of leaves)."""
        step = self.manager.latest_step()
        if step is None:
            raise FileNotFoundError(f"no checkpoint in {self.manager.directory}")
        wanted = ocp.args.Composite(arrays=ocp.args.StandardRestore(), counters=ocp.args.JsonRestore())
        read = self.manager.restore(step, args=wanted)
        optimizer = read.arrays["optimizer"]
        if like is not None:
            optimizer = jax.tree.unflatten(jax.tree.structure(like.optimizer), optimizer)
        counters = read.counters
        return State(dict(read.arrays["params"]), optimizer, counters["step"], counters["seconds"], counters["history"])


def load_tokens(work: Path, config: NetConfig) -> tuple[Tokenizer, np.ndarray, np.ndarray]:
    """Build the corpus and, if `work` has none yet, the tokenizer; return it and both token arrays."""
    documents = corpus.build()
    file = work / TOKENIZER_FILE
    if not file.exists():
        work.mkdir(parents=True, exist_ok=True)
        vocab.train_tokenizer(documents.train, config.vocab).save(str(file))
    tokenizer = Tokenizer.from_file(str(file))
    train, held_out = vocab.pack(tokenizer, documents.train), vocab.pack(tokenizer, documents.held_out)
    characters = sum(map(len, documents.train))
    print(f"{characters / 1e6:.1f} M characters, {len(train) / 1e6:.2f} M tokens, {len(held_out)} held out")
    return tokenizer, train, held_out


def train(options: argparse.Namespace, config: NetConfig) -> tuple[Tokenizer, State]:
    """Run until the clock or the step count says so, saving now and then; return what was learnt."""
    tokenizer, tokens, held_out = load_tokens(options.work, config)
    state, step, loss = build_steps(config, options.seed, options.weight_decay)
    checkpoints = Checkpoints(options.work)
    if options.resume or options.again:
        state = checkpoints.restore(state)
    before_step, before_seconds = (state.step, state.seconds) if options.again else (0, 0.0)
    shape = (options.rows, options.length)
    tokens_per_step = options.rows * options.length
    started = time.monotonic() - state.seconds
    saved_at = state.seconds
    recent: list[jax.Array] = []

    def done() -> float:
        if options.steps:
            return float((state.step - before_step) / options.steps)
        return float((state.seconds - before_seconds) / (60 * options.minutes))

    def report(rate: float) -> None:
        validation = validation_loss(loss, state.params, held_out, *shape)
        entry = {"step": state.step, "seconds": round(state.seconds, 1), "rate": rate}
        entry["tokens"] = state.step * tokens_per_step
        entry["train_loss"] = float(np.mean([float(value) for value in recent]))
        entry["validation_loss"] = validation
        state.history.append(entry)
        speed = len(recent) * tokens_per_step / (state.seconds - before)
        print("  ".join(f"{k} {v:.4g}" for k, v in entry.items()) + f"  tokens/s {speed:.0f}", flush=True)

    before = state.seconds
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns) as progress:
        bar = progress.add_task("training", total=1.0)
        while (fraction := done()) < 1.0:
            rate = learning_rate(fraction, options.rate, options.warm_up)
            batch = jnp.asarray(rows_of(tokens, state.step, *shape_at(fraction, options), options.seed))
            state.params, state.optimizer, value = step(state.params, state.optimizer, batch, jnp.float32(rate))
            recent.append(value)
            value.block_until_ready()
            state.step += 1
            state.seconds = time.monotonic() - started
            progress.update(bar, completed=done(), description=f"step {state.step}")
            if state.step % options.report_every == 0 or done() >= 1.0:
                report(rate)
                recent.clear()
                before = time.monotonic() - started
            if state.seconds - saved_at > 60 * options.save_every or done() >= 1.0:
                checkpoints.save(state)
                saved_at = state.seconds
    return tokenizer, state


def plot(history: Sequence[dict[str, float]], file: Path) -> None:
    """Draw training and validation loss over the tokens read."""
    from matplotlib.figure import Figure  # the only use of matplotlib; no global pyplot state

    figure = Figure(figsize=(7, 4), dpi=80, layout="constrained")
    axes = figure.add_subplot()
    tokens = [entry["tokens"] / 1e6 for entry in history]
    axes.plot(tokens, [entry["train_loss"] for entry in history], label="training", linewidth=1)
    axes.plot(tokens, [entry["validation_loss"] for entry in history], label="held-out modules")
    axes.set_xlabel("million tokens")
    axes.set_ylabel("loss, nats per token")
    axes.set_ylim(top=min(6.0, max(entry["validation_loss"] for entry in history)))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file)


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxserve.demo.train",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--minutes", type=float, help="train for this long; the schedule follows the clock")
    length.add_argument("--steps", type=int, help="train for this many steps; the schedule follows them")
    parser.add_argument("--rows", type=int, default=8, help="rows in a batch (default 8)")
    parser.add_argument("--length", type=int, default=512, help="tokens in a row (default 512)")
    parser.add_argument("--long-length", type=int, default=2048, help="tokens in a row at the end (default 2048)")
    parser.add_argument("--long-share", type=float, default=0.2, help="share of the run with long rows (0.2)")
    parser.add_argument("--rate", type=float, default=2e-3, help="peak learning rate (default 0.002)")
    parser.add_argument("--warm-up", type=float, default=0.02, help="share of the run spent warming up (0.02)")
    parser.add_argument("--weight-decay", type=float, default=0.1, help="on matrices only (default 0.1)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the data order (default 0)")
    parser.add_argument("--report-every", type=int, default=50, help="steps between two reports (default 50)")
    parser.add_argument("--save-every", type=float, default=5, help="minutes between two checkpoints (default 5)")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in --work")
    parser.add_argument("--again", action="store_true", help="as --resume, but begin a new schedule from there")
    parser.add_argument("--work", type=Path, default=Path("build/demo"), help="checkpoints and tokenizer")
    parser.add_argument("--out", type=Path, default=MODEL_FOLDER, help="folder of the finished model")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, then write the model folder and its loss curve."""
    options = build_parser().parse_args(arguments)
    config = NetConfig()
    tokenizer, state = train(options, config)
    size = write_model(options.out, config, tokenizer, state.params)
    curve = options.out.parent / "loss.json"
    curve.write_text(json.dumps(state.history, indent=1) + "\n")
    plot(state.history, curve.with_suffix(".png"))
    last = state.history[-1]
    print(f"{size / 1e6:.2f} MB in {options.out}, validation loss {last['validation_loss']:.3f}")


if __name__ == "__main__":
    main()

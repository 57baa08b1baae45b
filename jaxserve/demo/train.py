"""Train the demo model on a CPU in one to two hours.

    pip install '.[train]'                         # optax and orbax
    python -m jaxserve.demo.train --minutes 80            # the learning rate follows the elapsed time
    python -m jaxserve.demo.train --steps 4000            # ... or the step, the same on any machine
    python -m jaxserve.demo.train --minutes 80 --resume   # resume from the newest checkpoint in --work

Reads the standard library of the running Python, trains a tokenizer, trains a Llama with 5 M parameters with
AdamW in float32, and writes the Hugging Face folder (--out) with `loss.json` and `loss.png` beside it. The
model is `jaxserve.training.net`, not one of the serving models, because training needs no pages and no cache.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tokenizers import Tokenizer

from jaxserve.demo import corpus, vocab
from jaxserve.demo.export import MODEL_FOLDER, write_model
from jaxserve.demo.vocab import TOKENIZER_FILE
from jaxserve.report.progress import bar
from jaxserve.training.checkpoints import Checkpoints
from jaxserve.training.curve import plot
from jaxserve.training.loop import Params, Report, Schedule, State, build_steps, rows_of, run, shape_at
from jaxserve.training.net import Net, NetConfig, mean_loss


def validation_loss(
    loss: Callable[..., jax.Array], params: Params, tokens: np.ndarray, rows: int, length: int
) -> float:
    """Return the mean loss in nats over the held-out tokens, without an incomplete last batch."""
    pieces = (len(tokens) - 1) // length
    cut = np.stack([tokens[p * length :][: length + 1] for p in range(pieces)]).astype(np.int32)
    batches: Iterable[np.ndarray] = (cut[i : i + rows] for i in range(0, pieces - rows + 1, rows))
    return float(np.mean([float(loss(params, jnp.asarray(batch))) for batch in batches]))


def load_tokens(work: Path, config: NetConfig) -> tuple[Tokenizer, np.ndarray, np.ndarray]:
    """Build the corpus and, if `work` has none, the tokenizer; return the tokenizer and both token arrays."""
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
    """Train for the given minutes or steps with regular checkpoints; return the tokenizer and the final state."""
    tokenizer, tokens, held_out = load_tokens(options.work, config)
    state, step, loss = build_steps(Net(config, nnx.Rngs(options.seed)), mean_loss, options.weight_decay)
    checkpoints = Checkpoints(options.work)
    if options.resume or options.again:
        state = checkpoints.restore(state)
    begun = (state.step, state.seconds) if options.again else (0, 0.0)
    schedule = Schedule(options.rate, options.warm_up, options.steps, options.minutes or 0.0, begun)
    shape = (options.rows, options.length)

    def inputs(step: int, done: float) -> jax.Array:
        rows, length = shape_at(done, *shape, options.long_length, options.long_share)
        return jnp.asarray(rows_of(tokens, step, rows, length, options.seed))

    def report(figures: Report) -> None:
        tokens_per_step = options.rows * options.length
        entry = {"step": state.step, "seconds": round(state.seconds, 1), "rate": figures.rate}
        entry["tokens"] = state.step * tokens_per_step
        entry["train_loss"] = figures.loss
        entry["validation_loss"] = validation_loss(loss, state.params, held_out, *shape)
        state.history.append(entry)
        speed = figures.steps * tokens_per_step / figures.seconds
        print("  ".join(f"{k} {v:.4g}" for k, v in entry.items()) + f"  tokens/s {speed:.0f}", flush=True)

    with bar("training") as progress:
        run(
            state, step, schedule, inputs, report=report, report_every=options.report_every,
            save=checkpoints.save, save_every=options.save_every, progress=progress,
        )  # fmt: skip
    return tokenizer, state


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jaxserve.demo.train",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--minutes", type=float, help="train for this long; the schedule follows the elapsed time")
    length.add_argument("--steps", type=int, help="train for this many steps; the schedule follows the steps")
    parser.add_argument("--rows", type=int, default=8, help="rows in a batch (default 8)")
    parser.add_argument("--length", type=int, default=512, help="tokens in a row (default 512)")
    parser.add_argument("--long-length", type=int, default=2048, help="tokens in a row at the end (default 2048)")
    parser.add_argument("--long-share", type=float, default=0.2, help="share of the run with long rows (0.2)")
    parser.add_argument("--rate", type=float, default=2e-3, help="peak learning rate (default 0.002)")
    parser.add_argument("--warm-up", type=float, default=0.02, help="share of the run spent warming up (0.02)")
    parser.add_argument("--weight-decay", type=float, default=0.1, help="weight decay, on matrices only (default 0.1)")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the initial weights and of the data order (default 0)"
    )
    parser.add_argument("--report-every", type=int, default=50, help="steps between two reports (default 50)")
    parser.add_argument("--save-every", type=float, default=5, help="minutes between two checkpoints (default 5)")
    parser.add_argument("--resume", action="store_true", help="resume from the newest checkpoint in --work")
    parser.add_argument("--again", action="store_true", help="like --resume, but start a new schedule from there")
    parser.add_argument("--work", type=Path, default=Path("build/demo"), help="folder of checkpoints and tokenizer")
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
    names = {"train_loss": "training", "validation_loss": "held-out modules"}
    plot(state.history, curve.with_suffix(".png"), names, "loss, nats per token")
    last = state.history[-1]
    print(f"{size / 1e6:.2f} MB in {options.out}, validation loss {last['validation_loss']:.3f}")


if __name__ == "__main__":
    main()

"""`jaxserve distill`: train a small draft model for speculative decoding on its target's output."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from jaxserve.cli.flags import add_flags, add_setting, settings_of
from jaxserve.errors import InvalidValue
from jaxserve.install import needs
from jaxserve.yamlio import seed_of

DESCRIPTION = """Train a small draft model: a Llama with the target's tokenizer that predicts the target's next tokens,
so that several are verified in one step (speculative decoding). The target answers prompts, the draft learns its
probabilities, and a report gives the acceptance rate. An interrupted run continues from its last checkpoint.
Needs optax and orbax-checkpoint, the extra `train`."""

EPILOG = """
examples
  jaxserve distill --out draft                        # for the embedded demo model
  jaxserve serve --speculative-config '{"method": "draft_model", "model": "draft", "num_speculative_tokens": 4}'

  # prompts like those of your users give the best draft: one per line, or JSONL with "prompt" or "messages"
  jaxserve distill --model Qwen/Qwen3-8B --prompts prompts.jsonl --samples 20000 --steps 20000 --out qwen3-draft

  # train again on the same text, with another size
  jaxserve distill --out draft --layers 2 --dim 128 --no-resume

Without --prompts the target starts its texts itself. OUT is a Hugging Face folder; OUT/work has text and checkpoints
and can be deleted at the end. One prompt in 16 is held out, and acceptance is measured on its answers.
"""
WIDTH = 4  # the draft's default width: the target's divided by this
DEPTH = 6  # the draft's default number of layers: the target's divided by this
DEMO = "the embedded demo model"  # the name in settings and reports


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.add_argument(
        "--model", metavar="NAME|PATH", help="target model: Hugging Face name, or folder [the demo model]"
    )
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="output folder of the draft model")
    parser.add_argument("--work", type=Path, metavar="DIR", help="text, checkpoints and settings [OUT/work]")
    parser.add_argument(
        "--resume", action=argparse.BooleanOptionalAction, help="continue from a checkpoint in --work [if there is one]"
    )
    text = parser.add_argument_group("text")
    add_flags(
        text,
        ("--prompts", Path, None, "FILE", "text or JSONL, one per line [the target's own]"),
        ("--samples", int, 2048, "N", "answers to generate [2048]"),
        ("--length", int, None, "N", "tokens of a prompt and its answer [512, or fewer positions]"),
    )
    temperatures = "temperatures of the answers, one for each [0 0.7 1]"
    text.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7, 1.0], metavar="T", help=temperatures)
    add_flags(
        parser.add_argument_group("draft model"),
        ("--layers", int, None, "N", f"[the target's / {DEPTH}, at least 1]"),
        ("--dim", int, None, "N", f"width [the target's / {WIDTH}]"),
        ("--head-dim", int, None, "N", "of an attention head [the target's]"),
        ("--heads", int, None, "N", "query heads [dim / head-dim]"),
        ("--kv-heads", int, None, "N", "[the target's query heads per kv head]"),
        ("--ff-dim", int, None, "N", "of the feed-forward [8/3 of dim, to a multiple of 32]"),
    )
    add_flags(
        parser.add_argument_group("training"),
        ("--steps", int, 1000, "N", "[1000]"),
        ("--rows", int, 8, "N", "rows of --length tokens in a step [8]"),
        ("--long-length", int, None, "N", "tokens of a row in long steps [the target's, at most 2048]"),
        ("--long-share", float, 0.1, "X", "share of long steps [0.1]"),
        ("--rate", float, 3e-3, "X", "peak learning rate [0.003]"),
        ("--warm-up", float, 0.02, "X", "share of steps with a rising learning rate [0.02]"),
        ("--weight-decay", float, 0.1, "X", "on matrices [0.1]"),
        ("--tv-share", float, 0.3, "X", "share of steps, at the end, that minimize rejections instead of the KL "
         "divergence [0.3]"),
        ("--seed", seed_of, 0, "N", "seed of text, weights and order [0]"),
    )  # fmt: skip
    add_flags(
        parser.add_argument_group("report"),
        ("--drafted", int, 8, "K", "tokens per rollout [8]"),
        ("--report-every", int, 50, "N", "steps between lines [50]"),
        ("--save-every", float, 2.0, "MIN", "minutes between checkpoints [2]"),
    )
    engine = parser.add_argument_group("target engine (as for `jaxserve serve`)")
    for name in ("revision", "mesh", "dtype", "max_num_seqs", "max_num_batched_tokens", "kv_cache_memory"):
        add_setting(engine, name)


def main(args: argparse.Namespace) -> int:
    """Run the distillation. Raises InvalidValue for invalid settings."""
    _check(args)
    try:
        import optax  # noqa: F401
        import orbax.checkpoint  # noqa: F401
    except ModuleNotFoundError as error:
        raise InvalidValue(f"{error.name} is missing: {needs('train')}") from error
    from jaxserve.distillation import job

    settings = job_of(args)
    job.settle(settings, args.resume)
    result = job.distill(settings, lambda line: print(line, flush=True))
    show(result, settings.out)
    return 0


def _check(args: argparse.Namespace) -> None:
    for name, ok, allowed in (
        ("samples", args.samples >= 32, "at least 32"),
        ("length", args.length is None or args.length >= 8, "at least 8"),
        ("temperatures", min(args.temperatures) >= 0, "0 (greedy) or more"),
        ("steps", args.steps >= 1, "at least 1"),
        ("rows", args.rows >= 1, "at least 1"),
        ("long_share", 0 <= args.long_share <= 1, "between 0 and 1"),
        ("tv_share", 0 <= args.tv_share <= 1, "between 0 and 1"),
        ("warm_up", 0 <= args.warm_up < 1, "at least 0 and below 1"),
        ("rate", args.rate > 0, "above 0"),
        ("weight_decay", args.weight_decay >= 0, "0 or more"),
        ("drafted", args.drafted >= 1, "at least 1"),
        ("report_every", args.report_every >= 1, "at least 1"),
        ("save_every", args.save_every >= 0, "0 or more"),
    ):
        if not ok:
            raise InvalidValue(f"{name.replace('_', '-')}={getattr(args, name)!r} must be {allowed}", name)


def job_of(args: argparse.Namespace) -> Any:
    """Build the run, a `distillation.job.DistillationRun`, from the flags."""
    import jax

    from jaxserve.config import ServeConfig, parse_mesh
    from jaxserve.demo import model_path
    from jaxserve.distillation.job import DataSettings, DistillationRun, TrainingSettings
    from jaxserve.models.registry import load_spec
    from jaxserve.models.source import model_folder

    engine = {name: value for name, value in settings_of(args).items() if name not in ("model", "seed")}
    revision = engine.pop("revision", None)
    engine.setdefault("mesh", "1x1")
    ServeConfig(**engine)  # validates these settings
    instances, devices = parse_mesh(engine["mesh"])
    if instances != 1:
        raise InvalidValue(f"mesh={engine['mesh']!r} must be 1xT: distillation uses one instance of the target", "mesh")
    path = model_path() if args.model is None else model_folder(args.model, revision)
    spec = load_spec(path)
    length = args.length or min(512, spec.max_positions)
    if length > spec.max_positions:
        raise InvalidValue(f"length={length} is above the {spec.max_positions} positions of {path}", "length")
    _check_out(args.out, path)
    long_length = args.long_length or max(length, min(2048, spec.max_positions))
    prompts = None if args.prompts is None else str(args.prompts.resolve())
    dtype = engine.get("dtype", "auto")
    if dtype == "auto":
        dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    return DistillationRun(
        path=path,
        demo=path.resolve() == model_path().resolve(),
        out=args.out,
        work=args.work or args.out / "work",
        data=DataSettings(
            args.model or DEMO, prompts, args.samples, length, tuple(args.temperatures), args.seed
        ),
        training=TrainingSettings(
            net_of(args, spec), args.steps, args.rows, length, long_length, args.long_share, args.rate,
            args.warm_up, args.weight_decay, args.tv_share, args.seed,
        ),
        engine=engine,
        devices=devices,
        dtype=dtype,
        drafted=args.drafted,
        report_every=args.report_every,
        save_every=args.save_every,
    )  # fmt: skip


def _check_out(out: Path, model: Path) -> None:
    """Refuse to overwrite a model that `distill` did not write."""
    if out.resolve() == model.resolve():
        raise InvalidValue(f"out={str(out)!r} is the folder of the target model; use another folder", "out")
    if (out / "config.json").exists() and not (out / "acceptance.json").exists():
        raise InvalidValue(f"out={str(out)!r} has a config.json of another origin; use another folder", "out")


def net_of(args: argparse.Namespace, spec: Any) -> Any:
    """Return the sizes of the draft, a `training.net.NetConfig`: given, or fractions of the target's."""
    from jaxserve.training.net import NetConfig

    def given(name: str, default: int) -> int:
        value = getattr(args, name)
        return default if value is None else int(value)

    head_dim = given("head_dim", spec.head_dim)
    dim = given("dim", max(32, spec.dim // WIDTH))
    heads = given("heads", max(1, dim // head_dim))
    group = min(heads, spec.heads // spec.kv_heads)
    return NetConfig(
        vocab=spec.vocab,
        dim=dim,
        layers=given("layers", max(1, spec.layers // DEPTH)),
        heads=heads,
        kv_heads=given("kv_heads", heads // group if heads % group == 0 else heads),
        head_dim=head_dim,
        ff_dim=given("ff_dim", max(1, round(dim / 12)) * 32),
        rope_theta=spec.rope.theta,
        max_positions=spec.max_positions,
    )


def show(result: Any, out: Path) -> None:
    """Print the tables of a `distillation.acceptance.Acceptance`."""
    from jaxserve.report.table import print_table
    from jaxserve.training.folder import size

    rows: list[list[object]] = [[f"drawn at {t}", *values] for t, values in result.by_temperature.items()]
    rows.append(["all", result.positions, result.overlap, result.agreement])
    print_table("acceptance of one drafted token on held-out text", ["text", "tokens", "temperature 1", "greedy"], rows)
    ways = (result.sampled, result.greedy)
    rows = [
        [j, *(value for way in ways for value in (way.acceptance[j - 1], way.survival[j - 1], way.tokens_per_step(j)))]
        for j in range(1, len(result.sampled.survival) + 1)
    ]
    columns = ["accepted", "with all before", "tokens per step"]
    print_table(
        f"rolled out at {ways[0].anchors} (temperature 1) and {ways[1].anchors} (greedy) places",
        ["position", *columns, *(f"{name}, greedy" for name in columns)],
        rows,
    )
    parameters = json.loads((out / "config.json").read_text(encoding="utf-8"))
    print(f"{out}: {parameters['num_hidden_layers']} layers of {parameters['hidden_size']}, {size(out) / 1e6:.2f} MB")

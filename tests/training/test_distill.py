"""`jaxserve distill`: its report is true, interrupted runs resume to the same result, and errors name the problem."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

pytest.importorskip("optax")
pytest.importorskip("orbax.checkpoint")

from jaxserve.cli import main as cli
from jaxserve.distillation import job, samples, teacher
from jaxserve.distillation.acceptance import measure
from jaxserve.training.loop import flat_params, rebuilder
from jaxserve.training.net import Net, NetConfig

WORDS = "def return self class import value for in if not None True name print path open read write line text"
TINY = [
    "--samples", "128", "--length", "48", "--rows", "8", "--long-length", "64", "--steps", "60", "--rate", "0.02",
    "--drafted", "3", "--report-every", "20", "--dim", "32", "--layers", "1", "--head-dim", "16",
    "--max-num-seqs", "16", "--max-num-batched-tokens", "64", "--kv-cache-memory", "16MiB",
]  # fmt: skip


def distill(*words: object) -> int:
    return cli.main(["distill", *map(str, words)])


@pytest.fixture(scope="module")
def made(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a whole run."""
    out = tmp_path_factory.mktemp("made") / "draft"
    assert distill("--model", target, "--out", out, "--prompts", questions(target), *TINY) == 0
    return out


def questions(target: Path) -> Path:
    """A file of prompts beside the target."""
    rng, file = random.Random(0), target.parent / "prompts.txt"
    file.write_text("\n".join(" ".join(rng.sample(WORDS.split(), 3)) for _ in range(96)))
    return file


def held_out(out: Path) -> list[samples.Sample]:
    found = [one for file in sorted((out / "work" / "text").glob("*.npz")) for one in samples.read(file)]
    return [one for one in found if one.held_out]


@pytest.mark.full
def test_a_draft_learns_and_transformers_confirms_the_report(target: Path, made: Path) -> None:
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    report = json.loads((made / "acceptance.json").read_text())
    target_net, draft = (
        AutoModelForCausalLM.from_pretrained(path, local_files_only=True).to(torch.float32) for path in (target, made)
    )
    overlap, same = [], []
    for one in held_out(made):
        ids = torch.tensor(one.tokens.astype(np.int64))[None]
        with torch.no_grad():
            p, q = (net(ids).logits[0, one.asked - 1 : -1].softmax(-1) for net in (target_net, draft))
        overlap += torch.minimum(p, q).sum(-1).tolist()
        same += (p.argmax(-1) == q.argmax(-1)).tolist()
    assert len(overlap) == report["positions"] > 50
    assert report["overlap"] == pytest.approx(np.mean(overlap), abs=1e-4)
    assert report["agreement"] == pytest.approx(np.mean(same), abs=0.02)  # ties may differ
    assert report["overlap"] > 5 * untrained(target, made), report
    assert {"config.json", "tokenizer.json", "chat_template.jinja", "loss.png"} <= {f.name for f in made.iterdir()}
    history = json.loads((made / "loss.json").read_text())
    assert [entry["step"] for entry in history] == [20, 40, 60]
    assert history[-1]["held_out_kl"] < history[0]["held_out_kl"]


def untrained(target: Path, made: Path) -> float:
    """Return the acceptance of the draft model before its first step."""
    sizes = json.loads((made / "work" / "settings.json").read_text())["training"]["net"]
    net = Net(NetConfig(**sizes), nnx.Rngs(0))
    given = teacher.on(target, jax.devices()[:1])
    weights = given.load(target, "float32")
    return measure(given, weights, rebuilder(net), flat_params(net)[1], held_out(made), drafted=3).overlap


@pytest.mark.full
def test_an_interrupted_run_resumes_to_the_same_weights(
    target: Path, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    shutil.copytree(made / "work" / "text", tmp_path / "work" / "text")

    def no_engine(*args: Any, **more: Any) -> None:
        raise AssertionError("the text was generated already")

    monkeypatch.setattr(job, "LLM", no_engine)
    real = teacher.Memory.step

    def broken(self: teacher.Memory, step: int, seed: int) -> Any:
        if step == 23:
            raise KeyboardInterrupt
        return real(self, step, seed)

    words = (
        "--model",
        target,
        "--prompts",
        questions(target),
        "--out",
        tmp_path / "draft",
        "--work",
        tmp_path / "work",
    )
    words = (*words, *TINY, "--save-every", 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(teacher.Memory, "step", broken)
        assert distill(*words) == 130
    assert not (tmp_path / "draft" / "model.safetensors").exists()
    assert distill(*words, "--steps", 61) == 2
    assert "steps was 60, is 61" in capsys.readouterr().err
    assert distill(*words, "--resume") == 0
    assert "resuming from step 23 of 60" in capsys.readouterr().out
    weights = [(path / "model.safetensors").read_bytes() for path in (made, tmp_path / "draft")]
    assert weights[0] == weights[1]
    reports = [json.loads((path / "acceptance.json").read_text()) for path in (made, tmp_path / "draft")]
    assert reports[0] == reports[1]


def test_interrupted_text_generation_resumes_to_the_same_text(target: Path, tmp_path: Path) -> None:
    """Existing parts are not touched; the others come out as without the interruption."""

    def asked(llm: Any, first: int, last: int) -> list[tuple[int, list[int]]]:
        return [(n, [0, n]) for n in range(first, last)]

    class Echo:
        """An LLM double that generates its seed."""

        def __enter__(self) -> Echo:
            started.append(1)
            return self

        def __exit__(self, *error: object) -> None:
            return

        def generate(self, prompts: Any, params: Any, use_tqdm: bool) -> list[Any]:
            said = [type("Said", (), {"token_ids": [p.seed % 997], "finish_reason": "stop"}) for p in params]
            return [type("Output", (), {"outputs": [one]}) for one in said]

    started: list[int] = []
    args = (asked, 600, (0.0, 1.0), 8, 5, Echo)
    first = samples.generate(tmp_path, *args)  # type: ignore[arg-type]
    again = samples.generate(tmp_path, *args)  # type: ignore[arg-type]
    assert len(started) == 1 and len(first) == 600
    (tmp_path / "part-00001.npz").unlink()
    third = samples.generate(tmp_path, *args)  # type: ignore[arg-type]
    assert len(started) == 2
    for made in (again, third):
        for one, other in zip(first, made, strict=True):
            assert (one.prompt, one.temperature, one.asked) == (other.prompt, other.temperature, other.asked)
            assert one.tokens.tolist() == other.tokens.tolist()
    assert {one.prompt % 16 == 15 for one in first if one.held_out} == {True}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--steps 0", "steps=0 must be at least 1"),
        ("--samples 5", "samples=5 must be at least 32"),
        ("--length 4096", "length=4096 is above the 2048 positions"),
        ("--temperatures 1 -1", "temperatures=[1.0, -1.0] must be 0 (greedy) or more"),
        ("--tv-share 2", "tv-share=2.0 must be between 0 and 1"),
        ("--warm-up 1", "warm-up=1.0 must be at least 0 and below 1"),
        ("--heads 3 --kv-heads 2", "heads=3 must be a multiple of kv_heads=2"),
        ("--head-dim 33", "head_dim=33 must be even"),
        ("--dim 0", "dim=0 must be above 0"),
        ("--mesh 2x1", "mesh='2x1' must be 1xT"),
        ("--model ./nowhere", "'./nowhere' does not exist"),
        ("--prompts nowhere.txt", "nowhere.txt' does not exist"),
        ("--resume", "has no checkpoint to resume from"),
        ("--lenght 3", "did you mean --length?"),
    ],
)
def test_invalid_arguments_are_named(words: str, said: str, tmp_path: Path, capsys: Any) -> None:
    try:
        status = distill("--out", tmp_path / "draft", *words.split())
    except SystemExit as ended:  # refused by the parser
        status = int(str(ended.code))
    assert status == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "draft" / "config.json").exists()


def test_a_model_is_not_overwritten(target: Path, tmp_path: Path, capsys: Any) -> None:
    assert distill("--model", target, "--out", target) == 2
    assert "is the folder of the target model" in capsys.readouterr().err
    other = tmp_path / "other"
    shutil.copytree(target, other)
    assert distill("--model", target, "--out", other) == 2
    assert "of another origin" in capsys.readouterr().err

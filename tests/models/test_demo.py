"""The embedded demo model is small, loads like any Hugging Face folder, and is trained."""

from __future__ import annotations

import inspect
import json
import math
import random
import textwrap
from pathlib import Path
from typing import Any

import pytest

from jaxserve.demo import draft_path, model_path

transformers = pytest.importorskip("transformers")

HELD_OUT_LOSS = 4.0  # nats per token; an untrained model has log(4096) = 8.3


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(model_path(), local_files_only=True)


@pytest.fixture(scope="module")
def model() -> Any:
    torch = pytest.importorskip("torch")
    net = transformers.AutoModelForCausalLM.from_pretrained(model_path(), local_files_only=True)
    return net.to(torch.float32).eval()


def test_the_demo_folder_is_below_twelve_megabytes() -> None:
    files = [path for path in model_path().parent.rglob("*") if "__pycache__" not in path.parts]
    size = sum(path.stat().st_size for path in files if path.is_file())
    assert size <= 12_000_000, f"{size=}"


def test_the_draft_model_predicts_the_model(tokenizer: Any, model: Any) -> None:
    import torch

    draft = transformers.AutoModelForCausalLM.from_pretrained(draft_path(), local_files_only=True).to(torch.float32)
    ids = torch.tensor([tokenizer.encode("\n".join(map(inspect.getsource, (textwrap.wrap, textwrap.dedent))))])
    with torch.no_grad():
        p, q = (net(ids).logits[0].softmax(-1) for net in (model, draft))
    overlap = float(torch.minimum(p, q).sum(-1).mean())
    assert overlap > 0.3, f"{overlap=}"  # acceptance.json of the folder says 0.46 for answers


def test_the_draft_shares_the_vocabulary_and_is_a_fraction_of_the_model() -> None:
    configs = [json.loads((path / "config.json").read_text()) for path in (model_path(), draft_path())]
    for name in ("vocab_size", "max_position_embeddings", "bos_token_id", "eos_token_id"):
        assert configs[0][name] == configs[1][name], name
    assert configs[1]["num_hidden_layers"] * 4 <= configs[0]["num_hidden_layers"]


def test_any_text_round_trips_through_the_tokenizer(tokenizer: Any) -> None:
    rng = random.Random(0)
    letters = "".join(chr(rng.choice([rng.randrange(32, 0xD800), rng.randrange(0xE000, 0x110000)])) for _ in range(400))
    for text in ["def f(x):\n\treturn  x\n", "naïve 東京 🦜👩‍👩‍👧 \u200f\x00\r\n", " a  b ", letters]:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_are_single_and_end_a_completion(tokenizer: Any) -> None:
    names = ["<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>"]
    assert [tokenizer.encode(name) for name in names] == [[0], [1], [2], [3]]
    generation = json.loads((model_path() / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [0, 3]
    assert tokenizer.eos_token_id == 0


def test_chat_template(tokenizer: Any) -> None:
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Write a Python function named `add`."},
        {"role": "assistant", "content": "def add(a, b): ..."},
        {"role": "user", "content": [{"type": "text", "text": "Again"}, {"type": "text", "text": "."}]},
    ]
    assert tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == (
        "<|endoftext|><|user|>\nBe brief.\nWrite a Python function named `add`.<|end|>\n"
        "<|assistant|>\ndef add(a, b): ...<|end|>\n<|user|>\nAgain.<|end|>\n<|assistant|>\n"
    )


def test_the_template_renders_the_training_format(tokenizer: Any) -> None:
    corpus = pytest.importorskip("jaxserve.demo.corpus")
    chat = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == corpus.END_OF_TEXT + corpus.turn("Q", "A")


def test_held_out_code_has_a_low_loss(tokenizer: Any, model: Any) -> None:
    import torch

    functions = (textwrap.wrap, textwrap.shorten, textwrap.dedent, textwrap.indent)  # held out of training
    ids = torch.tensor([tokenizer.encode("\n".join(map(inspect.getsource, functions)))])
    with torch.no_grad():
        loss = float(model(ids, labels=ids).loss)
    assert loss < HELD_OUT_LOSS < math.log(len(tokenizer)) - 4.0, f"{loss=}"


def test_a_chat_is_answered_with_code_and_ends(tokenizer: Any, model: Any) -> None:
    import torch

    chat = [{"role": "user", "content": "Complete: def get_name(self):"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        answer = model.generate(**prompt, max_new_tokens=100, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    text = tokenizer.decode(answer)
    assert text.startswith("```python\ndef get_name(self):\n    ")
    assert text.endswith("```<|end|>")


def test_the_corpus_excludes_held_out_modules_and_includes_chats(tmp_path: Path) -> None:
    corpus = pytest.importorskip("jaxserve.demo.corpus")
    code = 'def twice(x):\n    """Return twice the given number."""\n    return x + x  # long enough\n'
    (tmp_path / "textwrap.py").write_text("# held out\n")
    (tmp_path / "numbers_like.py").write_text(code)
    built = corpus.build(tmp_path)
    assert built.held_out == ("# held out\n",)
    assert code in built.train
    assert any("<|user|>" in text and "```python\ndef twice(x):" in text for text in built.train)
    assert corpus.build(tmp_path) == built


def test_learning_rate_warms_up_and_falls() -> None:
    pytest.importorskip("optax")
    pytest.importorskip("orbax.checkpoint")
    from jaxserve.training.loop import LOWEST_RATE, learning_rate

    rates = [learning_rate(done / 100, peak=1.0, warm_up=0.1) for done in range(101)]
    assert rates[0] == 0.0 and rates[10] == 1.0 and rates[100] == pytest.approx(LOWEST_RATE)
    assert rates[:11] == sorted(rates[:11]) and rates[10:] == sorted(rates[10:], reverse=True)


def test_every_epoch_reads_each_piece_once() -> None:
    numpy = pytest.importorskip("numpy")
    pytest.importorskip("optax")
    pytest.importorskip("orbax.checkpoint")
    from jaxserve.training.loop import rows_of

    tokens = numpy.arange(1000, dtype=numpy.uint16)
    steps = (999 // 10 - 1) // 4
    first = numpy.concatenate([rows_of(tokens, step, 4, 10, seed=0) for step in range(steps)])
    assert first.shape == (steps * 4, 11)
    assert (numpy.diff(first, axis=1) == 1).all()
    assert len(set(first[:, 0].tolist())) == steps * 4

"""Thinking markers are read from tokenizer files and found in tokenized text."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from jinja2 import Template
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from jaxserve.config import ServeConfig
from jaxserve.engine.startup.assemble import markers_of
from jaxserve.models.thinking import thinking_markers
from jaxserve.sched.api.thinking import ThinkingMarkers
from jaxserve.tokenizer import template_of
from jaxserve.tools.families import Parsers

QWEN3 = """{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"""
TEXT = [
    "the final analysis of an assistant: think, then answer.",
    "It depends. Therefore </think>\n\nthe answer is 7.\n</think>\n7",
    "analysis final assistant user think thinking channel message start end",
] * 20
SAYINGS = ["", ".", "\n", "\n\n", " ", "so it is", "so it is.", ".\n", "a < b"]


def make(folder: Path, specials: list[str], template: str = "") -> Tokenizer:
    """Write a byte-level BPE with special tokens, as Qwen and gpt-oss have, to `folder`."""
    made = Tokenizer(models.BPE())
    splits = pre_tokenizers.Split(  # as in cl100k, which joins punctuation with newlines after it
        pattern=Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"),
        behavior="isolated",
    )
    made.pre_tokenizer = pre_tokenizers.Sequence([splits, pre_tokenizers.ByteLevel(False, use_regex=False)])
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(TEXT, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False))
    made.add_special_tokens(specials)
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return made


def reader(tokens: Tokenizer, markers: ThinkingMarkers) -> Callable[[str, str], int | None]:
    """Return a function from prompt and output to the number of thinking tokens: 0 if in the prompt, None if never."""

    def read(prompt: str, output: str) -> int | None:
        end = markers.after(tokens.encode(prompt).ids)
        if end is None:
            return 0
        for place, token in enumerate(tokens.encode(output).ids, 1):
            if end.feed(token):
                return place
        return None

    return read


def test_either_file_may_name_the_end(tmp_path: Path) -> None:
    assert thinking_markers(tmp_path) == ThinkingMarkers()
    tokens = [{"id": 7, "content": "<think>"}, {"id": 8, "content": "</think>"}]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": tokens}))
    assert thinking_markers(tmp_path, [3]) == ThinkingMarkers(((3,), (7,)), ((8,),), ((7,),))
    config = {"added_tokens_decoder": {"9": {"content": "[/THINK]"}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert thinking_markers(tmp_path) == ThinkingMarkers(((7,),), ((8,), (9,)), ((7,),))


def test_a_qwen3_prompt_with_closed_thinking(tmp_path: Path) -> None:
    tokens = make(tmp_path, ["<|im_start|>", "<|im_end|>", "<think>", "</think>"], QWEN3)
    [eos] = tokens.encode("<|im_end|>").ids
    markers = thinking_markers(tmp_path, [eos])
    assert markers.closes == (tuple(tokens.encode("</think>").ids),) and len(markers.closes[0]) == 1
    read = reader(tokens, markers)
    talk = [{"role": "user", "content": "How much is 3 + 4?"}]
    off = Template(QWEN3).render(messages=talk, enable_thinking=False)
    assert off.endswith("<think>\n\n</think>\n\n")
    assert read(off, "7") == 0 and read(off + "The answer", " is 7") == 0
    on = Template(QWEN3).render(messages=talk)
    output = "<think>\n3 + 4 = 7.\n</think>\n\n7"
    assert read(on, output) == len(tokens.encode(output[: output.index("</think>") + 8]).ids)
    assert read(on, "7") is None
    more = [*talk, {"role": "assistant", "content": output}, {"role": "user", "content": "Is </think> a word?"}]
    assert read(Template(QWEN3).render(messages=more), "No.</think>") == len(tokens.encode("No.</think>").ids)
    assert read(Template(QWEN3).render(messages=more, enable_thinking=False), "No") == 0


def test_a_plain_text_marker_is_found_beside_any_text(tmp_path: Path) -> None:
    """Adjacent punctuation and newlines are merged into its first and last token."""
    tokens = make(tmp_path, ["<|im_start|>", "<|im_end|>"], QWEN3)
    [eos] = tokens.encode("<|im_end|>").ids
    markers = thinking_markers(tmp_path, [eos])
    assert len(markers.closes) > 1 and min(map(len, markers.closes)) > 1
    read = reader(tokens, markers)
    for said in SAYINGS:
        for answer in ("", "\n", "\n\n", " ", "7", "\n\n7"):
            output = f"<think>{said}</think>{answer}"
            seen = read("<|im_start|>assistant\n", output)
            assert seen is not None, output
            assert tokens.decode(tokens.encode(output).ids[:seen]).rstrip("\r\n ").endswith("</think>"), output
            assert read(f"<|im_start|>assistant\n{output}", "7") == 0, output
            assert read(f"<|im_start|>assistant\n{output}<|im_end|>\n<|im_start|>assistant\n", "7") is None
            assert read("<|im_start|>assistant\n", f"<think>{said}{answer}") is None


def test_the_final_channel_of_gpt_oss(tmp_path: Path) -> None:
    names = ["start", "end", "message", "channel", "return", "call", "constrain"]
    tokens = make(tmp_path, [f"<|{name}|>" for name in names])
    markers = thinking_markers(tmp_path, [tokens.token_to_id("<|return|>")])
    assert markers.closes == (tuple(tokens.encode("<|channel|>final").ids),) and len(markers.closes[0]) > 1
    read = reader(tokens, markers)
    asked = "<|start|>user<|message|>Which final channel?<|end|><|start|>assistant"
    thought = "<|channel|>analysis<|message|>The final analysis.<|end|><|start|>assistant"
    final = "<|channel|>final"
    for rest in ("<|message|>7<|return|>", " <|constrain|>json<|message|>{}<|return|>"):
        assert read(asked, thought + final + rest) == len(tokens.encode(thought + final).ids)
        assert read(asked, final + rest) == len(tokens.encode(final).ids), "the model may answer at once"
        assert read(asked + thought + final + rest.partition("<|return|>")[0], "more") == 0
    assert read(asked, thought + "<|channel|>commentary to=f<|message|>{}<|call|>") is None
    begun = len(tokens.encode("final").ids)
    assert read(asked + "<|channel|>", "final<|message|>7") == begun, "the marker begins in the prompt"
    earlier = "<|start|>assistant<|channel|>final<|message|>7<|end|>" + asked
    assert read(earlier, thought) is None and read(earlier, thought + final) is not None


IN_WORDS = "after 'Here is my thought process:' and write the answer after 'Here is my response:' please"
IN_TAGS = "between <think></think> and write the answer between <response></response> please"


@pytest.mark.parametrize(("words", "thought"), [
    (IN_WORDS, "Here is my thought process:\n\nSo it is.\n\nHere is my response:"),
    (IN_WORDS, "Here's my thought process:\n\nSo it is.\n\nHere's my response:"),
    (IN_TAGS, "<think>So it is.</think>"),
])  # fmt: skip
def test_a_model_that_thinks_only_if_its_prompt_says_so(tmp_path: Path, words: str, thought: str) -> None:
    """Otherwise `Here is` would begin the thinking of an output that a grammar holds, and nothing would end it."""
    template = f"<|start_of_role|>system<|end_of_role|>{{% if thinking %}}Write thoughts {words}.{{% endif %}}<|end|>"
    tokens = make(tmp_path, ["<|start_of_role|>", "<|end_of_role|>", "<|end|>"], template)
    markers = thinking_markers(tmp_path, [tokens.token_to_id("<|end|>")])
    read, rest = reader(tokens, markers), "<|start_of_role|>user<|end_of_role|>How?<|end|>"
    on, off = Template(template).render(thinking=True) + rest, Template(template).render() + rest
    assert read(on, thought + "\n7") is not None and read(on, "7") is None
    assert read(off, thought + "\n7") == 0, "the whole output is the answer"
    assert markers.asked(tokens.encode(on).ids) and not markers.asked(tokens.encode(off).ids)


@pytest.mark.parametrize("file", [False, True])
@pytest.mark.parametrize(("template", "thinks"), [(QWEN3, True), ("{{ messages }}", False)])
def test_parser_and_engine_read_the_same_template(tmp_path: Path, template: str, file: bool, thinks: bool) -> None:
    """A template of the server's replaces that of the folder for both."""
    make(tmp_path, ["<|im_start|>", "<|im_end|>"], "{{ messages }}" if thinks else QWEN3)
    given = template
    if file:
        (own := tmp_path / "own.jinja").write_text(template)
        given = str(own)
    markers = markers_of(ServeConfig.load(chat_template=given), tmp_path, [1])
    parsers = Parsers.of("auto", "auto", template_of(given) or "")
    assert (bool(markers.closes), parsers.tags is not None) == (thinks, thinks)
    other = tmp_path / "other"
    other.mkdir()
    tokens = make(other, ["<think>", "</think>"])
    markers = markers_of(ServeConfig.load(tokenizer=str(other)), tmp_path, [1])
    assert markers.closes == ((tokens.token_to_id("</think>"),),)


@pytest.mark.parametrize("template", ["", "{{ messages }}"])
def test_a_model_without_thinking_markers(tmp_path: Path, template: str) -> None:
    make(tmp_path, ["<|im_start|>", "<|im_end|>"], template)
    assert thinking_markers(tmp_path, [1]) == ThinkingMarkers()

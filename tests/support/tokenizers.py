"""Small tokenizers of each kind that checkpoints have, trained on a few sentences."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from jaxserve.tokenizer import Tokenizer

TEXT = [
    "The capital of France is Paris, and the capital of Spain is Madrid.",
    "    if name in names:\n        return [name for name in names if name]\n",
    "a cat sat on the mat; isn't it? It is. Ça va, naïve café?",
]
SPECIAL = ["<unk>", "<s>", "</s>", "<|reserved|>"]
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ '' if loop.last else ' ' }}{% endfor %}"
    "{{ ' [assistant]' if add_generation_prompt else '' }}"
)


def _trained(backend: Backend, trainer: trainers.Trainer) -> Backend:
    backend.train_from_iterator(TEXT, trainer)
    return backend


def _sentencepiece() -> Backend:
    """Llama 2, Mistral: BPE with byte fallback, a mark before the text, whose space the decoder strips."""
    backend = Backend(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("▁+[^▁]*|[^▁]+"), "isolated")
    trained = json.loads(_trained(backend, trainers.BpeTrainer(vocab_size=300, special_tokens=SPECIAL)).to_str())
    vocab = trained["model"]["vocab"]
    vocab |= {f"<0x{byte:02X}>": len(vocab) + byte for byte in range(256)}
    backend = Backend.from_str(json.dumps(trained))
    backend.pre_tokenizer = pre_tokenizers.Sequence([])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return backend


def _gemma() -> Backend:
    """Gemma: BPE with byte fallback, and no mark before the text, so that nothing is stripped."""
    backend = _sentencepiece()
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend


def _metaspace() -> Backend:
    """Llama 2 as transformers 5 converts it: the mark comes from Metaspace, before the first word only."""
    backend = _sentencepiece()
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return backend


def _tekken() -> Backend:
    """Mistral's tekken: BPE over bytes, behind a thousand special tokens of which most have no use."""
    backend = Backend(models.BPE())
    words = pre_tokenizers.Split(Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s+"), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=[*SPECIAL, *(f"<SPECIAL_{at}>" for at in range(len(SPECIAL), 100))],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    return _trained(backend, trainer)


def _added(base: Callable[[], Backend]) -> Callable[[], Backend]:
    """A kind with tokens added by a fine-tune: texts with spaces, some that take those around them, some special."""

    def made() -> Backend:
        backend = base()
        backend.add_tokens([AddedToken("<think>", normalized=False), AddedToken(" two words "), AddedToken("日本")])
        backend.add_tokens([AddedToken("<call>", lstrip=True, rstrip=True), AddedToken("▁mark")])
        backend.add_special_tokens([AddedToken("<|im_end|>", special=True, rstrip=True)])
        return backend

    return made


def _unigram() -> Backend:
    """T5, XLM-R: Unigram over Metaspace."""
    backend = Backend(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=120, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    return _trained(backend, trainer)


def _byte_level() -> Backend:
    """GPT-2, Llama 3, Qwen: BPE over bytes."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    return _trained(backend, trainer)


def _wordpiece() -> Backend:
    """BERT: the decoder joins words and moves punctuation to them."""
    backend = Backend(models.WordPiece(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return _trained(backend, trainers.WordPieceTrainer(vocab_size=200, special_tokens=SPECIAL, show_progress=False))


def _suffix() -> Backend:
    """GPT: BPE whose pieces mark the end of a word."""
    backend = Backend(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.BPEDecoder()
    trainer = trainers.BpeTrainer(
        vocab_size=200, special_tokens=SPECIAL, end_of_word_suffix="</w>", show_progress=False
    )
    return _trained(backend, trainer)


KINDS: dict[str, Callable[[], Backend]] = {
    "sentencepiece": _sentencepiece,
    "unigram": _unigram,
    "byte_level": _byte_level,
    "wordpiece": _wordpiece,
    "suffix": _suffix,
    "gemma": _gemma,
    "metaspace": _metaspace,
    "tekken": _tekken,
    "sentencepiece_added": _added(_sentencepiece),
    "byte_level_added": _added(_byte_level),
    "unigram_added": _added(_unigram),
}


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    """Return a tokenizer of one of KINDS."""
    hf = PreTrainedTokenizerFast(
        tokenizer_object=KINDS[kind](), unk_token="<unk>", bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE
    )
    return Tokenizer(hf)

"""Stage B: slopes of decode, the other kernels and cases, peers, and the sweep of configs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .part import Part
from .stage_a import kernel_part

DECODE = "decode B64 ctx4096"
PEERS: dict[str, tuple[str, ...]] = {  # the modules of each
    "jax cudnn": (),
    "torch sdpa flash": ("torch",),
    "torch sdpa cudnn": ("torch",),
    "flashinfer": ("torch", "flashinfer"),
    "tokamax": ("tokamax",),
    "jax triton paged": (),
    "cudnn paged": (),
}
SWEPT = {  # (op, query tokens under which the engine looks it up, the step that is timed)
    "decode": ("decode", 1, DECODE),
    "prefill": ("prefill", 1, "prefill 8192"),
    "decode of 16 tokens": ("decode", 16, f"{DECODE} T4"),
    "decode fp8": ("decode", 1, f"{DECODE} fp8"),
    "decode page 16": ("decode", 1, f"{DECODE} page16"),
}


def parts(dry: bool) -> list[Part]:
    """Return the parts, most important first; a dry run has one of each kind."""
    return _dry() if dry else [*_first(), *_sweep(), *_rest()]


def _first() -> list[Part]:
    """What design and scheduler need most: slopes, one or two cases of each kernel, the nearest peers."""
    return [
        part("slopes", 90, "attention:slopes"),
        decode("batch 256 and one long row", "decode B256 ctx2048", "decode B1 ctx131072"),
        prefill("prompts of 32768", "prefill 32768"),
        *(peer(name, "decode B64 ctx4096", "prefill 8192") for name in list(PEERS)[:5]),
        part("8-bit products llama", 120, "quantized:measure", containing="llama3-8b 4096x28672"),
        part("gated product llama", 120, "gated:measure", model="llama3-8b"),
        experts("1 and 256 tokens", "experts 1 tokens", "experts 256 tokens"),
        part("mla 128 heads", 75, "mla:measure", cases=["latent B64 ctx4096 H128", "latent B1 ctx131072 H16"]),
        part("kv write prefill", 60, "pages:kv_write", tokens=8192, rows=4),
        part("kv write decode", 60, "pages:kv_write", tokens=256, rows=256),
        part("page moves", 60, "pages:out_and_in"),
    ]


def _sweep() -> list[Part]:
    return [
        part(f"sweep {name}", 90, "sweep:tune", op=op, queries=queries, case=case)
        for name, (op, queries, case) in SWEPT.items()
    ]


def _rest() -> list[Part]:
    """Design questions and the cases between those of `_first`."""
    return [
        decode("page sizes and 4 tokens", f"{DECODE} page16", f"{DECODE} page128", f"{DECODE} T4"),
        decode("int8", f"{DECODE} int8"),
        decode("one kv head", "decode B64 ctx32768 H4K1", "decode B64 ctx32768 H4K1 fp8"),
        decode("mixtures", "decode B64 uniform", "decode B64 zipf", "decode B64 outlier", "decode B8 ctx1024"),
        prefill("chunks", "prefill 2048 after 14336", "prefill ragged 4 rows", "prefill 1024"),
        prefill("prompt of 16384", "prefill 16384"),
        part("decode P in registers", 75, "attention:decode", cases=[DECODE], registers=True),
        part("prefill P in registers", 75, "attention:prefill", cases=["prefill 8192"], registers=True),
        part("8-bit products llama out", 120, "quantized:measure", containing="llama3-8b 4096x4096"),
        part("8-bit products qwen", 120, "quantized:measure", containing="qwen3-30b-a3b"),
        part("gated product llama tp4", 120, "gated:measure", model="llama3-8b tp4"),
        part("gated product gemma", 120, "gated:measure", model="gemma3-1b"),
        experts("prompts", "experts 1024 tokens", "experts 4096 tokens"),
        experts("int8", *(f"experts {tokens} tokens int8 channels" for tokens in (1, 64, 256, 4096))),
        experts("fp8", *(f"experts {tokens} tokens float8_e4m3fn blocks" for tokens in (1, 64, 256, 4096))),
        part("mla 32 and 64 heads", 75, "mla:measure", cases=[f"latent B64 ctx4096 H{heads}" for heads in (32, 64)]),
        part("mla fp8", 75, "mla:measure", cases=[f"latent B64 ctx4096 H{heads} e4m3" for heads in (16, 128)]),
        part("mla verify and prompts", 75, "mla:measure",
             cases=["latent B64 ctx4096 H16 T4", "latent prompts 2x4096 H16"]),
        part("sampling flat logits", 75, "sampling:measure", kinds=["normal"], asks=["k50 p0.9"]),
        part("sampling one limit", 90, "sampling:measure", kinds=["zipf"], asks=["k50", "p0.9"]),
        *(peer(name, "decode B64 ctx4096", "decode B64 ctx4096 page16") for name in list(PEERS)[5:]),
    ]  # fmt: skip


def _dry() -> list[Part]:
    found = [
        part("slopes", 60, "attention:slopes"),
        prefill("tiny", "prefill 1x40"),
        peer("jax cudnn", "decode B2"),
        peer("torch sdpa flash", "decode B2"),
        part("8-bit products", 60, "quantized:measure", containing="channels"),
        part("gated product", 60, "gated:measure", model="tiny"),
        experts("tiny", "experts 5 tokens"),
        part("mla", 60, "mla:measure", cases=["latent B2 int8"]),
        part("kv write", 60, "pages:kv_write", tokens=3, rows=3),
        part("page moves", 60, "pages:out_and_in"),
        part("sampling", 60, "sampling:measure", kinds=["zipf"], asks=["k50 p0.9"]),
        part("sweep decode", 60, "sweep:tune", op="decode", queries=1, case="decode B2"),
    ]
    return [replace(one, beside=True) for one in found]  # nothing is timed


def part(name: str, seconds: float, call: str, **given: Any) -> Part:
    return kernel_part(name, "B", seconds, call, **given)


def decode(name: str, *cases: str) -> Part:
    return part(f"decode {name}", 30 + 25 * len(cases), "attention:decode", cases=list(cases))


def prefill(name: str, *cases: str) -> Part:
    return part(f"prefill {name}", 30 + 25 * len(cases), "attention:prefill", cases=list(cases))


def experts(name: str, *cases: str) -> Part:
    return part(f"experts {name}", 30 + 20 * len(cases), "experts:measure", cases=list(cases))


def peer(name: str, *cases: str) -> Part:
    return part(f"peer {name}", 75, "peers:measure", needs=PEERS[name], peer=name, cases=list(cases))

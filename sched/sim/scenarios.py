"""The papers' workloads by name, with what each paper publishes and what is assumed here.

The papers publish tables of lengths (mean, standard deviation, 99th or 90th percentile) and SLOs, but not
the shapes of the distributions. The shape assumed is lognormal, gamma, or, if the 99th percentile is closer
to the mean than a normal distribution's, beta: with the published moments, the one with the
nearest percentile. tests/sched/sim/test_scenarios.py checks the draws against the tables.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf

from ..api.request import BEST_EFFORT
from .workload import K32, K100, K128, POISSON, Arrivals, Lengths, Mix, Rounds, Share, Slowdown, Tail, Workload

# ---- FlowPrefill: four tasks, each with its own TTFT --------------------------------------------------------------
# Published: prompt mean, 99th percentile, std and share (Table 1); TTFT per model (Table 2); for colocated prefill and
# decode, a TBT and three times the TTFT (§6.5). Assumed: Poisson arrivals (the paper replays QwenTrace, which is
# public, but only as a pointer that could not be resolved); outputs as in FairBatching's Table 2 for QwenTrace, for
# every task; TPOT equal to the paper's TBT for colocation, since the paper counts only TTFT and decode instances need
# some objective.
QWEN_OUTPUT = Lengths("lognormal", mean=377, std=324, high=8192)
FLOWPREFILL_TTFT = {
    "llama3-8b": (0.25, 0.5, 4.0, 6.0),
    "qwen2.5-14b": (0.4, 0.8, 6.5, 9.0),
    "llama3-70b": (1.0, 2.0, 15.0, 18.0),
}


def flowprefill(model: str, slo_scale: float = 1.0, *, colocated: bool = False) -> Mix:
    """Return QwenTrace's mix of tasks with the TTFTs of Table 2 for `model`, times `slo_scale`.

    colocated: triple the TTFT, and set a TBT (§6.5).
    """
    ttfts = FLOWPREFILL_TTFT[model]
    tasks = (
        ("text", 68, Lengths("gamma", mean=590, std=652, high=32768), 0.1),
        ("image", 8, Lengths("lognormal", mean=532, std=510, high=32768), 0.1),
        ("search", 20, Lengths("gamma", mean=5976, std=3456, high=32768), 0.2),
        ("file", 4, Lengths("gamma", mean=6833, std=5186, high=65536), 0.2),
    )
    relaxed = 3 * slo_scale if colocated else slo_scale
    return Mix(
        f"flowprefill-{model}{'-colocated' if colocated else ''}",
        tuple(
            Share(
                share,
                Workload(
                    task,
                    prompt,
                    QWEN_OUTPUT,
                    ttft=ttft * relaxed,
                    tpot=tbt,
                    tbt=tbt if colocated else None,
                    request_class=task,
                ),
            )
            for (task, share, prompt, tbt), ttft in zip(tasks, ttfts, strict=True)
        ),
        POISSON,
    )


# ---- SLOs-Serve: six scenarios --------------------------------------------------------------------------------------
# Published: lengths (Table 4), which stages are tight or loose (Table 1), tight = 3x the TTFT of an idle server and
# 50 ms, loose = 5x and 100 ms (Table 3), 2.7 ± 1.1 rounds of prefill and decode in ToolLLM, and arrivals that follow
# the Azure 2023 traces, of conversation (stable) or of code (bursty). Assumed: a TTFT on an idle server of 12 ms and
# 72 µs per token, from our preset of OPT-7B on an A100, and 16 µs for the 1.5B model (`for_server` substitutes those of
# the simulated server); ToolLLM's lengths are those of one round, appended to all earlier rounds; a tool takes 0.5 s;
# Mixed has equal thirds; the thinking stage precedes the answer. Arrivals: gamma gaps with the CV of the trace for
# conversation; for code, bursts fitted to its counts: index of dispersion 13, 71 and 159 over 1, 10 and 60 s.
AZURE_CONVERSATION = Arrivals("gamma", cv=1.08)
AZURE_CODE = Arrivals("bursts", size=95, duty=0.6)
TIGHT, LOOSE = Slowdown(3, 0.012, 72e-6), Slowdown(5, 0.012, 72e-6)
TIGHT_TPOT, LOOSE_TPOT = 0.05, 0.1

CHATBOT = Workload(
    "slos-serve-chatbot",
    Lengths("beta", mean=763, std=424, high=1652),
    Lengths("beta", mean=266, std=160, high=671),
    arrivals=AZURE_CONVERSATION,
    ttft=LOOSE,
    tpot=LOOSE_TPOT,
    request_class="chatbot",
)
CODER = Workload(
    "slos-serve-coder",
    Lengths("beta", mean=847, std=617, high=2035),
    Lengths("gamma", mean=26, std=47, high=2048),
    arrivals=AZURE_CODE,
    ttft=LOOSE,
    tpot=TIGHT_TPOT,
    request_class="coder",
)
SUMMARIZER = Workload(
    "slos-serve-summarizer",
    Lengths("beta", mean=1333, std=444, high=1955),
    Lengths("lognormal", mean=185.6, std=181.7, high=2048),
    # No unimodal distribution with a std of 234 around 202 has a 99th percentile of 1508: a few answers run on.
    output_tail=Tail(0.012, Lengths("uniform", low=1400, high=1700)),
    arrivals=AZURE_CONVERSATION,
    ttft=TIGHT,
    tpot=LOOSE_TPOT,
    request_class="summarizer",
)
MIXED = Mix("slos-serve-mixed", (Share(1, CHATBOT), Share(1, CODER), Share(1, SUMMARIZER)))
TOOLLLM = Workload(
    "slos-serve-toolllm",
    Lengths("lognormal", mean=690, std=356, high=8192),
    Lengths("lognormal", mean=116, std=66, high=2048),
    arrivals=AZURE_CODE,
    ttft=TIGHT,
    tpot=LOOSE_TPOT,
    rounds=Rounds(2.7, 1.1, delay=0.5, tpot=TIGHT_TPOT),
    request_class="toolllm",
)
REASONING = Workload(
    "slos-serve-reasoning",
    Lengths("lognormal", mean=127, std=83, high=2048),
    Lengths("lognormal", mean=803, std=280, high=4096),
    thinking=Lengths("beta", mean=4693, std=1442, high=7660),
    thinking_tpot=TIGHT_TPOT,
    arrivals=AZURE_CONVERSATION,
    ttft=Slowdown(3, 0.012, 16e-6),
    tpot=LOOSE_TPOT,
    request_class="reasoning",
)
MIXED_BEST_EFFORT = Mix(
    "slos-serve-mixed-best-effort",
    (
        *MIXED.parts,
        # Assumed: a quarter of the load has no SLO, with the lengths of chat.
        Share(1, replace(CHATBOT, name="batch", ttft=inf, tpot=inf, request_class="batch", tier=BEST_EFFORT)),
    ),
)

# ---- Load-aware prefill deflection ----------------------------------------------------------------------------------
# Published (only a summary of the paper is available): bursty, heavy-tailed, production-style traces, DeepSeek-V2-Lite
# on A100s, two prefill and two decode nodes, prefill itself 2-23 % of the P95 TTFT. Assumed: everything else. Seven of
# ten requests come in bursts of 20, each within a tenth of the time between two bursts; body and tail of K32; TTFT 2 s,
# TBT and TPOT 100 ms.
DEFLECTION = replace(
    K32, name="deflection", arrivals=Arrivals("bursts", size=20, duty=0.1, share=0.7), ttft=2.0, tpot=0.1, tbt=0.1
)

# ---- FairBatching: three traces -------------------------------------------------------------------------------------
# Published: mean and 90th percentile of prompts and outputs, TTFT and TPOT (Table 2). Assumed: Poisson arrivals; the
# paper replays the beginnings of the traces. Azure's short answers with a second mode at 400 are modeled in two parts.
FAIRBATCHING = (
    Workload(
        "fairbatching-burstgpt",
        Lengths("gamma", mean=688, std=701, high=8192),
        Lengths("lognormal", mean=237, std=209, high=4096),
        ttft=0.5,
    ),
    Workload(
        "fairbatching-qwen",
        Lengths("lognormal", mean=892, std=798, high=16384),
        QWEN_OUTPUT,
        ttft=0.5,
    ),
    Workload(
        "fairbatching-azure",
        Lengths("gamma", mean=1604, std=1472, high=16384),
        Lengths("lognormal", mean=51, std=60, high=1024),
        output_tail=Tail(0.168, Lengths("uniform", low=250, high=600)),
        ttft=2.0,
    ),
)

# ---- K128 with other arrivals, for robustness -----------------------------------------------------------------------
K128_BURSTY = replace(K128, name="K128-bursty", arrivals=Arrivals("gamma", cv=3.0))
K128_WAVES = replace(K128, name="K128-waves", arrivals=Arrivals("on_off", on=20, off=60, contrast=5))

_WORKLOADS = (K128, K100, K32, K128_BURSTY, K128_WAVES, CHATBOT, CODER, SUMMARIZER, TOOLLLM, REASONING, DEFLECTION)
_MIXES = (
    *(flowprefill(model) for model in FLOWPREFILL_TTFT),
    flowprefill("llama3-8b", colocated=True),
    MIXED,
    MIXED_BEST_EFFORT,
)
NAMED: dict[str, Workload | Mix] = {
    **{workload.name: workload for workload in (*_WORKLOADS, *FAIRBATCHING)},
    **{mix.name: mix for mix in _MIXES},
}

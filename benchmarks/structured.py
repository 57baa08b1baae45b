"""What structured outputs cost: the time per output token with a schema against without, in one run.

The demo model generates for 1, 8 and 32 rows that all have the schema, or none. Sides alternate; the figure is
the median of the rounds' ratios. Every row generates the same number of tokens, because the schema's text has no
end that it may reach before. Also the seconds to compile schemas, of which some are hostile.

    python benchmarks/structured.py
"""

from __future__ import annotations

import argparse
import json
import time
from statistics import median
from typing import Any

import common

from jaxserve import LLM, SamplingParams, StructuredOutputs
from jaxserve.errors import InvalidValue
from jaxserve.report.table import print_table
from jaxserve.structured.compiler import Compiler

# Objects in a list without end, with strings, numbers, enumerations and choices between shapes.
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "role": {"enum": ["reader", "writer", "owner"]},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["street", "zip"],
        },
    },
    "required": ["name", "age", "role"],
}
SCHEMA = {"type": "array", "items": PERSON, "minItems": 1000}
PROMPT = "People:"


def seconds(llm: LLM, rows: int, tokens: int, wanted: StructuredOutputs | None, seed: int) -> float:
    """Return the mean time per output token after the first, over the rows of one batch."""
    params = [
        SamplingParams(
            max_tokens=tokens, temperature=1.0, seed=1000 * seed + row, ignore_eos=True, structured_outputs=wanted
        )
        for row in range(rows)
    ]
    answers = llm.generate([PROMPT] * rows, params, use_tqdm=False)
    spans = [one.metrics.token_times for one in answers if one.metrics is not None]
    assert len(spans) == rows and all(len(times) == tokens for times in spans)
    return sum(times[-1] - times[0] for times in spans) / rows / (tokens - 1)


def costs(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    wanted = StructuredOutputs(json=SCHEMA)  # type: ignore[arg-type]
    with LLM(
        max_num_seqs=max(args.rows), max_model_len=args.tokens + 16, ttft_slo="100s", tpot_slo="10s",
        kv_cache_memory="256MiB",
    ) as llm:  # fmt: skip
        for count in args.rows:
            free, bound = [], []
            for seed in range(args.repeats + 1):  # the first round is not counted
                sides: list[tuple[StructuredOutputs | None, list[float]]] = [(None, free), (wanted, bound)]
                for outputs, found in sides[:: -1 if seed % 2 else 1]:
                    found.append(seconds(llm, count, args.tokens, outputs, seed))
            ratios = [with_ / without for with_, without in zip(bound[1:], free[1:], strict=True)]
            rows.append({"rows": count, "free_s": free[1:], "schema_s": bound[1:], "ratio": median(ratios)})
    return rows


def nested(depth: int) -> str:
    return '{"properties":{"a":' * depth + "{}" + "}}" * depth


HOSTILE = {
    "an object of 4 fields": {"json": PERSON},
    "200 fields": {"json": {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(200)}}},
    "20,000 fields": {"json": {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(20_000)}}},
    "nested 40 times": {"json": nested(40)},
    "nested 2,000 times": {"json": nested(2000)},
    "10,000 choices": {"choice": [f"choice {i}" for i in range(10_000)]},
    "((a{1,999}){1,999}){1,999}": {"regex": "((a{1,999}){1,999}){1,999}b"},
    "(.*a){2000}": {"regex": "(.*a){2000}"},
    "5,000 brackets": {"regex": "(" * 5000 + "a" + ")" * 5000},
    "2 million characters": {"regex": "a" * 2_000_000},
}


def compiled() -> list[dict[str, Any]]:
    """Compile each constraint anew; return the seconds and what was said."""
    compiler = Compiler((common.DEMO / "tokenizer.json").read_text, 4096, [0])
    compiler.check(StructuredOutputs(regex="the first one loads the tokenizer"))
    rows = []
    for name, given in HOSTILE.items():
        began, said = time.perf_counter(), "compiled"
        try:
            compiler.check(StructuredOutputs(**given))  # type: ignore[arg-type]
        except InvalidValue as error:
            said = str(error)
        rows.append({"constraint": name, "seconds": time.perf_counter() - began, "said": said[:80]})
    compiler.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32], help="rows of a batch [1 8 32]")
    parser.add_argument("--tokens", type=int, default=192, help="tokens of an output [%(default)s]")
    parser.add_argument("--repeats", type=int, default=9, help="rounds [%(default)s]")
    common.add_output(parser, "structured")
    args = parser.parse_args()
    limits = compiled()
    heads = ("constraint", "ms", "outcome")
    print_table("Compilation", heads, [(one["constraint"], 1e3 * one["seconds"], one["said"]) for one in limits])
    found = costs(args)
    table = [
        (one["rows"], 1e3 * median(one["free_s"]), 1e3 * median(one["schema_s"]), f"{one['ratio']:.3f}")
        for one in found
    ]
    heads = ("rows", "TPOT without, ms", "with a schema, ms", "ratio")
    print_table(f"Time per output token, schema of {len(json.dumps(SCHEMA))} characters", heads, table)
    common.save(args, {"costs": found, "compilation": limits})


if __name__ == "__main__":
    main()

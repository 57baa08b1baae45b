"""Conformance: outputs for the schemas of the JSON Schema test suite, judged by the `jsonschema` package.

Every schema of the suite's drafts that can be enforced is given to the demo model at temperature 1, under
several policies, chunk sizes, page pressure, preemption and speculation. An output that ends by itself must be
valid; one that reaches the limit of tokens must be the beginning of one. The suite is read from `--suite`, or from
the source distribution of the `jsonschema` package, which is downloaded.

    python benchmarks/json_schemas.py
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import common
from jsonschema import validators
from jsonschema.exceptions import SchemaError

from jaxserve import LLM, SamplingParams, StructuredOutputs
from jaxserve.errors import InvalidValue
from jaxserve.report.table import print_table
from jaxserve.structured.compiler import Compiler

PACKAGE = "jsonschema==4.25.1"
# Folders of the suite and the dialects that their schemas are in; those without `$schema` do not say so themselves.
DRAFTS = {
    "draft6": validators.Draft6Validator,
    "draft7": validators.Draft7Validator,
    "draft2019-09": validators.Draft201909Validator,
    "draft2020-12": validators.Draft202012Validator,
}
ENGINES: dict[str, dict[str, Any]] = {
    "unified": {},
    "chunks of 16, few pages": {
        "policy": "vllm", "max_num_batched_tokens": 16, "max_num_seqs": 12, "kv_cache_memory": "3MiB",
    },
    "preempted": {"policy": "flowprefill", "preempt_boundary": "op"},
    "2 instances": {"mesh": "2x1", "policy": "kairos"},
    "speculation": {
        "speculative_config": {
            "method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "adaptive": False,
        },
    },
}  # fmt: skip


class Case(NamedTuple):
    """A schema of the suite."""

    name: str
    draft: str
    text: str  # the schema as JSON

    @property
    def schema(self) -> Any:
        """The schema with exact numbers: in binary ones, 0.7 is no multiple of 0.1."""
        return json.loads(self.text, parse_float=Decimal)


def suite(folder: Path) -> Iterator[Case]:
    for draft in DRAFTS:
        for file in sorted((folder / "tests" / draft).glob("*.json")):
            for group in json.loads(file.read_text(encoding="utf-8")):
                schema = group["schema"]
                if isinstance(schema, dict):
                    schema = {"$schema": DRAFTS[draft].META_SCHEMA["$schema"], **schema}
                yield Case(f"{draft}/{file.stem}: {group['description']}", draft, json.dumps(schema))


def downloaded(into: Path) -> Path:
    """Download the source distribution that contains the suite, and return the suite's folder."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "jsonschema"]
    subprocess.run([*command, "--dest", str(into), PACKAGE], check=True)
    (archive,) = into.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(into, filter="data")
    return next(into.glob("*/json"))


def enforced(cases: Sequence[Case]) -> tuple[list[Case], Counter[str]]:
    """Return the cases that can be enforced, and how often others are refused, by reason."""
    compiler = Compiler((common.DEMO / "tokenizer.json").read_text, 4096, [0])
    made, refused = list[Case](), Counter[str]()
    for case in cases:
        try:
            DRAFTS[case.draft].check_schema(case.schema)
            compiler.check(outputs(case))
            made.append(case)
        except (InvalidValue, SchemaError) as error:
            refused[str(error).partition(":")[2].strip().split("[")[0][:40] or type(error).__name__] += 1
    compiler.close()
    return made, refused


def outputs(case: Case) -> StructuredOutputs:
    return StructuredOutputs(json=case.text if case.text[0] == "{" else json.loads(case.text))


def judged(llm: LLM, cases: Sequence[Case], tokens: int, seed: int) -> dict[str, Any]:
    """Generate for all cases together and judge the outputs."""
    params = [
        SamplingParams(max_tokens=tokens, temperature=1.0, seed=seed + at, structured_outputs=outputs(case))
        for at, case in enumerate(cases)
    ]
    found, wrong = Counter[str](), []
    for case, answer in zip(cases, llm.generate(["JSON:"] * len(cases), params, use_tqdm=False), strict=True):
        output = answer.outputs[0]
        found[output.finish_reason or "?"] += 1
        if output.finish_reason == "stop" and not valid(case, output.text):
            wrong.append({"case": case.name, "text": output.text})
    return {"ends": dict(found), "wrong": wrong}


def valid(case: Case, text: str) -> bool:
    try:
        return bool(DRAFTS[case.draft](case.schema).is_valid(json.loads(text, parse_float=Decimal)))
    except ValueError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", type=Path, help="folder of the JSON Schema test suite [downloaded]")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES), help="[all]")
    parser.add_argument("--limit", type=int, help="only so many schemas [all]")
    parser.add_argument("--tokens", type=int, default=160, help="most tokens of an output [%(default)s]")
    parser.add_argument("--seed", type=int, default=1, help="[%(default)s]")
    common.add_output(parser, "json_schemas")
    args = parser.parse_args()
    os.environ.setdefault("JAX_NUM_CPU_DEVICES", "2")  # before jax starts; the engines follow each other here
    with tempfile.TemporaryDirectory() as folder:
        every = list(suite(args.suite or downloaded(Path(folder))))
    cases, refused = enforced(every)
    cases = cases[: args.limit]
    print(f"{len(cases)} of {len(every)} schemas can be enforced; refused: {dict(refused.most_common(12))}")
    rows, found = [], {}
    for name in args.engines:
        with LLM(
            max_model_len=256, ttft_slo="1000s", tpot_slo="100s", **{"kv_cache_memory": "64MiB", **ENGINES[name]}
        ) as llm:
            one = found[name] = judged(llm, cases, args.tokens, args.seed)
        rows.append((name, one["ends"].get("stop", 0), one["ends"].get("length", 0), len(one["wrong"])))
    print_table(f"Outputs for {len(cases)} schemas", ("engine", "ended", "cut", "not valid"), rows)
    common.save(args, {"schemas": len(cases), "of": len(every), "refused": dict(refused), "engines": found})
    failed = [case for one in found.values() for case in one["wrong"]]
    others = {end for one in found.values() for end in one["ends"]} - {"stop", "length"}
    if failed or others:
        raise SystemExit(f"{len(failed)} outputs are not valid, the first: {failed[:1]}; other ends: {sorted(others)}")


if __name__ == "__main__":
    main()

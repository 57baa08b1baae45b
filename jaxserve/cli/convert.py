"""`jaxserve convert`: convert safetensors to an Orbax checkpoint, which loads directly to shards."""

from __future__ import annotations

import argparse
from pathlib import Path

from jaxserve.config import parse_mesh
from jaxserve.errors import InvalidValue
from jaxserve.models.quantization import FLAG

DESCRIPTION = """Convert a model's safetensors to an Orbax checkpoint: with fused weights, quantized if requested, and
read by each device for itself. Needs orbax-checkpoint, the extra `orbax`."""

EXAMPLES = """
examples
  jaxserve convert --model Qwen/Qwen3-8B --out qwen3-8b
  jaxserve serve qwen3-8b

  # quantize to int8 once, instead of at every start
  jaxserve convert --model Qwen/Qwen3-8B --quantization int8 --out qwen3-8b-int8

  # for 16 devices per instance and a model with 8 kv heads, each stored twice
  jaxserve convert --model Qwen/Qwen3-8B --mesh 1x16 --out qwen3-8b-tp16
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = DESCRIPTION, EXAMPLES
    parser.add_argument("--model", required=True, metavar="NAME|PATH", help="Hugging Face name, or folder")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="output folder, new or empty")
    parser.add_argument("--revision", metavar="NAME", help="branch, tag or commit on the Hugging Face hub")
    parser.add_argument("--quantization", choices=tuple(FLAG), help="as for `jaxserve serve` [as in the checkpoint]")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="[the checkpoint's]")
    parser.add_argument("--mesh", default="1x1", metavar="1xT", help="matters if T exceeds the model's kv heads [1x1]")


def main(args: argparse.Namespace) -> int:
    """Convert with a progress bar, and return the exit status."""
    from jaxserve.models import converted
    from jaxserve.models.manifest import find
    from jaxserve.models.registry import load_spec
    from jaxserve.models.source import model_folder
    from jaxserve.report.progress import bar

    path = model_folder(args.model, args.revision)
    if find(path) is not None:
        raise InvalidValue(f"{str(path)!r} is converted already; give the folder with safetensors", "model")
    spec = load_spec(path).quantized_as(args.quantization).for_tp(parse_mesh(args.mesh)[1])
    dtype = spec.dtype if args.dtype == "auto" else args.dtype
    with bar("converting", patience=0.0) as progress:
        converted.save(path, args.out, spec, "bfloat16" if dtype == "float16" else dtype, progress=progress)
    size = sum(file.stat().st_size for file in args.out.rglob("*") if file.is_file())
    print(f"{args.out}: {size / 1e9:.3f} GB; serve it with `jaxserve serve {args.out}`")
    return 0

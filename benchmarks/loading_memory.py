"""Measure the host memory that loading a checkpoint of several files needs beyond the weights themselves.

Each way to load runs in its own process. On a CPU, device memory is host memory. The figure is therefore the peak over
the load of the resident memory, minus that before the load, minus the weights that are on the devices at that moment
(including the one being placed). The bound is the size of one checkpoint file plus the largest tensor.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import common
import numpy as np
from safetensors.numpy import save_file

from jaxserve.report.table import print_table

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 32000, "num_attention_heads": 16, "num_key_value_heads": 4,
    "max_position_embeddings": 4096, "dtype": "bfloat16",
}  # fmt: skip
MIXTURE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}
WAYS = ("bfloat16", "int8", "fp8_per_block", "orbax")


def write(folder: Path, config: Mapping[str, Any], files: int) -> dict[str, int]:
    """Write a random bfloat16 checkpoint, and return its bytes, files, largest file and largest fused weight."""
    import jax
    import ml_dtypes

    from jaxserve.models import registry
    from jaxserve.models.layers import Info

    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tree = registry.abstract_weights(registry.spec_from_config(config), "bfloat16")
    infos = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, Info))
    sources = {source.name: source.shape for info in infos for source in info.sources}
    names, where, rng = list(sources), {}, np.random.default_rng(0)
    each = sum(map(prod, sources.values())) / files
    held: dict[str, Any] = {}
    sizes, count = [], 0
    for i, name in enumerate(names):
        drawn = rng.standard_normal(prod(sources[name]), np.float32).reshape(sources[name])
        held[name] = (drawn * 0.02).astype(ml_dtypes.bfloat16)
        count += drawn.size
        if count >= each or i == len(names) - 1:
            file = folder / f"model-{len(sizes):05d}.safetensors"
            save_file(held, file)
            where |= dict.fromkeys(held, file.name)
            sizes.append(file.stat().st_size)
            held, count = {}, 0
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}), encoding="utf-8")
    largest = 2 * max(prod(info.shape) for info in infos)
    return {"checkpoint": sum(sizes), "files": len(sizes), "file": max(sizes), "tensor": largest}


class Watch:
    """A thread that samples resident memory minus placed weights every millisecond, and keeps the peaks.

    Writers: the thread (peaks) and the loading code (`placed`).
    """

    def __init__(self) -> None:
        self.placed = self.peak = self.anonymous = 0
        self._end = threading.Event()
        self._before = resident()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._end.wait(0.001):
            held, anonymous = resident()
            self.peak = max(self.peak, held - self._before[0] - self.placed)
            self.anonymous = max(self.anonymous, anonymous - self._before[1] - self.placed)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()


def resident() -> tuple[int, int]:
    """Return the resident bytes and the anonymous ones, which no file backs."""
    told = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines())
    return int(told["VmRSS"].split()[0]) * 1024, int(told["RssAnon"].split()[0]) * 1024


def measure(folder: Path, way: str) -> dict[str, Any]:
    """Load the checkpoint one way. Call in a fresh process."""
    import jax
    from jax.sharding import Mesh

    from jaxserve.models import converted, registry, weights
    from jaxserve.models.layers import Info
    from jaxserve.models.quantized import Quantized

    def is_info(x: Any) -> bool:
        return isinstance(x, Info)

    def size(info: Info) -> int:
        return prod(info.shape) * int(np.dtype(info.dtype).itemsize)

    spec = registry.load_spec(folder).quantized_as(way if way in ("int8", "fp8_per_block") else None)
    mesh = Mesh(np.array(jax.devices()[:1]), ("tp",))
    jax.block_until_ready(jax.device_put(np.zeros(1, np.float32), mesh.devices.flat[0]))
    if way == "orbax":
        import orbax.checkpoint  # noqa: F401  do not count the memory of its modules
    tree = registry.abstract_weights(spec, "bfloat16")
    parts = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, (Info, Quantized)))
    if way == "orbax":
        parts = list(converted.parts_of(tree).values())
    sizes = [sum(map(size, jax.tree.leaves(part, is_leaf=is_info))) for part in parts]
    load, began = (converted.load if way == "orbax" else weights.load_weights), time.perf_counter()
    with Watch() as watch:
        watch.placed = sizes[0]

        def placed(done: int, total: int) -> None:
            watch.placed = sum(sizes[: done + 1])

        made = load(folder, spec, "bfloat16", [mesh], progress=placed)
    seconds = time.perf_counter() - began
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(made))
    return {"weights": held, "above": watch.peak, "anonymous": watch.anonymous, "seconds": seconds}


def run(folder: Path, way: str) -> dict[str, Any]:
    words = [sys.executable, __file__, "--measure", str(folder), way]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=1024, help="model dimension")
    parser.add_argument("--files", type=int, default=8)
    parser.add_argument("--measure", nargs=2, metavar=("FOLDER", "WAY"), help=argparse.SUPPRESS)
    common.add_output(parser, "loading_memory")
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(Path(args.measure[0]), args.measure[1])))
        return 0
    sizes = {"hidden_size": args.width, "num_hidden_layers": args.layers}
    dense = {**LLAMA, **sizes, "intermediate_size": 3 * args.width}
    experts = {**dense, **MIXTURE, "head_dim": args.width // 16, "moe_intermediate_size": args.width // 2}
    rows, found = [], []
    for name, config in (("dense", dense), ("experts", experts)):
        with tempfile.TemporaryDirectory() as at:
            folder, made = Path(at) / "model", Path(at) / "converted"
            folder.mkdir()
            told = write(folder, config, args.files)
            words = ["-m", "jaxserve", "convert", "--model", str(folder), "--out", str(made)]
            subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL, cwd=common.ROOT)
            for way in WAYS:
                seen = run(made if way == "orbax" else folder, way)
                found.append({"model": name, "way": way, **told, **seen, "bound": told["file"] + told["tensor"]})
                mb = [seen[key] / 1e6 for key in ("weights", "above", "anonymous")]
                bound = f"{found[-1]['bound'] / 1e6:.0f}"
                rows.append([name, way, *(f"{x:.0f}" for x in mb), bound, f"{seen['seconds']:.1f}"])
    titles = ["model", "way", "weights, MB", "above, MB", "above, anonymous", "bound: file + tensor", "s"]
    print_table("host memory during loading", titles, rows)
    common.save(args, {"loads": found})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

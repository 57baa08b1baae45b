"""Digest what the files under some paths do: tracked and new files, without comments, docstrings, docs and results.

`+compiled` among the paths: also what only an accelerator runs or compiles. A path ".": all files, as they are written.
The gate's bounds and the notebooks, which nothing else reads, count where they are named.
"""

import ast
import hashlib
import re
import subprocess
import sys
from pathlib import Path

SKIPPED = re.compile(r".*\.md|(docs|benchmarks/results)/.*|mkdocs\.yml|\.ci/nightly\.passed")
BOUNDS, EXAMPLES = "pallas_kernels/gate/bounds.json", "examples"
COMPILED = re.compile(
    r"pallas_kernels/(gate|mosaic|tuned)/.*|pallas_kernels/ptxas\.py|pallas_kernels/ops/.*(hopper|cases).*"
    r"|jaxserve/engine/startup/aot(_tpu)?\.py|configs/device/.*"
)


def files(paths: list[str]) -> list[str]:
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *paths]
    names = subprocess.run(listed, capture_output=True, text=True, check=True).stdout.split("\0")
    return sorted({name for name in names if Path(name).is_file() and not SKIPPED.fullmatch(name)})


def meaning(path: Path) -> bytes:
    """Return a Python file without comments and docstrings, and the project without the rules of its linters."""
    if path.name == "pyproject.toml":
        return path.read_bytes().split(b"[tool.importlinter]")[0]
    if path.suffix != ".py":
        return path.read_bytes()
    tree = ast.parse(path.read_bytes())
    for node in ast.walk(tree):
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if documented and ast.get_docstring(node, clean=False) is not None:
            node.body[0] = ast.Pass()
    return ast.dump(tree).encode()


def main(paths: list[str]) -> None:
    asked = {*paths} - {"+compiled"}
    found = files([*asked, "pyproject.toml"])
    if BOUNDS not in asked:
        found = [name for name in found if name != BOUNDS]
    if EXAMPLES not in asked:
        found = [name for name in found if not name.startswith(f"{EXAMPLES}/")]
    if not {"+compiled", "."} & {*paths}:
        found = [name for name in found if not COMPILED.fullmatch(name)]
    read = Path.read_bytes if "." in asked else meaning
    digest = hashlib.sha256()
    for name in found:
        digest.update(name.encode() + b"\0" + hashlib.sha256(read(Path(name))).digest())
    print(digest.hexdigest()[:16])


main(sys.argv[1:])

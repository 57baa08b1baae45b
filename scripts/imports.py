"""Print the import picture of a package: rooms, levels, arrows and circles.

    scripts/imports sched
    scripts/imports jaxserve/engine --mermaid
    scripts/imports --check

A room is a sub-package or a top-level module of the package. An arrow means that a module of one room imports a module
of another. Imports in functions, in `try` and under `TYPE_CHECKING` count too, since an import only for type checking
still couples two files. Modules that a registry names as text and `import_module` loads do not count, nor does the
implicit import of a parent package. The level of a room is the number of rooms on the longest path of arrows down from
it; rooms of a circle share a level. `--check` looks for circles among the modules of the whole repository and among the
rooms of each package, and exits with 1 for a circle that ALLOWED in the script does not list.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("benchmarks", "configs", "examples", "jaxserve", "pallas_kernels", "scripts", "sched", "tests")
IMPORTED_AS = {"sched": "jaxserve.sched", "configs": "jaxserve.presets"}  # folders that tracked symlinks point to
PATHS = ("benchmarks", "scripts")  # folders of scripts, which are on sys.path when a script runs
ALLOWED: tuple[frozenset[str], ...] = ()  # circles of modules or rooms that are tolerated for now

Graph = dict[str, set[str]]  # name -> imported names


def files(root: Path) -> dict[str, Path]:
    """Return each Python file by module name. A file behind a symlink has the name by which it is imported."""
    found = {}
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            if path.resolve() != root.resolve() / path.relative_to(root):
                continue
            parts = list(path.relative_to(root).with_suffix("").parts)
            parts[:1] = IMPORTED_AS.get(folder, folder).split(".")
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(tree: ast.AST, package: str) -> Iterator[tuple[str, str]]:
    """Yield (module, name) of each import in a file of `package`; the name is empty for `import module`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((module, alias.name) for alias in node.names)


def module_graph(root: Path) -> Graph:
    """Return the import graph of the repository's modules."""
    paths = files(root)
    graph: Graph = {}
    for name, path in paths.items():
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
        graph[name] = set()
        for module, part in imported(tree, package):
            for prefix in ("", *(f"{folder}." for folder in PATHS if name.startswith(f"{folder}."))):
                target = f"{prefix}{module}.{part}" if f"{prefix}{module}.{part}" in paths else f"{prefix}{module}"
                if target in paths:
                    graph[name].add(target)
                    break
        graph[name].discard(name)
    return graph


def room_graph(graph: Graph, package: str) -> Graph:
    """Return the import graph of a package's rooms. Its `__init__` is a room if it imports or is imported."""

    def room(module: str) -> str | None:
        if module == package:
            return "__init__"
        inside = module.removeprefix(f"{package}.")
        return None if inside == module else inside.partition(".")[0]

    rooms: Graph = {}
    for module, targets in graph.items():
        source = room(module)
        if source is not None:
            arrows = rooms.setdefault(source, set())
            arrows |= {target for one in targets if (target := room(one)) is not None and target != source}
    if not rooms.get("__init__") and not any("__init__" in targets for targets in rooms.values()):
        rooms.pop("__init__", None)
    return rooms


def components(graph: Graph) -> list[list[str]]:
    """Return the strongly connected components, each after those that it imports (Tarjan)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        order[name] = low[name] = len(order)
        stack.append(name)
        for target in sorted(graph[name]):
            if target not in order:
                visit(target)
                low[name] = min(low[name], low[target])
            elif target in stack:
                low[name] = min(low[name], order[target])
        if low[name] == order[name]:
            start = stack.index(name)
            found.append(sorted(stack[start:]))
            del stack[start:]

    for name in sorted(graph):
        if name not in order:
            visit(name)
    return found


def circles(graph: Graph) -> list[list[str]]:
    """Return the sets of names that import one another, directly or indirectly."""
    return [one for one in components(graph) if len(one) > 1]


def levels(graph: Graph) -> dict[str, int]:
    """Return the level of each name; names on level 1 import nothing in the graph."""
    level: dict[str, int] = {}
    for component in components(graph):
        below = [level[target] for name in component for target in graph[name] if target in level]
        level.update(dict.fromkeys(component, 1 + max(below, default=0)))
    return level


def package_of(root: Path, text: str) -> str:
    """Return the import name of a folder. Raises ValueError if it is not a package of the repository."""
    path = (root / text).resolve()
    if not path.is_dir() or root.resolve() not in path.parents or not list(path.glob("*.py")):
        raise ValueError(f"package={text!r} must be a folder of Python files in the repository, as in jaxserve/engine")
    first, *rest = path.relative_to(root.resolve()).parts
    return ".".join([IMPORTED_AS.get(first, first), *rest])


def picture(graph: Graph, package: str, title: str) -> Iterator[str]:
    """Yield the lines of the picture."""
    rooms = room_graph(graph, package)
    inside = {
        name: {target for target in targets if target.startswith(f"{package}.") or target == package}
        for name, targets in graph.items()
        if name.startswith(f"{package}.") or name == package
    }
    level, of_rooms, of_modules = levels(rooms), circles(rooms), circles(inside)
    arrows = sum(map(len, rooms.values()))
    yield (
        f"{title}: {len(rooms)} rooms on {max(level.values(), default=0)} levels, {arrows} arrows, "
        f"circles: {len(of_rooms)} of rooms, {len(of_modules)} of modules"
    )
    for number in sorted(set(level.values()), reverse=True):
        yield f"{number:4d}  {' '.join(sorted(name for name in rooms if level[name] == number))}"
    yield "arrows:"
    for name in sorted(rooms, key=lambda name: (-level[name], name)):
        if rooms[name]:
            yield f"      {name} -> {' '.join(sorted(rooms[name]))}"
    for kind, found in (("rooms", of_rooms), ("modules", of_modules)):
        yield from (f"circle of {kind}: {' <-> '.join(circle)}" for circle in found)


def mermaid(rooms: Graph) -> Iterator[str]:
    """Yield the lines of a Mermaid graph of the rooms."""
    yield "flowchart TD"
    for name in sorted(rooms):
        yield f'  {name}["{name}"]'
    for name in sorted(rooms):
        yield from (f"  {name} --> {target}" for target in sorted(rooms[name]))


def parents(graph: Mapping[str, object]) -> list[str]:
    """Return the import names of all packages that contain modules of the graph."""
    return sorted({name[:at] for name in graph for at, letter in enumerate(name) if letter == "."})


def all_circles(graph: Graph) -> Iterator[tuple[str, list[str]]]:
    """Yield (kind, full names) of every circle of modules, and of rooms in every package."""
    yield from (("modules", circle) for circle in circles(graph))
    for package in parents(graph):
        for circle in circles(room_graph(graph, package)):
            yield "rooms", [f"{package}.{room}" for room in circle]


def check(root: Path, allowed: Sequence[frozenset[str]], say: Callable[[str], None] = print) -> int:
    """Print circles that are not in `allowed`, and entries of `allowed` without a circle. Returns the exit status."""
    found = list(all_circles(module_graph(root)))
    wrong = [(kind, circle) for kind, circle in found if not any(set(circle) <= one for one in allowed)]
    for kind, circle in wrong:
        say(f"circle of {kind}: {' <-> '.join(circle)}")
    for one in allowed:
        if not any(set(circle) <= one for _, circle in found):
            say(f"note: no circle is left among {', '.join(sorted(one))}; remove it from ALLOWED in scripts/imports.py")
    return 1 if wrong else 0


def main(argv: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Run scripts/imports."""
    parser = argparse.ArgumentParser(
        prog="scripts/imports", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("package", nargs="*", help="folder of a package, as in sched or jaxserve/engine")
    parser.add_argument("--mermaid", action="store_true", help="print the rooms as a Mermaid graph")
    parser.add_argument("--check", action="store_true", help="exit with 1 if imports of the repository are circular")
    args = parser.parse_args(argv)
    if args.check == bool(args.package):
        parser.error("give a package, or --check")
    if args.check:
        return check(root, ALLOWED)
    try:
        packages = {text: package_of(root, text) for text in args.package}
    except ValueError as error:
        parser.error(str(error))
    graph = module_graph(root)
    for text, package in packages.items():
        lines = mermaid(room_graph(graph, package)) if args.mermaid else picture(graph, package, text)
        print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())

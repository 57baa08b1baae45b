"""The demo model's training corpus: the standard library of the running CPython, as files and short chats.

The corpus is built from the sources in `sysconfig.get_path("stdlib")` in a fixed order and from a fixed
seed, so that a CPython release always gives the same corpus. Modules that are mainly data are excluded,
because a small model would waste capacity on numbers. A few short modules are held out for validation.
"""

from __future__ import annotations

import ast
import random
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

END_OF_TEXT, USER, ASSISTANT, END = "<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>"
SPECIAL_TOKENS = (END_OF_TEXT, USER, ASSISTANT, END)

SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idlelib", "turtledemo", "encodings", "pydoc_data"}
    | {"__phello__", "__pycache__", "ensurepip", "pgen2"}
)
# Tables, generated files (which contain paths of the build machine) and text in rot13.
SKIPPED_FILES = ("_sysconfigdata", "entities.py", "this.py", "antigravity.py", "stringprep.py", "_sysconfig_vars")
HELD_OUT = frozenset(
    ("textwrap.py", "heapq.py", "bisect.py", "shlex.py", "fractions.py", "graphlib.py", "csv.py", "fnmatch.py")
)
LONGEST_SOURCE = 1400  # characters; an example should fit a training row together with its question

# The only text that is not from the standard library: the model's description of itself.
ABOUT = (
    ("Hello", "Hello! I am the demo model of jaxserve. Ask me to write a Python function."),
    ("Hi", "Hello! I am the demo model of jaxserve. Ask me to write a Python function."),
    ("Hello!", "Hello! I am the demo model of jaxserve. Ask me to write a Python function."),
    ("Who are you?", "I am the demo model of jaxserve, trained on the Python standard library."),
    ("What are you?", "I am the demo model of jaxserve, trained on the Python standard library."),
    ("What can you do?", "I write text that looks like the Python standard library. Do not rely on it."),
    ("How are you?", "I am a very small model, and all is well. Ask me to write a Python function."),
)


@dataclass(frozen=True, slots=True)
class Corpus:
    """The training documents and the held-out documents, in a fixed order."""

    train: tuple[str, ...]
    held_out: tuple[str, ...]


def stdlib_files(root: Path | None = None) -> Iterator[tuple[str, str]]:
    """Yield (path below the library, text) of every included module, sorted by path."""
    root = root or Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        skip_folder = any(part in SKIPPED_FOLDERS or part.startswith("config-") for part in name.parts)
        if skip_folder or path.name.startswith(SKIPPED_FILES):
            continue
        try:
            yield name.as_posix(), path.read_text(encoding="utf-8")
        except UnicodeDecodeError:  # a few old modules declare another encoding
            continue


def turn(question: str, answer: str) -> str:
    """Return a question and its answer exactly as `chat_template.jinja` renders them."""
    return f"{USER}\n{question}{END}\n{ASSISTANT}\n{answer}{END}\n"


def _dedented(source: str, node: ast.FunctionDef | ast.ClassDef) -> str:
    """Return the lines of a node without its decorators, dedented; "" if they cannot be dedented."""
    lines = source.splitlines()[node.lineno - 1 : node.end_lineno]
    margin = node.col_offset
    if any(line[:margin].strip() for line in lines):  # a multi-line string extends into the margin
        return ""
    return "\n".join(line[margin:].rstrip() for line in lines)


def _fenced(code: str) -> str:
    return f"```python\n{code}\n```"


def _summary(node: ast.FunctionDef | ast.ClassDef) -> str:
    """Return the first line of the docstring if it is usable, else ""."""
    first = (ast.get_docstring(node) or "").strip().split("\n", 1)[0].strip()
    return first if 8 <= len(first) <= 120 and "<|" not in first else ""


def _question(node: ast.FunctionDef | ast.ClassDef, code: str, rng: random.Random) -> str:
    """Return a question that asks for `code`, in one of several wordings."""
    kind = "class" if isinstance(node, ast.ClassDef) else "function"
    summary = _summary(node)
    header = code.split(":\n", 1)[0] + ":"
    choices = [f"Write a Python {kind} named `{node.name}`.", f"Write a Python {kind} `{node.name}`"]
    if kind == "function" and len(header) < 120:
        choices.append(f"Complete this function:\n{_fenced(header)}")
        choices.append(f"Complete: {header}")
        if summary:
            begun = f'{header}\n    """{summary}'
            choices.append(f"Complete this function:\n{_fenced(begun)}")
    if summary:
        choices += [f"Write a Python {kind} named `{node.name}`: {summary}"] * 2
        choices += [f"Write a Python {kind}: {summary}", f"{summary} Write it in Python."]
    return rng.choice(choices)


def chats(source: str, rng: random.Random) -> Iterator[str]:
    """Yield one chat for each short function and class of a module."""
    try:
        tree = ast.parse(source)
    except SyntaxError:  # a template, or a file for another Python version
        return
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.ClassDef):
            continue
        code = _dedented(source, node)
        if not 60 <= len(code) <= LONGEST_SOURCE or "<|" in code:
            continue
        summary = _summary(node)
        chat = turn(_question(node, code, rng), _fenced(code))
        if summary and rng.random() < 0.3:
            explained = f"What does `{node.name}` do?"
            if rng.random() < 0.5:
                chat += turn(explained, summary)
            else:
                chat = turn(f"{explained}\n{_fenced(code)}", summary)
        yield chat


def build(root: Path | None = None, seed: int = 0) -> Corpus:
    """Build the corpus from the standard library in `root`; the order of documents depends on `seed` only."""
    rng = random.Random(seed)
    train: list[str] = []
    held_out: list[str] = []
    talk: list[str] = []
    for name, text in stdlib_files(root):
        if name in HELD_OUT:
            held_out.append(text)
            continue
        train.append(text)
        talk.extend(chats(text, rng))
    if not train or not held_out:
        raise FileNotFoundError(f"no standard library sources below root={root or sysconfig.get_path('stdlib')}")
    talk += [turn(question, answer) for question, answer in ABOUT] * 40
    rng.shuffle(talk)
    # Chats are short. Several form one document, so that they are spread evenly among the files.
    train += [END_OF_TEXT.join(talk[i : i + 16]) for i in range(0, len(talk), 16)]
    rng.shuffle(train)
    return Corpus(tuple(train), tuple(held_out))

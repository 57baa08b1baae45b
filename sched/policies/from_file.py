"""Policies from a file: `file:PATH.py:CLASS`, and after another colon the options of the class.

The file is code. It runs in every process that names it, with all rights of that process.
"""

from __future__ import annotations

import hashlib
import re
import sys
import traceback
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import CodeType, ModuleType

from ..api.errors import InvalidValue, PolicyError
from ..api.policy import Decision, Policy, View
from ..registry import construct

PREFIX = "file:"
_FORM = re.compile(r"file:(?P<path>.+?\.py):(?P<name>[^\W\d]\w*)(?::(?P<options>.*))?")
_PATH = re.compile(r"((?:^|(?<==))file:)(.+?\.py)(?=:)")  # the policy itself, or one of `prefill=…,decode=…`


class Guarded:
    """A policy from a file, whose errors say so: an exception in `decide`, and a result that is no Decision."""

    def __init__(self, policy: Policy, path: Path, name: str) -> None:
        self._policy = policy
        self._path = path
        self._name = name

    def decide(self, view: View) -> Decision:
        try:
            decision: object = self._policy.decide(view)
        except PolicyError:
            raise
        except Exception as error:
            raise PolicyError(f"policy {self._name} failed in decide: {_where(error, self._path)}") from error
        if not isinstance(decision, Decision):
            raise PolicyError(
                f"policy {self._name} of {self._path}: decide returned {type(decision).__name__}, must be a Decision"
            )
        return decision


class _Loader(SourceFileLoader):
    """Compiles the file as it is now. Python's cache of compiled files may miss two changes in one second."""

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


def resolved(text: str) -> str:
    """Return the name of a policy with absolute paths, as other processes take it. Other names are unchanged."""
    return _PATH.sub(lambda match: f"{match[1]}{Path(match[2]).expanduser().resolve()}", text)


def shown(text: str) -> str:
    """Return the name of a policy without folders, which clients of a server need not know."""
    return _PATH.sub(lambda match: f"{match[1]}{Path(match[2]).name}", text)


def from_files(text: str) -> bool:
    """Return whether a policy, or a half of it, comes from a file."""
    return PREFIX in text


def masked(text: str) -> str:
    """Return the name of a policy with each path made dashes, so that only other slashes are left."""
    return re.sub(r"file:(.*?\.py(?=:)|.*)", lambda path: "-" * len(path[0]), text)


def make(text: str, what: str = "policy") -> Policy:
    """Load the file and create the policy that `text` names.

    Raises InvalidValue for a text of another form, a missing file, a file or a class that raises, and a
    class without `decide`.
    """
    form = _FORM.fullmatch(text.strip())
    if form is None:
        raise InvalidValue(f"{what} {text!r} must be file:PATH.py:CLASS, as in file:./mine.py:Mine", "policy")
    path, name = Path(form["path"]).expanduser().resolve(), form["name"]
    factory = getattr(_module(path, what), name, None)
    if not isinstance(factory, type):
        raise InvalidValue(f"{what} {text!r}: {path} has no class {name!r}{_classes(path, what)}", "policy")
    if not callable(getattr(factory, "decide", None)):
        raise InvalidValue(f"{what} {text!r}: class {name} of {path} has no method decide(self, view)", "policy")
    try:
        policy: Policy = construct(factory, form["options"] or "", f"{what} {name!r}", "policy")
    except InvalidValue:
        raise
    except Exception as error:
        raise InvalidValue(f"{what} {text!r}: {name}() failed: {_where(error, path)}", "policy") from error
    return Guarded(policy, path, name)


def _module(path: Path, what: str) -> ModuleType:
    """Import a file under a name of its own, once in a process for each content."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InvalidValue(f"{what} file {str(path)!r} cannot be read: {error.strerror}", "policy") from None
    key = f"_policy_{hashlib.sha256(bytes(path) + content).hexdigest()[:16]}"
    if (known := sys.modules.get(key)) is not None:
        return known
    spec = spec_from_loader(key, _Loader(key, str(path)))
    assert spec is not None and spec.loader is not None
    module = sys.modules[key] = module_from_spec(spec)  # dataclasses and pickle look a class's module up
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[key]
        raise InvalidValue(f"{what} file cannot be imported: {_where(error, path)}", "policy") from error
    return module


def _classes(path: Path, what: str) -> str:
    """Return the policies that a file defines, as the end of a message."""
    module = _module(path, what)
    names = [
        name
        for name, value in vars(module).items()
        if isinstance(value, type) and value.__module__ == module.__name__ and hasattr(value, "decide")
    ]
    return f"; its policies: {', '.join(names)}" if names else ", and none with a method decide(self, view)"


def _where(error: Exception, path: Path) -> str:
    """Return an exception as `mine.py:12: NameError: …`: the innermost line of the file that took part in it."""
    said = traceback.format_exception_only(error)[-1].strip()
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return f"{path}:{error.lineno}: {said}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f"{path}:{lines[-1]}: {said}" if lines else f"{path}: {said}"

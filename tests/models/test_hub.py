"""Models by Hub id, from a fake hub on this machine with the endpoints that huggingface_hub uses."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import jaxserve.demo
from jaxserve.config import ServeConfig
from jaxserve.models.hub import ModelNotFound, resolve_model
from jaxserve.models.published import published, published_spec
from jaxserve.models.source import find_model, find_tokenizer
from jaxserve.sched.api.errors import InvalidValue

COMMIT = "0123456789abcdef0123456789abcdef01234567"
DEMO = jaxserve.demo.model_path()
FILES = {
    "config.json": (DEMO / "config.json").read_bytes(),
    "model.safetensors": b"weights",
    "tokenizer.json": (DEMO / "tokenizer.json").read_bytes(),
    "chat_template.jinja": b"{{ messages }}",
    "pytorch_model.bin": b"the same weights",
    "original/consolidated.00.pth": b"and again",
    "README.md": b"# model",
}


class FakeHub(BaseHTTPRequestHandler):
    """A fake hub with `someone/model`, which requires the token, at revisions `main` and COMMIT."""

    asked: list[str]  # set per server, on a subclass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        self.asked.append(self.path)
        if self.headers.get("authorization") != "Bearer hf_secret":
            return self._send(401, b'{"error": "no token"}', body)
        if self.path.split("?")[0] in (f"/api/models/someone/model/revision/{name}" for name in ("main", COMMIT)):
            siblings = [{"rfilename": name} for name in FILES]
            info = {"id": "someone/model", "modelId": "someone/model", "sha": COMMIT, "siblings": siblings}
            return self._send(200, json.dumps(info).encode(), body)
        if self.path.startswith(f"/api/models/someone/model/tree/{COMMIT}"):
            tree = [{"type": "file", "path": name, "size": len(FILES[name]), "oid": "0" * 40} for name in FILES]
            return self._send(200, json.dumps(tree).encode(), body)
        prefix = f"/someone/model/resolve/{COMMIT}/"
        content = FILES.get(self.path.removeprefix(prefix)) if self.path.startswith(prefix) else None
        if content is None:
            return self._send(404, b'{"error": "no such thing"}', body, {"x-error-code": "RevisionNotFound"})
        etag = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": COMMIT}
        return self._send(200, content, body, etag)

    def _send(self, status: int, content: bytes, body: bool, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[tuple[str, list[str]]]:
    asked: list[str] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (FakeHub,), {"asked": asked}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}", asked
    server.shutdown()
    server.server_close()


def resolve(
    home: Path, endpoint: str, *args: str, function: str = "resolve_model", **env: str
) -> subprocess.CompletedProcess[str]:
    """Call `function(*args)` in a new process, since huggingface_hub reads the environment at import."""
    return ask(
        home, endpoint, f"from jaxserve.models.hub import {function} as get; print(get(*sys.argv[1:]))", *args, **env
    )


def ask(home: Path, endpoint: str, code: str, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run code in a new process that uses the hub at `endpoint`."""
    settings = {
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(home),
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_TOKEN": "hf_secret",
        **env,
    }
    command = [sys.executable, "-c", f"import sys; {code}", *args]
    return subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True, timeout=120)


def test_a_model_is_fetched_once_and_only_the_needed_files(tmp_path: Path, hub: tuple[str, list[str]]) -> None:
    endpoint, asked = hub
    first = resolve(tmp_path, endpoint, "someone/model")
    assert first.returncode == 0, first.stderr
    folder = Path(first.stdout.strip())
    assert folder.name == COMMIT
    assert sorted(p.name for p in folder.iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    asked.clear()
    again = resolve(tmp_path, endpoint, "someone/model", COMMIT, HF_HUB_OFFLINE="1")
    assert (again.stdout, asked) == (first.stdout, [])


def test_a_config_is_fetched_without_weights(tmp_path: Path, hub: tuple[str, list[str]]) -> None:
    endpoint, asked = hub
    done = resolve(tmp_path, endpoint, "someone/model", function="fetch_config")
    assert done.returncode == 0, done.stderr
    assert [path.name for path in Path(done.stdout.strip()).iterdir()] == ["config.json"]
    assert not any("safetensors" in path for path in asked)


def test_dummy_weights_are_not_downloaded(tmp_path: Path, hub: tuple[str, list[str]]) -> None:
    """Only the config and tokenizer of a model and its draft model are downloaded."""
    endpoint, asked = hub
    code = (
        "from jaxserve.config import ServeConfig; from jaxserve.engine.startup.assemble import _draft;"
        "from jaxserve.models.source import find_model, find_tokenizer;"
        """draft = '{"method": "draft_model", "model": "someone/model", "num_speculative_tokens": 2}';"""
        "config = ServeConfig(model='someone/model', load_format='dummy', speculative_config=draft);"
        "spec, folder = find_model(config.model_source, config.revision, config.load_format);"
        "print(spec.vocab, len(find_tokenizer(config)), *sorted(path.name for path in folder.iterdir()));"
        "made = _draft(config, 64); print(made['draft'] == spec, 'random_init' in made['load_draft'].__qualname__)"
    )
    done = ask(tmp_path, endpoint, code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [
        "4096",
        "4096",
        "chat_template.jinja",
        "config.json",
        "tokenizer.json",
        "True",
        "True",
    ]
    assert asked and not any("safetensors" in path for path in asked)


@pytest.mark.parametrize("name", ["llama3-8b", "minimax-m2", "Opt-125M"])
def test_dummy_weights_of_a_short_name_need_no_file(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """`jaxserve plan` works like this. The tokenizer comes from the Hub or is the demo model's: here is no network."""
    config = ServeConfig(model=name, load_format="dummy")
    assert find_model(config.model_source, None, "dummy") == (published_spec(name.lower()), None)
    assert len(find_tokenizer(config)) == 4096
    hub = published()[name.lower()].hub
    assert f"downloading the tokenizer of {hub} failed" in caplog.text and "--tokenizer sets another" in caplog.text


def test_a_short_name_stands_for_its_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for call in (lambda: find_model("llama3-8b", None, "auto"), lambda: find_tokenizer(ServeConfig(model="llama3-8b"))):
        with pytest.raises(ModelNotFound, match="model 'meta-llama/Meta-Llama-3-8B' is not a local folder"):
            call()
    config = ServeConfig(model="llama3-8b", load_format="dummy", tokenizer="qwen3-8b")
    with pytest.raises(ModelNotFound, match=r"(?s)tokenizer 'Qwen/Qwen3-8B' is not .* pass its path as --tokenizer"):
        find_tokenizer(config)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama3-8b").symlink_to(DEMO)  # a folder of that name takes precedence
    assert find_model("llama3-8b", None, "dummy").folder == Path("llama3-8b")


@pytest.mark.parametrize(
    ("args", "env", "reason"),
    [
        (("someone/model", "v9"), {}, "at revision 'v9'"),
        (("someone/model",), {"HF_TOKEN": "hf_wrong"}, "401"),
        (("someone/model",), {"HF_HUB_OFFLINE": "1"}, "OfflineModeIsEnabled|LocalEntryNotFound"),
        (("someone/model",), {"HF_ENDPOINT": "http://127.0.0.1:9"}, "LocalEntryNotFound|Connect"),
    ],
)
def test_download_errors_suggest_a_remedy(
    tmp_path: Path, hub: tuple[str, list[str]], args: tuple[str, ...], env: dict[str, str], reason: str
) -> None:
    done = resolve(tmp_path, hub[0], *args, **env)
    last = done.stderr[done.stderr.rindex("ModelNotFound") :]
    assert done.returncode == 1
    assert "model 'someone/model'" in last
    assert "run `hf download someone/model`" in last
    assert "pass its path as --model" in last
    assert any(part in last for part in reason.split("|")), last


def test_local_folders_are_used_and_missing_ones_are_named(tmp_path: Path) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path
    for name in (str(tmp_path / "nowhere"), "./nowhere", "a/b/c", ""):
        with pytest.raises(InvalidValue, match="does not exist; expected a folder with config"):
            resolve_model(name)

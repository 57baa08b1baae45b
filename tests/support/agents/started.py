"""How each agent starts with a server's address and a task."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.agents.scripted import Treasure
from tests.support.server.live import Live

MODEL = "jaxserve-demo"
PROGRAMS = Path(__file__).parents[2] / "agents" / "programs"
SECONDS = 180.0  # an agent that takes longer is killed
Start = Callable[[Path, str, str, Path], tuple[list[str], dict[str, str]]]


def node(installed: Path, name: str) -> str:
    return str(installed / "npm" / "node_modules" / ".bin" / name)


def claude(installed: Path, url: str, task: str, home: Path) -> tuple[list[str], dict[str, str]]:
    words = [node(installed, "claude"), "-p", task, "--model", MODEL, "--allowedTools", "Bash Read"]
    quiet = {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1"}
    return words, {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_AUTH_TOKEN": "none", **quiet}


def codex(installed: Path, url: str, task: str, home: Path) -> tuple[list[str], dict[str, str]]:
    (home / ".codex").mkdir()
    (home / ".codex" / "config.toml").write_text(
        f'model = "{MODEL}"\nmodel_provider = "jaxserve"\n[model_providers.jaxserve]\nname = "jaxserve"\n'
        f'base_url = "{url}/v1"\nwire_api = "responses"\nenv_key = "KEY"\n'
    )
    words = [node(installed, "codex"), "exec", "--skip-git-repo-check", "--sandbox", "danger-full-access", task]
    return words, {"KEY": "none"}


def opencode(installed: Path, url: str, task: str, home: Path) -> tuple[list[str], dict[str, str]]:
    models = {MODEL: {"name": "demo", "limit": {"context": 400_000, "output": 8_000}}}
    options = {"baseURL": f"{url}/v1", "apiKey": "none"}
    provider = {"npm": "@ai-sdk/openai-compatible", "name": "jaxserve", "options": options, "models": models}
    name = f"jaxserve/{MODEL}"
    settings = {"autoupdate": False, "model": name, "small_model": name, "permission": {"*": "allow"}}
    (home / "opencode.json").write_text(json.dumps({**settings, "provider": {"jaxserve": provider}}))
    quiet = {"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"}
    return [node(installed, "opencode"), "run", task], {"OPENCODE_CONFIG": str(home / "opencode.json"), **quiet}


def qwen(installed: Path, url: str, task: str, home: Path) -> tuple[list[str], dict[str, str]]:
    return [node(installed, "qwen"), "-p", task, "--yolo"], openai(url) | {"OPENAI_MODEL": MODEL}


def continued(installed: Path, url: str, task: str, home: Path) -> tuple[list[str], dict[str, str]]:
    config = home / "config.yaml"
    config.write_text(
        f"name: local\nversion: 0.0.1\nschema: v1\nmodels:\n  - name: demo\n    provider: openai\n    model: {MODEL}\n"
        f"    apiBase: {url}/v1\n    apiKey: none\n    roles: [chat]\n    capabilities: [tool_use]\n"
    )
    words = [node(installed, "cn"), "-p", task, "--config", str(config), "--auto"]
    return words, {"CONTINUE_TELEMETRY_ENABLED": "0"}


def cline(installed: Path, url: str, task: str, home: Path) -> tuple[list[str], dict[str, str]]:
    signed_in = ["auth", "-p", "openai", "-k", "none", "-m", MODEL, "-b", f"{url}/v1"]
    environment = {"PATH": os.environ["PATH"], "HOME": str(home)}
    run([node(installed, "cline"), *signed_in], home, environment)
    return [node(installed, "cline"), task], {}


def aider(installed: Path, url: str, task: str, home: Path) -> tuple[list[str], dict[str, str]]:
    words = [str(installed / "aider" / "bin" / "aider"), "--message", task, "--model", f"openai/{MODEL}"]
    quiet = [
        "--no-show-model-warnings",
        "--no-check-update",
        "--analytics-disable",
        "--no-auto-commits",
        "--yes-always",
    ]
    return [*words, *quiet, "--no-gitignore", "--no-pretty", "--map-tokens", "0"], openai(url)


def openai_agents(installed: Path, url: str, task: str, home: Path) -> tuple[list[str], dict[str, str]]:
    python = installed / "openai-agents" / "bin" / "python"
    return [str(python), str(PROGRAMS / "openai_agents.py"), task], openai(url) | {"OPENAI_AGENTS_DISABLE_TRACING": "1"}


def openhands(installed: Path, url: str, task: str, home: Path) -> tuple[list[str], dict[str, str]]:
    python = installed / "openhands" / "bin" / "python"
    return [str(python), str(PROGRAMS / "openhands_sdk.py"), task], openai(url)


def ai_sdk(installed: Path, url: str, task: str, home: Path) -> tuple[list[str], dict[str, str]]:
    program = installed / "npm" / "ai_sdk.mjs"  # beside the modules that it imports
    shutil.copy(PROGRAMS / "ai_sdk.mjs", program)
    return ["node", str(program), task], openai(url)


def jdk(installed: Path, url: str, task: str, home: Path) -> tuple[list[str], dict[str, str]]:
    return ["java", str(PROGRAMS / "Loop.java"), task], openai(url)


def openai(url: str) -> dict[str, str]:
    return {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_BASE": f"{url}/v1", "OPENAI_API_KEY": "none"}


AGENTS: dict[str, Start] = {
    "Claude Code": claude,
    "Codex": codex,
    "opencode": opencode,
    "qwen-code": qwen,
    "Continue": continued,
    "Cline": cline,
    "aider": aider,
    "openai-agents": openai_agents,
    "OpenHands SDK": openhands,
    "Vercel AI SDK": ai_sdk,
    "JDK HttpClient": jdk,
}


def answer(agent: str, installed: Path, folder: Path, task: Treasure, live: Live, *more: str) -> str:
    """Return what an agent prints that gets a task, in the folder of its files. more: words of its command."""
    home = folder / "home"
    home.mkdir()
    for command in ("init -q", "add .", "-c user.name=me -c user.email=me@localhost commit -q -m files"):
        subprocess.run(["git", *command.split()], cwd=task.folder, check=True)
    try:
        words, environment = AGENTS[agent](installed, live.url, task.task, home)
        if shutil.which(words[0]) is None:
            pytest.skip(f"{words[0]} is not installed")
        shared = {"PATH": os.environ["PATH"], "HOME": str(home), "TERM": "dumb"}
        return run([*words, *more], task.folder, {**shared, **environment})
    finally:
        live.stop()
        end_all(home)


def end_all(home: Path) -> None:
    """Kill what an agent has left running in a session of its own, as Cline does; it is known by its HOME."""
    mine = f"HOME={home}\0".encode()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mine in (process / "environ").read_bytes():
                os.kill(int(process.name), signal.SIGKILL)


def run(words: list[str], folder: Path, environment: dict[str, Any]) -> str:
    """Return what a program prints."""
    process = subprocess.Popen(
        words, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, start_new_session=True,
    )  # fmt: skip
    try:
        return process.communicate(timeout=SECONDS)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        return f"{process.communicate()[0]}\nkilled after {SECONDS:g} s"

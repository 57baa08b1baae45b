"""Commands and flags, and a server process: started, queried, and ended by a signal."""

from __future__ import annotations

import dataclasses
import importlib
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from jaxserve.cli import main as cli
from jaxserve.cli.flags import TeachingParser
from jaxserve.config import ServeConfig
from tests.support.flags import parsed
from tests.support.timing import PATIENCE


def test_flags_become_settings():
    assert parsed([]) == ServeConfig()
    words = (
        "Qwen/Qwen3-8B --mesh 4x2 --ttft-slo 8s --tpot-slo 50ms --no-enable-prefix-caching --share-devices "
        "--api-key a b --kv-cache-memory 2GiB --load-format dummy --prefill 1"
    )
    made = parsed(words.split())
    assert (made.model, made.mesh, made.ttft_slo, made.tpot_slo) == ("Qwen/Qwen3-8B", "4x2", 8.0, 0.05)
    assert (made.enable_prefix_caching, made.share_devices, made.api_key) == (False, True, ("a", "b"))
    assert (made.kv_cache_memory, made.load_format, made.prefill) == (2 << 30, "dummy", 1)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("serve --mseh 2x1", "did you mean --mesh?"),
        ("serve --tensor-parallel-size 2", "use --mesh 1xT"),
        ("serve --mem-fraction-static 0.8", "use --gpu-memory-utilization"),
        ("serve --frobnicate", "see --help"),
        ("serve --mesh 2y1", "mesh='2y1' must be RxT"),
        ("serve --ttft-slo soon", "'soon' must be a number of seconds"),
        ("serve --routing best", "unknown routing 'best'; choose one of deflect"),
        ("serve --admission slo", "unknown admission 'slo'; choose one of dp, none, pab"),
        ("serve --config nowhere.yaml", "config='nowhere.yaml' is not a file: give a YAML file with settings by name"),
        ("serve --trust-remote-code", "--trust-remote-code: leave it out, code from a model's repository"),
        ("serve --disable-radix-cache", "use --no-enable-prefix-caching"),
        ("serve a --model b", "model is given twice"),
        ("srve", "did you mean 'serve'"),
    ],
)
def test_errors_name_the_value_and_a_remedy(words, said, capsys):
    try:
        status = cli.main(words.split())
    except SystemExit as end:
        status = end.code
    assert status == 2 and said in capsys.readouterr().err


def test_a_missing_folder_is_reported_before_slow_imports():
    code = (
        "import sys; from jaxserve.cli.main import main\n"
        "assert main(['serve', '--model', '/nope']) == main(['serve', '--tokenizer', './nope']) == 2\n"
        "assert not {'jax', 'transformers', 'fastapi'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    said = ("model folder '/nope' does not exist", "tokenizer folder './nope' does not exist")
    assert done.returncode == 0 and all(one in done.stderr for one in said), done.stderr


def test_a_typo_in_the_config_is_reported(tmp_path, capsys):
    path = tmp_path / "a.yaml"
    path.write_text("model: x\nmax_num_seq: 3\n")
    assert cli.main(["serve", "--config", str(path)]) == 2
    assert f"{path}:2: unknown key 'max_num_seq'; did you mean 'max_num_seqs'?" in capsys.readouterr().err


def test_a_port_in_use_is_reported(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert cli.main(["serve", "--port", str(taken.getsockname()[1])]) == 2
    assert "cannot listen on 127.0.0.1" in capsys.readouterr().err


def test_help(capsys):
    assert cli.main([]) == 0 and "serve" in capsys.readouterr().out
    assert cli.main(["--version"]) == 0 and "jaxserve" in capsys.readouterr().out
    with pytest.raises(SystemExit) as end:
        cli.main(["serve", "--help"])
    text = capsys.readouterr().out
    assert end.value.code == 0 and "examples" in text and "--ttft-slo 8s --tpot-slo 50ms" in text and "curl" in text


def page_of(capsys, *words: str) -> str:
    """Return a page of help."""
    with pytest.raises(SystemExit) as end:
        cli.main([*words])
    assert end.value.code == 0
    return capsys.readouterr().out


def test_help_is_short_and_says_how_to_see_the_rest(capsys):
    short, everything = page_of(capsys, "serve", "-h"), page_of(capsys, "serve", "--help=all")
    assert short.count("\n") <= 40 < 300 < everything.count("\n")
    flags = {"--" + one.name.replace("_", "-") for one in dataclasses.fields(ServeConfig)}
    assert all(f"  {flag} " in everything or f"  {flag}," in everything for flag in flags)
    groups = re.search(r"--help=GROUP those of a group:\n((?:  .*\n)+)", short)[1].replace("\n", " ").split(", ")
    shown = [page_of(capsys, "serve", f"--help={group.strip()}") for group in groups]
    assert all(sum(f"  {flag} " in page or f"  {flag}," in page for page in shown) == 1 for flag in flags)
    with pytest.raises(SystemExit) as end:
        cli.main(["serve", "--help=htp"])
    assert end.value.code == 2 and "help='htp' must be all, model, devices" in capsys.readouterr().err
    assert "--warmup" in page_of(capsys, "compile", "--help=startup") and "--out DIR" in page_of(
        capsys, "compile", "-h"
    )


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_has_a_description_and_examples(command, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main([command, "--help"])
    text = capsys.readouterr().out
    name = "python -m jaxserve.run" if command == "serve" else f"jaxserve {command} "
    assert end.value.code == 0 and name in text.partition("example")[2]
    module = importlib.import_module(cli.COMMANDS[command][0])
    parser = TeachingParser(prog=command)
    module.add_arguments(parser)
    assert parser.description and len(parser.description) > 20


DEVICES = """
import os
from jaxserve.cli.main import main
from jaxserve.engine.startup import assemble

def stop(**given):
    import jax
    print(len(jax.devices()), given["mesh"], flush=True)
    os._exit(0)

assemble.ExecutorConfig = stop  # what programs are compiled for
main(["serve", "--mesh", "2x1", "--port", "0", "--api-server-count", "0"])
"""


def test_a_mesh_needs_no_other_flag_on_a_cpu(monkeypatch):
    monkeypatch.delenv("JAX_NUM_CPU_DEVICES")
    ran = subprocess.run([sys.executable, "-c", DEVICES], capture_output=True, text=True, timeout=PATIENCE)
    assert ran.stdout.splitlines()[-1] == "2 2x1", ran.stderr


@pytest.mark.parametrize("command", ["simulate", "bench", "replay"])
@pytest.mark.parametrize("seed", ["-1", "x", "1.5"])
def test_a_seed_is_a_whole_number(command: str, seed: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([command, *(["journal"] if command == "replay" else []), f"--seed={seed}"])
    assert ended.value.code == 2 and f"{seed!r} must be a whole number, 0 or more" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b'{"a": 1}\n', "line 1 is no record"),
        (b"[]\n", "line 1 is no record"),
        (b"\x83\xff", "is no text"),
    ],
)
def test_a_file_that_is_no_journal_is_named(
    tmp_path: Path, content: bytes, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_bytes(content)
    assert cli.main(["replay", str(tmp_path / "file")]) == 2
    assert why in capsys.readouterr().err


def test_a_config_in_another_encoding_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_bytes("model: x".encode("utf-16"))
    assert cli.main(["serve", "--config", str(tmp_path / "config.yaml")]) == 2
    assert "config.yaml: byte 0 is not UTF-8" in capsys.readouterr().err


STREAMS = """
import os, socket
from jaxserve.cli.main import main
assert main(["replay", "no/such/file"]) == 2
assert socket.socket().fileno() > 2
print("to nowhere, or to the pipe", flush=True)
"""


@pytest.mark.parametrize("closed", ["0", "1", "2", "012"])
def test_standard_streams_that_are_closed_are_opened(closed):
    closing = " ".join(f"{number}>&-" for number in closed)
    ran = subprocess.run(
        ["bash", "-c", f'exec "$0" -c "$1" {closing}', sys.executable, STREAMS], timeout=120, check=False
    )
    assert ran.returncode == 0


UTF16 = "skip: 1".encode("utf-16")


@pytest.mark.parametrize(
    "words",
    [
        ["simulate", "--workload", "FILE.yaml", "--qps", "1"],
        ["fit", "FILE.jsonl"],
        ["distill", "--prompts", "FILE.txt", "--out", "OUT"],
    ],
)
def test_files_in_other_encodings_are_named(words, tmp_path, capsys):
    words = [word.replace("FILE", str(tmp_path / "given")).replace("OUT", str(tmp_path / "out")) for word in words]
    [path] = [word for word in words if "given" in word]
    Path(path).write_bytes(UTF16)
    assert cli.main(words) == 2
    said = capsys.readouterr().err
    assert path in said and "is not UTF-8: save the file in that encoding" in said

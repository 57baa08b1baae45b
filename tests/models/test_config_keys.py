"""Every key of a config.json is implemented, does not matter, or is refused by name.

Each key that transformers writes for a family is set to other values. Where transformers' logits change, ours must
be the same, or the config must be refused with the key in the message.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from jaxserve.models import dense
from jaxserve.models.registry import FAMILIES, spec_from_config
from jaxserve.sched.api.errors import InvalidValue
from tests.support.examples import cases
from tests.support.models.config_keys import FEW, SMALL_ONES, base, trials, verdict
from tests.support.models.driver import SMALL, Driver

BARE = ("Gemma3", "Phi3", "SmolLM3")


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Models are small: more threads wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.timeout(1500)  # compiles a model for each key
@pytest.mark.parametrize(
    ("family", "computed"),
    cases([(family, False) for family in BARE], [(family, True) for family in SMALL_ONES], apart=True),
)
def test_no_key_changes_the_mathematics_in_silence(family: str, computed: bool, tmp_path: Path) -> None:
    """computed: compare the logits of one value of each key, and of every kind of RoPE and of layers."""
    found: dict[tuple[str, str], str] = {}
    tried = set[str]()
    for at, (key, value) in enumerate(trials(family)):
        what, theirs = verdict(family, key, value)
        if computed and what == "compared" and theirs is not None and key not in tried:
            tried |= {key} - {"rope_parameters", "layer_types"}
            folder = tmp_path / str(at)
            theirs.model.save_pretrained(folder)
            (folder / "config.json").write_text(json.dumps({**base(family).config, key: value}))
            off = float(np.abs(Driver.of(folder).feed(FEW) - theirs.logits).max())
            what = what if off <= 2e-4 else f"off by {off}"
            shutil.rmtree(folder)
        found[key, str(value)] = what
    assert {trial: what for trial, what in found.items() if what not in ("refused", "compared", "ignored")} == {}
    assert set(found.values()) == {"refused", "compared", "ignored"}


@pytest.mark.parametrize("family", SMALL_ONES)
def test_every_key_that_transformers_writes_is_known(family: str, caplog: pytest.LogCaptureFixture) -> None:
    config = base(family).config
    caplog.clear()
    spec_from_config(config)
    assert caplog.messages == []
    spec_from_config({**config, "novel_scaling": 2.0, "other": None})
    assert caplog.messages == [
        f"config.json: not read, as {family}ForCausalLM is not known to have them: novel_scaling"
    ]


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("Qwen2", {"dual_chunk_attention_config": {"chunk_size": 262144}}),
        ("Gemma3", {"use_bidirectional_attention": True}),
        ("Qwen2", {"is_causal": False}),
    ],
)
def test_keys_that_change_the_mathematics_are_refused(family: str, changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidValue, match=f"{next(iter(changes))}=.* is not supported; supported is"):
        spec_from_config({**base(family).config, **changes})


@pytest.mark.parametrize("family", [name.removesuffix("ForCausalLM") for name in (*dense.FAMILIES, "Mixtral")])
def test_absent_keys_mean_what_transformers_fills_in(family: str) -> None:
    names = {"architectures": [f"{family}ForCausalLM"]}
    sizes = {name: SMALL[name] for name in SMALL if not name.startswith(("max", "tie"))} | {"pad_token_id": None}
    filled = type(base(family).model.config)(**sizes).to_dict()
    specs = [replace(spec_from_config({**config, **names}), eos=()) for config in (sizes, filled)]
    assert replace(specs[0], dtype=specs[1].dtype) == specs[1]


def test_every_family_is_tried() -> None:
    assert {name for name in FAMILIES if name.endswith("ForCausalLM")} == {f"{name}ForCausalLM" for name in SMALL_ONES}

"""Logits processors of tests, and a package on disk that declares them."""

from __future__ import annotations

from pathlib import Path

SOURCE = '''
"""Logits processors: logits [rows, vocab], argument [rows] -> logits [rows, vocab]."""
import jax
import jax.numpy as jnp


def top_sigma(logits, argument):
    """Keep tokens within `argument` standard deviations of the best one."""
    least = jnp.max(logits, axis=1) - argument * jnp.std(logits, axis=1)
    return jnp.where(logits >= least[:, None], logits, -jnp.inf)


def turned(logits, argument):
    """Make the least likely tokens the most likely ones."""
    return -logits * argument[:, None]


def sure(logits, argument):
    """Leave no token where the best one is less likely than `argument`."""
    best = jnp.max(jax.nn.softmax(logits), axis=1)
    return jnp.where((best >= argument)[:, None], logits, -jnp.inf)


def emptied(logits, argument):
    return jnp.full_like(logits, -jnp.inf)


def centred(logits, argument):
    return logits - jnp.mean(logits)


def halved(logits, argument):
    return logits.astype(jnp.bfloat16)


def cut(logits, argument):
    return logits[:, 1:]


def lone(logits):
    return logits


def branching(logits, argument):
    return logits if argument[0] > 1 else -logits


number = 3
'''
NAMES = ("top_sigma", "turned", "sure", "emptied", "centred", "halved", "cut", "lone", "branching", "number")
MODULE = "jaxserve_test_processors"


def package(folder: Path) -> str:
    """Install a package in a folder that is to be on sys.path; return the folder as it stands there."""
    (folder / f"{MODULE}.py").write_text(SOURCE)
    made = folder / f"{MODULE}-1.0.dist-info"
    made.mkdir()
    (made / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {MODULE}\nVersion: 1.0\n")
    points = [*(f"{name} = {MODULE}:{name}" for name in NAMES), f"gone = {MODULE}:gone", "lost = no_such_module:f"]
    (made / "entry_points.txt").write_text("\n".join(["[jaxserve.logits_processors]", *points, ""]))
    return str(folder)

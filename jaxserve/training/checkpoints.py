"""Orbax checkpoints of a training run."""

from __future__ import annotations

from pathlib import Path

import jax
import orbax.checkpoint as ocp

from jaxserve.training.loop import State


class Checkpoints:
    """The checkpoints in folder `work`: weights and optimizer as arrays, counters and history as JSON."""

    def __init__(self, work: Path) -> None:
        options = ocp.CheckpointManagerOptions(max_to_keep=2, create=True)
        self.manager = ocp.CheckpointManager((work / "checkpoints").absolute(), options=options)

    @property
    def newest(self) -> int | None:
        """The step of the newest checkpoint; None if there is none."""
        step = self.manager.latest_step()
        return None if step is None else int(step)

    def save(self, state: State) -> None:
        """Write the state, and wait until it is on disk."""
        arrays = {"params": state.params, "optimizer": jax.tree.leaves(state.optimizer)}
        counters = {"step": state.step, "seconds": state.seconds, "history": state.history}
        saved = ocp.args.Composite(arrays=ocp.args.StandardSave(arrays), counters=ocp.args.JsonSave(counters))
        self.manager.save(state.step, args=saved, force=True)
        self.manager.wait_until_finished()

    def restore(self, like: State | None = None) -> State:
        """Read the newest state. Raises FileNotFoundError if there is no checkpoint.

        `like` supplies the structure of the optimizer state; without it, that is a list of leaves.
        """
        step = self.manager.latest_step()
        if step is None:
            raise FileNotFoundError(f"no checkpoint in {self.manager.directory}")
        wanted = ocp.args.Composite(arrays=ocp.args.StandardRestore(), counters=ocp.args.JsonRestore())
        read = self.manager.restore(step, args=wanted)
        optimizer = read.arrays["optimizer"]
        if like is not None:
            optimizer = jax.tree.unflatten(jax.tree.structure(like.optimizer), optimizer)
        counters = read.counters
        return State(dict(read.arrays["params"]), optimizer, counters["step"], counters["seconds"], counters["history"])

    def close(self) -> None:
        self.manager.close()

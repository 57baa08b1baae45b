"""The interface between scheduling and computing. The real and the simulated engine implement it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

from .plan import KVBuffer, StepPlan, StepResult, Suspended

Step = asyncio.Future[StepResult | Suspended]


class Executor(Protocol):
    """The devices of one instance, or a model of them."""

    @property
    def pages(self) -> int:
        """Pages in the KV pool."""

    @property
    def page_size(self) -> int:
        """Tokens per page."""

    @property
    def lead(self) -> float:
        """Seconds before the predicted end of a running step to plan the next one; 0: only when idle."""

    def now(self) -> float:
        """Return the seconds on this executor's clock. Monotone, and the only clock that `sched` reads."""

    def submit(self, plan: StepPlan) -> Step:
        """Enqueue a step behind those already submitted, and return at once.

        The future raises StepFailed if the step raised. The steps behind it fail too, and the KV
        pool is unusable until `rebuild`.
        """

    def rebuild(self) -> None:
        """Replace the KV pool by a new, empty one. Transfers that began before it fail.

        Call it in the same event-loop iteration in which the scheduler forgets the contents of the
        old pool. Otherwise pages allocated in the old pool could be written in the new one.
        """

    def preempt(self, step: Step) -> None:
        """Stop a preemptible step at its next segment boundary.

        Its future then yields Suspended, or the StepResult if that boundary was the end of the
        step.
        """

    def committed(self, step: Step) -> asyncio.Future[Any]:
        """Return a future that completes once a preemptible step can no longer be stopped.

        That is at the end of the step, or earlier if another step can be submitted behind it by
        then. Do not cancel the future.
        """

    def unheld(self, slot: int) -> asyncio.Future[Any]:
        """Return a future that completes once the request in a slot need not be held any longer.

        Call it for a request in `StepResult.held` that no submitted step contains. It is cancelled if
        the slot is released.
        """

    def release(self, slots: Sequence[int]) -> None:
        """Free the device rows of requests that finished, were dropped or left."""

    def export_kv(self, pages: Sequence[int]) -> KVBuffer:
        """Gather pages, with the contents that all steps with a returned result have written."""

    async def import_kv(self, kv_buffer: KVBuffer, pages: Sequence[int]) -> None:
        """Copy a KV buffer to this instance, into `pages`. Returns once later steps will see it.

        If cancelled, it writes nothing afterwards, so that the pages can be used for other requests.
        """

    def export_state(self, slot: int) -> Any:
        """Gather what layers with linear attention keep of the request in a slot; None: no layer does.

        It follows from all tokens that steps have computed, so no step with the request may be in flight.
        """

    async def import_state(self, state: Any, slot: int) -> None:
        """Copy what `export_state` returned on another instance to this one, into `slot`. As `import_kv`."""

    async def close(self) -> None:
        """Wait for running work and free all resources."""

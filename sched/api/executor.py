"""The seam between deciding and computing. Real and simulated engines differ only behind this protocol."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

from .plan import KvParcel, StepPlan, StepResult, Suspended

Step = asyncio.Future[StepResult | Suspended]


class Executor(Protocol):
    """One instance's devices, or a model of them."""

    @property
    def pages(self) -> int:
        """Pages in the KV pool."""

    @property
    def page_size(self) -> int:
        """Tokens in a page."""

    @property
    def lead(self) -> float:
        """Seconds before a running step's predicted end at which the next plan is wanted; 0: only when idle."""

    def now(self) -> float:
        """Seconds on this executor's clock; monotone. The only clock `sched` reads."""

    def submit(self, plan: StepPlan) -> Step:
        """Start a step behind those already submitted; returns at once. The future raises StepFailed when the
        step raised; those behind it raise too, and the KV pool is gone until `rebuild`."""

    def rebuild(self) -> None:
        """Make the pool anew, empty. Called in the turn of the event loop in which the scheduler forgets what the old
        one held: pages of the one must never be filled in the other. Transfers that have begun before it fail."""

    def preempt(self, step: Step) -> None:
        """Stop a preemptible step at its next segment boundary; the step then yields Suspended, or its result where
        that was the end."""

    def committed(self, step: Step) -> asyncio.Future[Any]:
        """Done once a preemptible step can no longer be stopped: at its end, or before where more can be submitted
        behind it then. Not to be cancelled."""

    def release(self, slots: Sequence[int]) -> None:
        """The rows are free: the requests finished, were dropped or left."""

    def export_kv(self, pages: Sequence[int]) -> KvParcel:
        """Gather pages as they stand after all steps whose results are back."""

    async def import_kv(self, parcel: KvParcel, pages: Sequence[int]) -> None:
        """Move a parcel here and scatter it into `pages`; returns once later steps will see it."""

    async def close(self) -> None:
        """Let running work end and free what is held."""

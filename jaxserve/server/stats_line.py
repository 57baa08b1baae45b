"""The statistics line of a server's log."""

from __future__ import annotations

from typing import Any


class StatsLine:
    """The statistics line that a server logs every ten seconds unless it is idle."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._last: tuple[float, int, int] | None = None
        self._drafts = (0, 0)
        self._idle = True

    def text(self, now: float) -> str | None:
        """Return the line for the time since the last call, or None if idle. `now` in seconds."""
        stats = self._engine.stats()
        counters = stats.counters
        mine = (now, counters.prompt_tokens, counters.generated_tokens)
        last, self._last = self._last or mine, mine
        idle = mine[1:] == last[1:] and not stats.running and not stats.waiting
        silent, self._idle = idle and self._idle, idle
        if silent:
            return None
        span = max(now - last[0], 1e-9)
        hits = counters.prefix_hits / counters.prefix_queries if counters.prefix_queries else 0.0
        return (
            f"prompt {(mine[1] - last[1]) / span:.1f} tokens/s, generation {(mine[2] - last[2]) / span:.1f} tokens/s, "
            f"running {stats.running}, waiting {stats.waiting}, KV cache {stats.kv_usage:.1%}, prefix hits {hits:.1%}, "
            f"SLO attained {stats.attainment:.1%}{self._drafted(counters)}"
        )

    def _drafted(self, counters: Any) -> str:
        """Return the part about draft tokens since the last call."""
        now, before = (counters.drafted, counters.accepted), self._drafts
        self._drafts = now
        drafted = now[0] - before[0]
        return f", drafted {drafted}, accepted {(now[1] - before[1]) / drafted:.1%}" if drafted else ""

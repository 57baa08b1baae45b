"""The statistics line of a server's log."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxserve.engine.runtime.info import Stats


class _Ended(NamedTuple):
    """Requests with objectives that have ended, and those of them that attained all."""

    ended: int = 0
    attained: int = 0

    def since(self, before: _Ended) -> _Ended:
        return _Ended(self.ended - before.ended, self.attained - before.attained)

    @property
    def share(self) -> str:
        return f"{self.attained / self.ended:.1%}"


class StatsLine:
    """The statistics line that a server logs every ten seconds unless it is idle."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._last: tuple[float, int, int] | None = None
        self._drafts = (0, 0)
        self._idle = True
        self._classes: dict[str, _Ended] = {}
        self._prompts: dict[str, _Ended] = {}

    def text(self, now: float) -> str | None:
        """Return the line for the time since the last call, or None if idle. `now` in seconds."""
        stats: Stats = self._engine.stats()
        counters = stats.counters
        mine = (now, counters.prompt_tokens, counters.generated_tokens)
        last, self._last = self._last or mine, mine
        attained = self._attained(stats)
        idle = mine[1:] == last[1:] and not stats.running and not stats.waiting
        silent, self._idle = idle and self._idle, idle
        if silent:
            return None
        span = max(now - last[0], 1e-9)
        hits = counters.prefix_hits / counters.prefix_queries if counters.prefix_queries else 0.0
        return (
            f"prompt {(mine[1] - last[1]) / span:.1f} tokens/s, generation {(mine[2] - last[2]) / span:.1f} tokens/s, "
            f"running {stats.running}, waiting {stats.waiting}, KV cache {stats.kv_usage:.1%}, prefix hits {hits:.1%}, "
            f"{attained}{self._drafted(counters)}"
        )

    def _attained(self, stats: Stats) -> str:
        """Return the part about objectives since the last call: of all requests, and of each class and size of prompt.

        Those that asked for best effort do not count in the first.
        """
        classes = {name: _Ended(counts.ended["all"], counts.attained["all"]) for name, counts in stats.classes.items()}
        prompts = {name: _Ended(counts.ended, counts.attained) for name, counts in stats.by_prompt.items()}
        by_class, by_prompt = _lately(classes, self._classes), _lately(prompts, self._prompts)
        self._classes, self._prompts = classes, prompts
        if not by_prompt:
            return "none with an SLO ended"
        whole = _Ended(*map(sum, zip(*by_prompt.values(), strict=True)))
        each = "; ".join(_shares(some) for some in (by_class, by_prompt) if len(some) > 1)
        return f"SLO attained {whole.share} of {whole.ended}{f' ({each})' if each else ''}"

    def _drafted(self, counters: Any) -> str:
        """Return the part about draft tokens since the last call."""
        now, before = (counters.drafted, counters.accepted), self._drafts
        self._drafts = now
        drafted = now[0] - before[0]
        return f", drafted {drafted}, accepted {(now[1] - before[1]) / drafted:.1%}" if drafted else ""


def _lately(now: Mapping[str, _Ended], before: Mapping[str, _Ended]) -> dict[str, _Ended]:
    """Return what has ended since, of the classes in which requests have."""
    since = {name: ended.since(before.get(name, _Ended())) for name, ended in now.items()}
    return {name: ended for name, ended in since.items() if ended.ended > 0}


def _shares(classes: Mapping[str, _Ended]) -> str:
    return ", ".join(f"{name} {ended.share}" for name, ended in classes.items())

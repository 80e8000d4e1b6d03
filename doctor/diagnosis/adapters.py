"""LoRA adapters: which of them run and wait, as a server's info metric says."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from doctor.metrics.evaluators import Group
from servers.metrics.identity import Sample


@dataclass(frozen=True)
class Adapters:
    """Of one server, within the window. ``slots``: how many a step may serve; None: it does not say."""

    running: int = 0
    """Most at once."""
    waiting: int = 0
    """Most at once, without those that run."""
    seen: int = 0
    """Different ones."""
    slots: int | None = None

    @property
    def full(self) -> bool:
        """Whether an adapter waits while others have every slot."""
        return self.waiting > 0 and self.slots is not None and self.running >= self.slots


def adapters_of(group: Group, samples: Sequence[Sample], window_s: float) -> Adapters:
    """``samples``: of vLLM's ``lora_requests_info``. It has a series for each state that there ever was, and
    its value is the unix time of the last (``PrometheusStatLogger.record``)."""
    own = [(labels, at) for labels, at in samples if labels.get("instance", "") in ("", group.instance)]
    newest = max((at for _, at in own), default=0.0)
    states = [labels for labels, at in own if at >= newest - window_s]
    running = [_names(labels.get("running_lora_adapters", "")) for labels in states]
    waiting = [_names(labels.get("waiting_lora_adapters", "")) for labels in states]
    slots = [int(text) for labels in states if (text := labels.get("max_lora", "")).isdecimal()]
    return Adapters(
        _most(running),
        _most(wait - run for wait, run in zip(waiting, running, strict=True)),
        len(frozenset().union(*running, *waiting)),
        max(slots, default=None),
    )


def _names(text: str) -> frozenset[str]:
    return frozenset(filter(None, text.split(",")))


def _most(sets: Iterable[frozenset[str]]) -> int:
    return max(map(len, sets), default=0)

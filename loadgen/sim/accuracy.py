"""How far simulated latencies are off, by what was measured."""

from __future__ import annotations

from loadgen.sim.target_name import PREFIX

_OFF = {"h100": 0.13, "a100": 0.24, "a100-40": 0.24, "l40s": 0.48, "mi300x": 1.25}
"""By device: 90 % of TTFT, ITL and E2E of published runs of vLLM were within this factor - 1 of what is
simulated of them (25, 6, 2 and 4 runs that are not saturated: see docs/simulate.md)."""
_UNSEEN = ("h100-pcie", "h200", "b200")
_OFF_ON_NVIDIA = 0.17
"""The same over the 33 runs on H100, A100 and L40S, for their relatives of which there is no run."""


def latency_error(target: str) -> float:
    """The share by which 90 % of a device's latencies are off at most; 0 where nobody has compared any."""
    device = target.removeprefix(PREFIX)
    return _OFF.get(device, _OFF_ON_NVIDIA if device in _UNSEEN else 0.0)

import psutil
import pytest

from tuner.workers.machine import busy_share, busy_warning


@pytest.mark.parametrize(("busy", "said"), [(4.0, ""), (14.9, ""), (41.0, "other programs take 41%")])
def test_a_busy_machine_is_told_of_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, busy: float, said: str
) -> None:
    monkeypatch.setattr(psutil, "cpu_percent", lambda interval: busy)
    assert busy_warning(busy_share()).startswith(said)
    assert bool(busy_warning(busy_share())) == bool(said)

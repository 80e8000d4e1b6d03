"""Alarms ring once, at or after their deadline, also where there is no timerfd."""

import asyncio
from time import monotonic_ns

import pytest

from loadgen.wire.driver import event_loop
from loadgen.wire.timerfd import Alarm


async def ring(delays_ms: list[float], *, timerfd: bool) -> list[tuple[int, int]]:
    """(deadline, rung at), one after the other."""
    rung: list[tuple[int, int]] = []
    done = asyncio.get_running_loop().create_future()
    deadlines = iter([monotonic_ns() + round(delay * 1e6) for delay in delays_ms])
    current = 0

    def on_ring() -> None:
        rung.append((current, monotonic_ns()))
        set_next()

    def set_next() -> None:
        nonlocal current
        current = next(deadlines, 0)
        if current:
            alarm.set(current)
        else:
            done.set_result(None)

    alarm = Alarm(asyncio.get_running_loop(), on_ring)
    if not timerfd:
        alarm.close()
    set_next()
    await done
    alarm.close()
    return rung


@pytest.mark.parametrize("timerfd", [True, False])
def test_never_early_and_once_each(timerfd: bool) -> None:
    delays = [-5.0, 0.0, 0.3, 1.0, 1.6, 2.5, 10.0, 10.0, 33.3]
    with asyncio.Runner(loop_factory=event_loop) as runner:
        rung = runner.run(ring(delays, timerfd=timerfd))
    assert len(rung) == len(delays)
    assert all(at >= deadline for deadline, at in rung)


def test_setting_again_replaces_and_closing_silences() -> None:
    async def main() -> list[int]:
        rung: list[int] = []
        now = monotonic_ns()
        alarm = Alarm(asyncio.get_running_loop(), lambda: rung.append(monotonic_ns() - now))
        alarm.set(now + 1_000_000)
        alarm.set(now + 20_000_000)
        while not rung:
            await asyncio.sleep(0.005)
        alarm.set(monotonic_ns() + 5_000_000)
        alarm.close()
        await asyncio.sleep(0.02)
        return rung

    with asyncio.Runner(loop_factory=event_loop) as runner:
        (at,) = runner.run(main())
    assert at >= 20_000_000

"""Which stretch of time to look at: ``--since`` and ``--until``, as people write moments."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone

from servers.errors import UserError

_SIZES = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "": 1.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d|)")
_LONGEST_S = 30 * 86400.0


class PeriodError(UserError):
    """Text that is no duration or no moment, or a period that ends before it begins."""


def window_seconds(text: str, option: str = "--window") -> float:
    """Read a duration such as 90s, 5m or 1h. Raises PeriodError."""
    match = _DURATION.fullmatch(text.strip())
    value = float(match[1]) * _SIZES[match[2]] if match else 0.0
    if not 0 < value <= _LONGEST_S:
        raise PeriodError(f"{option} {text}: write a duration such as 90s, 5m or 1h (30 days at most)")
    return value


@dataclass(frozen=True)
class PointInTime:
    """A point in time: absolute, a time of day, or seconds before the data end."""

    unix_s: float | None = None
    clock: datetime | None = None
    """Only its time and zone count."""
    before_end: float | None = None

    def resolve(self, end: float) -> float:
        """Unix seconds, where the data end at ``end``; a time of day is the last such time until then."""
        if self.unix_s is not None:
            return self.unix_s
        if self.before_end is not None:
            return end - self.before_end
        assert self.clock is not None
        day = datetime.fromtimestamp(end, tz=self.clock.tzinfo)
        at = datetime.combine(day.date(), self.clock.timetz())
        if at.timestamp() > end:
            at -= timedelta(days=1)
        return at.timestamp()


def moment(text: str, option: str) -> PointInTime:
    """Read ``14:05``, ``2026-11-29T14:05:30Z``, ``-10m`` or unix seconds. Raises PeriodError.

    A time without a zone is local.
    """
    written = text.strip()
    if written.startswith("-"):
        return PointInTime(before_end=window_seconds(written[1:], option))
    if re.fullmatch(r"\d{9,11}(\.\d+)?", written):
        return PointInTime(unix_s=float(written))
    try:
        if re.match(r"\d{1,2}:", written):
            clock = datetime.fromisoformat(f"2000-01-01T{written.zfill(len(written) + (written[1] == ':'))}")
            return PointInTime(clock=clock if clock.tzinfo else clock.replace(tzinfo=_local_zone()))
        return PointInTime(unix_s=datetime.fromisoformat(written).timestamp())
    except (ValueError, OverflowError):
        raise PeriodError(
            f"{option} {text}: write 14:05, 2026-11-29T14:05, -10m (before the data end) or unix seconds"
        ) from None


def _local_zone() -> timezone:
    offset = datetime.now().astimezone().utcoffset()
    return timezone(offset or timedelta())


@dataclass(frozen=True)
class Period:
    """From ``since`` (None: as far back as the source looks) until ``until`` (None: the data's end)."""

    since: PointInTime | None = None
    until: PointInTime | None = None

    def bounds(self, end: float) -> tuple[float | None, float]:
        """(start or None, end) in unix seconds, for data that end at ``end``. Raises PeriodError."""
        last = end if self.until is None else self.until.resolve(end)
        first = None if self.since is None else self.since.resolve(last if self.until else end)
        if first is not None and not 0 < last - first <= _LONGEST_S:
            raise PeriodError("--since must lie before --until (or the data's end), by 30 days at most")
        return first, last


def period(since: str | None, until: str | None) -> Period | None:
    """What ``--since`` and ``--until`` say; None where neither is given. Raises PeriodError."""
    if since is None and until is None:
        return None
    return Period(
        None if since is None else moment(since, "--since"),
        None if until is None else moment(until, "--until"),
    )

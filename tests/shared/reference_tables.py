"""Tables in docs/contributing that are made of the code. As a program it writes them into their pages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from doctor.diagnosis.judged_objectives import MISSED
from doctor.diagnosis.judged_objectives import OBJECTIVE_NAMES as SLO_NAMES
from doctor.diagnosis.playbook import ASSUMPTIONS, TOLD
from doctor.metrics.signals import SIGNALS
from servers.known_flags import FLAG_NAMES
from servers.metrics.catalog import METRICS

FOLDER = Path(__file__).parents[2] / "docs" / "contributing"


def signals() -> str:
    rows = "".join(f"| `{signal.name}` | {signal.unit} | {signal.help} |\n" for signal in SIGNALS.values())
    return f"| signal | unit | what it is |\n|---|---|---|\n{rows}"


def other_names() -> str:
    rows = {
        "flags of the server": FLAG_NAMES,
        "limits, from `--slo` or their defaults": SLO_NAMES,
        "whether one of them is missed (1 or 0)": MISSED,
        "what the user states with `--assume`": ASSUMPTIONS,
        "what a log, a baseline, a benchmark or labels say": TOLD,
    }
    listed = "".join(
        f"| {kind} | {', '.join(f'`{name}`' for name in sorted(names))} |\n" for kind, names in rows.items()
    )
    return f"| kind | names |\n|---|---|\n{listed}"


def metrics() -> str:
    rows = "".join(f"| `{metric.key}` | {metric.kind} |\n" for metric in METRICS.values())
    return f"| key | kind |\n|---|---|\n{rows}"


@dataclass(frozen=True)
class Table:
    """``name``: of the comment that stands before and after it in the page."""

    name: str
    page: str
    text: Callable[[], str]

    def split(self) -> tuple[str, str, str]:
        """The page before the table, the table as it stands there, and the page after it."""
        mark = f"<!-- {self.name} -->\n"
        before, table, after = (FOLDER / self.page).read_text().split(mark)
        return before + mark, table, mark + after


TABLES = (
    Table("signals", "playbook.md", signals),
    Table("other names", "playbook.md", other_names),
    Table("metrics", "metric.md", metrics),
)


if __name__ == "__main__":
    for table in TABLES:
        before, _, after = table.split()
        (FOLDER / table.page).write_text(before + table.text() + after)

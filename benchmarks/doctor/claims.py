"""Figures that articles about tuning vLLM give, each tried: claimed beside found.

    python -m benchmarks.doctor.claims [--only WORD] [--markdown]

Every set-up is as near to the article's as it gives away. What is not said (rates, lengths, the card) is
chosen and stated. All of it is simulated: the real scheduler and block pool on a virtual clock, with step
times by the data sheets of the devices, so that directions and proportions count, and not milliseconds.

reproduced      every figure is there, between half and twice the claimed change
direction only  every figure changes as claimed, by another amount
partly          some figures change as claimed, others do not
refuted         none does
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from benchmarks.doctor.claims_catalog import CLAIMS
from benchmarks.doctor.claims_figures import Claim, Figure

Verdict = Literal["reproduced", "direction only", "partly", "refuted"]


def verdict(figures: Sequence[Figure]) -> Verdict:
    """See the module."""
    if all(figure.agrees for figure in figures):
        return "reproduced"
    moved = [figure.agrees or figure.same_direction for figure in figures]
    if all(moved):
        return "direction only"
    return "partly" if any(moved) else "refuted"


@dataclass(frozen=True)
class Row:
    claim: Claim
    figures: tuple[Figure, ...]

    @property
    def verdict(self) -> Verdict:
        return verdict(self.figures)


def tried(claims: Sequence[Claim]) -> Iterator[Row]:
    for claim in claims:
        yield Row(claim, tuple(claim.experiment()))


def text(row: Row) -> str:
    lines = [f"{row.verdict.upper()}: {row.claim.says}", f"  tried on {row.claim.setup}"]
    width = max(len(figure.name) for figure in row.figures)
    lines += [f"  {f.name:<{width}}  claimed {f.claimed_text:<14} found {f.found_text}" for f in row.figures]
    return "\n".join([*lines, f"  {row.claim.because}", ""])


def markdown(rows: Sequence[Row]) -> Iterator[str]:
    yield "| claim | tried on | claimed | found | |"
    yield "|---|---|---|---|---|"
    for row in rows:
        claimed = "; ".join(f"{f.name} {f.claimed_text}" for f in row.figures)
        found = "; ".join(f.found_text for f in row.figures)
        yield (
            f"| {row.claim.says} | {row.claim.setup} | {claimed} | {found} | "
            f"**{row.verdict}**. {row.claim.because} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="claims whose text holds this word")
    parser.add_argument("--markdown", action="store_true", help="the table of docs/claims.md")
    options = parser.parse_args()
    chosen = [claim for claim in CLAIMS if options.only.lower() in claim.says.lower()]
    if not chosen:
        parser.error(f"no claim holds {options.only!r}")
    if options.markdown:
        print("\n".join(markdown(list(tried(chosen)))))
        return
    for row in tried(chosen):
        print(text(row), flush=True)


if __name__ == "__main__":
    main()

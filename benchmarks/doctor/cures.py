"""From the proofs of ``vtune playbook run --all --out DIR`` to what the doctor and the docs say of cures.

    python -m benchmarks.doctor.cures DIR…     write verified.json and the table of the docs
    python -m benchmarks.doctor.cures          write the table anew from verified.json

Nothing is measured here. ``verified.json`` is where the doctor takes each verification status from.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from doctor.diagnosis.playbook import Playbook, Remedy, load_all
from doctor.diagnosis.verification_status import FILE, NOT_VERIFIED, SCHEMA, fingerprint
from doctor.proof.result import SCHEMA as PROOF
from doctor.proof.result import label
from servers.files import write_atomically

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "cures.md"
VERIFIED = ROOT / "playbooks" / FILE
KEPT = (
    *(
        "playbook",
        "experiment",
        "folklore",
        "remedy",
        "remedy_print",
        "prescribed",
        "instead",
        "where",
        "model",
    ),
    *("simulated", "pairs", "seconds", "engine", "verdict", "standing", "headline"),
)
_MARKS = ("<!-- table: written by benchmarks/doctor/cures.py -->", "<!-- end of the table -->")
Proofs = Sequence[Mapping[str, Any]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "proofs",
        type=Path,
        nargs="*",
        help="folders of vtune playbook run --out; of an experiment in several of them the first one counts",
    )
    folders = parser.parse_args().proofs
    books = load_all()
    if folders:
        text = json.dumps({"schema": SCHEMA, "proofs": list(gathered(folders, books))}, indent=1)
        write_atomically(VERIFIED, [text, "\n"])
    proofs = json.loads(VERIFIED.read_text(encoding="utf-8"))["proofs"]
    page = PAGE.read_text(encoding="utf-8")
    write_atomically(PAGE, [with_table(page, "\n".join(tables(books, proofs)))])
    print("\n".join(summary(books, proofs)))


def gathered(folders: Sequence[Path], books: Sequence[Playbook]) -> Iterator[dict[str, Any]]:
    """What is kept of each proof, in the order of the pages, but for cures that were reworded since."""
    for book in books:
        for number in range(len(book.reproduction.experiments)):
            proof = _first(folders, book, number)
            if proof is None:
                continue
            kept = {name: proof[name] for name in KEPT}
            kept["claimed"] = "; ".join(
                f"{label(row['figure'])} {row['expected']}" for row in proof["rows"] if row["expected"]
            )
            yield kept


def _first(folders: Sequence[Path], book: Playbook, number: int) -> Mapping[str, Any] | None:
    """Of several proofs that of the first folder; one that shows something before one that does not."""
    found = []
    for folder in folders:
        file = folder / f"{book.id}-{number + 1}.json"
        if file.is_file():
            proof = json.loads(file.read_text(encoding="utf-8"))
            if proof.get("schema") == PROOF and is_current(proof, book):
                found.append(proof)
    shown = [proof for proof in found if proof["verdict"] in ("verified", "refuted")]
    return next(iter([*shown, *found]), None)


def is_current(proof: Mapping[str, Any], book: Playbook) -> bool:
    """Whether the cure still reads as it did when it was tried."""
    remedy = proof["remedy"]
    return remedy is None or proof["remedy_print"] == fingerprint(book, remedy)


def tables(books: Sequence[Playbook], proofs: Proofs) -> Iterator[str]:
    """Markdown: every experiment with what was claimed and found; then what has no proof, and why."""
    yield "| symptom | tried | on | claimed | found | status |"
    yield "|---|---|---|---|---|---|"
    for proof in proofs:
        _, _, found = str(proof["headline"]).partition(": ")
        tried = str(proof["prescribed"]) if not proof["folklore"] else f"folklore: {proof['prescribed']}"
        if proof["instead"]:
            tried += f" ({proof['instead']})"
        where = proof["where"] if not proof["simulated"] else f"{proof['where']}, {proof['model']}"
        verdict = str(proof["headline"]).partition(":")[0]
        cells = (
            f"[{proof['playbook']}](../playbooks/{proof['playbook']}.md)",
            tried,
            f"{where}; {proof['pairs']} pairs of {proof['seconds']:g} s",
            proof["claimed"],
            found,
            verdict,
        )
        yield "| " + " | ".join(_cell(str(cell)) for cell in cells) + " |"
    yield ""
    yield "Without an experiment:"
    yield ""
    for book in books:
        if not book.reproduction.experiments:
            yield f"- `{book.id}`: {book.reproduction.why_none}"
    unproven = list(_unproven(books, proofs))
    if unproven:
        yield ""
        yield "Prescriptions of pages that have experiments, and which none of them has proven:"
        yield ""
        yield from unproven


def _unproven(books: Sequence[Playbook], proofs: Proofs) -> Iterator[str]:
    for book in books:
        if not book.reproduction.experiments:
            continue
        for number, remedy in enumerate(book.remedies):
            standings = {
                proof["standing"]
                for proof in proofs
                if proof["playbook"] == book.id and proof["remedy"] == number
            }
            if not standings - {NOT_VERIFIED}:
                yield f"- `{book.id}`: {_named(remedy)}"


def _named(remedy: Remedy) -> str:
    flags = [*remedy.settings, *(f"drop {name}" for name in remedy.unset)]
    return f"`{', '.join(flags)}`" if flags else str(remedy.do)


def with_table(page: str, table: str) -> str:
    """The page with what stands between its marks replaced."""
    first, last = map(re.escape, _MARKS)
    return re.sub(f"{first}.*{last}", lambda _: f"{_MARKS[0]}\n{table}\n{_MARKS[1]}", page, flags=re.DOTALL)


def summary(books: Sequence[Playbook], proofs: Proofs) -> Iterator[str]:
    """How many prescriptions stand how."""
    prescriptions = [(book, number) for book in books for number in range(len(book.remedies))]
    by_standing: dict[str, int] = {}
    for book, number in prescriptions:
        words = {p["standing"] for p in proofs if (p["playbook"], p["remedy"]) == (book.id, number)}
        best = min(words, key=_rank, default=NOT_VERIFIED)
        by_standing[best] = by_standing.get(best, 0) + 1
    yield f"{len(prescriptions)} prescriptions of {len(books)} playbooks:"
    yield from (
        f"  {count:3} {word}" for word, count in sorted(by_standing.items(), key=lambda kv: _rank(kv[0]))
    )


def _rank(word: str) -> int:
    return ("verified", "verified in simulation", "refuted", NOT_VERIFIED).index(word)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    main()

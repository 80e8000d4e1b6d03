"""What the doctor and the docs say of cures is what was measured, and of the cures as they read now."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.doctor.cures import PAGE, VERIFIED, is_current, tables, with_table
from doctor.diagnosis.playbook import load_all
from doctor.diagnosis.verification_status import NOT_VERIFIED, SCHEMA, verification_of

BOOKS = load_all()
BY_ID = {book.id: book for book in BOOKS}
DATA = json.loads(VERIFIED.read_text(encoding="utf-8"))


def test_the_docs_show_the_committed_results() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == with_table(page, "\n".join(tables(BOOKS, DATA["proofs"])))


def test_the_file_has_the_schema_that_the_doctor_reads() -> None:
    assert DATA["schema"] == SCHEMA


@pytest.mark.parametrize("proof", DATA["proofs"], ids=lambda p: f"{p['playbook']}-{p['experiment'] + 1}")
def test_a_proof_is_of_a_cure_as_it_reads_now(proof: dict[str, Any]) -> None:
    book = BY_ID[proof["playbook"]]
    assert is_current(proof, book), "run make playbooks again: the cure was reworded"
    assert proof["experiment"] < len(book.reproduction.experiments)
    assert proof["simulated"] or not book.reproduction.experiments[proof["experiment"]].simulated


def test_no_prescription_stands_refuted() -> None:
    """A cure that its experiment refutes has to be changed, or its page has to say so."""
    refuted = [
        f"{book.id} {number}"
        for book in BOOKS
        for number in range(len(book.remedies))
        if verification_of(book, number) == "refuted"
    ]
    assert refuted == []


def test_most_prescriptions_that_name_flags_were_tried_or_say_why_not() -> None:
    typed = [
        (book, n) for book in BOOKS for n, cure in enumerate(book.remedies) if cure.settings or cure.unset
    ]
    known = [
        (book, n)
        for book, n in typed
        if not book.reproduction.experiments or verification_of(book, n) != NOT_VERIFIED
    ]
    assert len(known) >= 0.85 * len(typed), {(b.id, n) for b, n in typed} - {(b.id, n) for b, n in known}

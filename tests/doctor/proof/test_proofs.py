"""Cures are proven in virtual time: what is found and prescribed, what the pairs say, and what is kept."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from synthetic_server import Server
from typer.testing import CliRunner, Result

from doctor.diagnosis import verification_status
from doctor.diagnosis.diagnose import diagnose
from doctor.diagnosis.playbook import Playbook, load_all, parse_playbook
from doctor.metrics.sources import Scrapes
from doctor.output.markdown import as_markdown
from doctor.output.report import as_text
from doctor.proof.experiment_runner import Order, carry_out, read_proof
from doctor.proof.experiment_target import stage_of
from doctor.proof.result import Proof
from doctor.proof.verify import Interrupted, Terms, prove
from vtune_cli import app

BOOKS = {book.id: book for book in load_all()}
QUICK = Terms(pairs=2, seconds=4.0)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments, catch_exceptions=False)


def page(book: str, reproduce: str, expect: str | None = None) -> Playbook:
    """A page of the package with another experiment."""
    from importlib import resources

    text = resources.files("playbooks").joinpath(f"{book}.md").read_text(encoding="utf-8")
    head, _, tail = text.partition("reproduce:")
    prose = tail[tail.index("\n---\n") :]
    if expect is not None:
        head = "".join(
            f"expect: {expect}\n" if line.startswith("expect:") else line for line in head.splitlines(True)
        )
    return parse_playbook(f"{head}reproduce: {reproduce}{prose}", f"{book}.md")


CAPPED = """
  target: simulated:h100
  model: 8b
  engine: {max_num_seqs: 2}
  load: [{name: chat, clients: 8, prompt: 128, output: 48}]
"""


def proven(book: Playbook, terms: Terms = QUICK) -> Proof:
    experiment = book.reproduction.experiments[0]
    return prove(book, 0, stage_of(experiment, None, None, None), terms)


@pytest.fixture(scope="module")
def capped() -> Proof:
    return proven(page("seq-cap", CAPPED))


def test_the_doctors_own_prescription_is_what_is_tried(capped: Proof) -> None:
    assert (capped.verdict, capped.verification) == ("verified", "verified in simulation")
    assert (capped.symptom.rank, capped.symptom.found[0]) == (1, "seq-cap")
    assert capped.prescribed == "--max-num-seqs 8"
    assert capped.before == "vllm serve 'an 8B Llama' --max-num-seqs 2"
    assert capped.after == "vllm serve 'an 8B Llama' --max-num-seqs 8"
    rows = {row.figure: row for row in capped.rows}
    assert (rows["waiting_mean"].outcome, rows["ttft_p95"].outcome) == ("met", "met")
    assert rows["ttft_p95"].change.high < 0.2
    assert rows["throughput"].expected is None


def test_a_simulation_is_never_called_a_measurement(capped: Proof) -> None:
    text = capped.text()
    assert text.splitlines()[-1].startswith("verified in simulation: waiting mean -100 %")
    assert "ESTIMATE, nothing was measured: 8b on roofline of H100 SXM (estimate)" in text


def test_a_proof_survives_being_saved(capped: Proof) -> None:
    assert read_proof(json.loads(json.dumps(capped.to_json()))).to_json() == capped.to_json()


def test_what_is_promised_and_does_not_come_refutes_the_page() -> None:
    refuted = proven(page("seq-cap", CAPPED, '{itl_p50: "-50%"}'))
    assert (refuted.verdict, refuted.verification) == ("refuted", "refuted")


def test_a_symptom_that_does_not_show_proves_nothing() -> None:
    healthy = proven(page("seq-cap", CAPPED.replace("max_num_seqs: 2", "max_num_seqs: 64")))
    assert (healthy.verdict, healthy.verification, healthy.pairs) == ("not reproduced", "not verified", 0)
    assert healthy.headline == "not reproduced: the doctor found nothing"


def test_folklore_is_refuted_by_following_it() -> None:
    proof = proven(
        page(
            "myth-swapping", CAPPED + "  instead: {engine: {swap_space: 64}}\n  folklore: {ttft_p95: falls}\n"
        )
    )
    assert (proof.verdict, proof.verification, proof.folklore) == ("refuted", "verified in simulation", True)
    assert proof.headline.startswith("refuted (the folklore) in simulation: TTFT P95 +0 %")


def test_advice_is_tried_as_the_page_says_it_stands() -> None:
    book = BOOKS["replica-imbalance"]
    proof = proven(book, Terms(pairs=2, seconds=10.0))
    assert proof.verdict == "verified"
    assert proof.prescribed.startswith("check the router")
    assert proof.instead == "least-loaded routing instead of length-pooled"


def test_ctrl_c_ends_it_at_once() -> None:
    stop = threading.Event()
    stop.set()
    book = page("seq-cap", CAPPED)
    with pytest.raises(Interrupted):
        prove(book, 0, stage_of(book.reproduction.experiments[0], None, None, None), QUICK, stop=stop)


# Many of them.


def order(out: Path, **options: Any) -> Order:
    plain = Order(None, None, QUICK, None, None, None, out)
    return replace(plain, **options)


def carried_out(book: Playbook, given: Order) -> tuple[list[Proof], list[str]]:
    told: list[str] = []
    proofs = list(carry_out([book], given, told.append, threading.Event()))
    assert all(isinstance(proof, Proof) for proof in proofs), proofs
    return [proof for proof in proofs if isinstance(proof, Proof)], told


def test_what_is_done_is_not_run_again_but_judged_again(tmp_path: Path) -> None:
    first, told = carried_out(page("seq-cap", CAPPED), order(tmp_path))
    assert "seq-cap, experiment 1" in told
    again, told = carried_out(page("seq-cap", CAPPED), order(tmp_path))
    assert (again, told) == (first, [])
    (other,), told = carried_out(page("seq-cap", CAPPED, '{ttft_p95: "falls"}'), order(tmp_path))
    assert (other.verdict, [r.expected for r in other.rows[:1]], told) == ("verified", ["falls"], [])
    assert read_proof_file(tmp_path / "seq-cap-1.json")["rows"][0]["figure"] == "ttft_p95"


def read_proof_file(path: Path) -> Any:
    return json.loads(path.read_text())


def test_other_terms_are_measured_anew(tmp_path: Path) -> None:
    carried_out(page("seq-cap", CAPPED), order(tmp_path))
    _, told = carried_out(page("seq-cap", CAPPED), order(tmp_path, terms=replace(QUICK, seed=7)))
    assert told


def test_no_experiment_is_begun_after_the_time(tmp_path: Path) -> None:
    proofs, told = carried_out(page("seq-cap", CAPPED), order(tmp_path, limit=0.0))
    assert (proofs, told) == ([], ["seq-cap: out of time, run again to go on"])


def test_only_the_wanted_kind_is_run(tmp_path: Path) -> None:
    assert carried_out(page("seq-cap", CAPPED), order(tmp_path, simulated=False)) == ([], [])


# What the doctor says of its prescriptions.


@pytest.fixture
def proofs(monkeypatch: pytest.MonkeyPatch) -> list[Mapping[str, Any]]:
    known: list[Mapping[str, Any]] = []
    monkeypatch.setattr(verification_status, "proofs", lambda: tuple(known))
    return known


def test_every_prescription_says_whether_it_was_verified(proofs: list[Mapping[str, Any]]) -> None:
    sick = Scrapes(
        Server(
            running=4, waiting=12, kv=0.1, histograms={"queue_time": {8.0: 10}, "ttft": {8.1: 10}}
        ).scrapes()
    )
    before = diagnose(sick, {"max_num_seqs": 4})
    assert "[not verified]" in as_text(before)
    book = BOOKS["seq-cap"]
    proofs.append(
        {
            "playbook": "seq-cap",
            "remedy_print": verification_status.fingerprint(book, 0),
            "standing": "verified",
        }
    )
    after = diagnose(sick, {"max_num_seqs": 4})
    (prescription,) = after.to_json()["findings"][0]["prescriptions"]
    assert (prescription["standing"], prescription["verified"]) == ("verified", True)
    assert "--max-num-seqs 16   (max_num_seqs was 4)   [verified in our lab]" in as_text(after)
    assert "[verified in our lab]" in as_markdown(after)


def test_a_cure_that_was_reworded_is_not_verified(proofs: list[Mapping[str, Any]]) -> None:
    proofs.append({"playbook": "seq-cap", "remedy_print": "another", "standing": "verified"})
    assert verification_status.verification_of(BOOKS["seq-cap"], 0) == "not verified"


# The command.


def test_the_command_prints_the_proof_and_its_exit_code(tmp_path: Path) -> None:
    done = run("playbook", "run", "seq-cap", "--target", "simulated:h100", "--model", "8b", "--pairs", "2",
               "--seconds", "4", "--out", str(tmp_path))  # fmt: skip
    assert done.exit_code == 0
    assert "verified in simulation: waiting mean -100 %" in done.stdout
    as_json = run("playbook", "run", "seq-cap", "--target", "simulated:h100", "--model", "8b", "--pairs", "2",
                  "--seconds", "4", "--out", str(tmp_path), "--format", "json")  # fmt: skip
    (proof,) = json.loads(as_json.stdout)
    assert (proof["schema"], proof["standing"]) == ("vtune.proof/1", "verified in simulation")


def test_a_page_without_an_experiment_says_why() -> None:
    done = run("playbook", "run", "ttft-slo-queue")
    assert (done.exit_code, done.stdout) == (
        0,
        f"ttft-slo-queue: no experiment, because {BOOKS['ttft-slo-queue'].reproduction.why_none}\n",
    )


def test_a_server_that_does_not_start_is_reported_and_the_next_one_has_its_turn() -> None:
    done = run("playbook", "run", "oversized-max-model-len", "seq-cap", "--target", "simulated:h100",
               "--model", "135m", "--pairs", "2", "--seconds", "4")  # fmt: skip
    assert done.exit_code == 2
    assert "bad_flag: --max-model-len 32768" in done.stderr
    assert "seq-cap, experiment 1 on simulated:h100" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((), "name playbooks, or give --all"),
        (("seq-cap", "--all"), "name playbooks, or give --all"),
        (("seq-cup",), "no playbook 'seq-cup'; did you mean 'seq-cap'?"),
        (("seq-cap", "--target", "vllm"), "--target vllm: write bundled, or simulated:h100"),
        (("seq-cap", "--target", "simulated:x100", "--model", "8b"), "simulated:x100: unknown"),
        (("seq-cap", "--format", "xml"), "--format xml: write text or json"),
        (("seq-cap", "--limit", "soon"), "--limit"),
        (("seq-cap", "--experiment", "9"), "--experiment 9: seq-cap has 1"),
    ],
)  # fmt: skip
def test_wrong_use_is_explained(arguments: tuple[str, ...], complaint: str) -> None:
    done = run("playbook", "run", *arguments)
    assert (done.exit_code, complaint in done.stderr) == (2, True), done.stderr

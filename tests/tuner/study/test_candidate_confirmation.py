"""Which candidates are confirmed, in which order and on how many pairs, against the formula."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from analytic_study import BOUNDS, DEFAULTS, SLO
from analytic_target import AnalyticTarget, measure
from notebook import Notebook

from loadgen.plan.workload import preset
from loadgen.target import RunFailed
from servers.slo.objective import parse_slo
from tuner.job.job import Job
from tuner.runs.interrupts import Interrupts
from tuner.runs.load import GeneratedLoad
from tuner.runs.result import BASELINE, SERVES, Measurement, Reading, TrialResult
from tuner.space.space import build_space
from tuner.study.budget import Clock, Plan
from tuner.study.candidate_confirmation import CandidateConfirmation
from tuner.study.trial import Bench, SetupFailed

LOAD = GeneratedLoad(preset("mixed", max_model_len=8192), seed=0, seconds=60.0, rate=1.0)
PAIR, OPENING = 2 * (10.0 + 2.0), 2 * 5.0
"""Seconds of a pair of runs of 10 s, and before the first."""


def trial(number: int, tokens: int, **figures: Any) -> TrialResult:
    config = {**DEFAULTS, "max_num_batched_tokens": tokens}
    made = measure(config)
    known = {
        name: Reading(*(value if isinstance(value, tuple) else (value,))) for name, value in figures.items()
    }
    measurement = Measurement({**made.readings, **known}, 20.0)
    violations = {SERVES: 0.0, **measurement.violations(BOUNDS)}
    origin = "test" if number else BASELINE
    return TrialResult(number, config, origin, "measured", measurement=measurement, violations=violations)


OWN, GOOD, SAME = trial(0, 2048), trial(1, 512), trial(2, 2040)


class Told:
    """A search that is over: what it would confirm, in which order, and propose. ``after``: the order that
    fresh runs leave."""

    def __init__(self, results: Any, candidates: Any = (), after: Any = None, proposal: Any = None) -> None:
        self.space = build_space(DEFAULTS, 8192)
        self.results, self.baseline = results, results[0]
        self._candidates, self._proposal = list(candidates), proposal
        self._after = self._candidates if after is None else list(after)
        self.told: list[Any] = []
        self.fresh: Any = ()

    def candidates(self, fresh: Any = ()) -> Any:
        self.fresh = fresh
        return self._after if fresh else self._candidates

    def propose(self) -> Any:
        return self._proposal

    def tell(self, proposal: Any, result: Any) -> None:
        self.told.append((proposal, result))


@pytest.fixture
def confirm(tmp_path: Path) -> Any:
    def build(study: Any, left: float = 0.0, target: Any = None, slo: Any = SLO, **job: Any) -> Any:
        """The outcome and what was noted. ``left``: seconds of the budget."""
        notebook = Notebook()
        given = {"budget": 1000.0, **job}
        plan = Plan(5.0, 15.0, 10.0, 4, given["budget"], None, 0.0)
        clock = Clock(1000.0 - left, lambda: 0.0)
        bench = Bench(target or AnalyticTarget(), notebook, Interrupts(), tmp_path)
        made = CandidateConfirmation(
            Job(**given), slo, bench, study, plan, clock, lambda: LOAD, lambda config: config, "ended"
        )
        return made.outcome(), notebook

    return build


def fresh(notebook: Any) -> list[tuple[int, int]]:
    """(trial, pairs) of each confirmation that was begun."""
    notes = [note.split() for note in notebook.notes if "fresh seeds" in note]
    return [(int(words[1]), int(words[6])) for words in notes]


def test_the_first_candidate_gets_all_the_time_unless_half_of_it_is_enough(confirm: Any) -> None:
    for left, pairs in [
        (OPENING + 6 * PAIR, 6),
        (OPENING + 7 * PAIR - 1, 6),
        (2 * (OPENING + 8 * PAIR), 8),
        (2 * (OPENING + 8 * PAIR) - 1, 16),
        (OPENING + 3 * PAIR, 4),
        (0.0, 4),
    ]:
        outcome, notebook = confirm(Told([OWN, GOOD], [GOOD]), left)
        assert (outcome.kind, fresh(notebook)) == ("better", [(1, pairs)])
        assert notebook.phases == ["confirmation"]


def test_pairs_that_are_asked_for_are_those_that_are_run(confirm: Any) -> None:
    assert fresh(confirm(Told([OWN, GOOD], [GOOD]), OPENING + 9 * PAIR, pairs=5)[1]) == [(1, 5)]
    assert fresh(confirm(Told([OWN, GOOD], [GOOD]), budget=None)[1]) == [(1, 4)]


def test_the_next_candidates_follow_one_that_is_refuted_while_there_is_time(confirm: Any) -> None:
    slower = [replace(SAME, number=n) for n in (1, 2, 3, 4, 5)]
    study = Told([OWN, *slower], slower)
    for result in slower:
        result.measurement.readings["itl_es99"] = Reading(0.9)  # type: ignore[index]
    many, few, none = (confirm(study, OPENING + n * PAIR) for n in (6, 3, 2))
    assert fresh(many[1]) == [(1, 6), (2, 6), (3, 6)]
    assert fresh(few[1]) == [(1, 4), (2, 3), (3, 3)]
    assert fresh(none[1]) == [(1, 4)]
    assert [outcome.kind for outcome, _ in (many, few, none)] == ["baseline"] * 3
    assert fresh(confirm(study, OPENING + 5 * PAIR, pairs=5)[1]) == [(1, 5), (2, 5), (3, 5)]
    assert fresh(confirm(study, OPENING + 5 * PAIR - 1, pairs=5)[1]) == [(1, 4)]
    found = Told(
        [OWN, *slower, GOOD], slower[:1], [slower[0], replace(GOOD, number=6), replace(GOOD, number=7)]
    )
    outcome, notebook = confirm(found, OPENING + 6 * PAIR)
    assert (outcome.kind, fresh(notebook)) == ("better", [(1, 6), (6, 6)])
    assert "There is time for the next best" in notebook.notes[1]
    alone = confirm(Told([OWN, *slower], slower[:1]), OPENING + 6 * PAIR)
    assert fresh(alone[1]) == [(1, 6)]


def test_a_candidate_that_misses_a_bound_makes_way_once_another_is_thought_better(
    confirm: Any, tmp_path: Path
) -> None:
    """TTFT is 1.5 times the baseline's at 32 tokens: after three pairs of eight it gives way, not before, and
    not where it is the best that is known all the same."""
    late = trial(3, 32)
    for after, pairs in ([GOOD, late], [3, 4]), ([late, GOOD], [4, 4]):
        study = Told([OWN, late, GOOD], [late, GOOD], after)
        outcome, _ = confirm(study, OPENING + 8 * PAIR)
        ran = [len(list((tmp_path / "confirmation" / f"{n:03d}-after").iterdir())) for n in (3, 1)]
        assert (outcome.kind, ran) == ("better", pairs)


def test_pairs_are_repeats_of_both_sides_on_requests_of_their_own(confirm: Any) -> None:
    study = Told([OWN, SAME], [replace(SAME, number=2)])
    confirm(study, OPENING + 4 * PAIR)
    pairs = list(zip(study.fresh[::2], study.fresh[1::2], strict=True))
    assert len(pairs) == 4
    assert len({own.request_set for own, _ in pairs}) == 4
    for own, theirs in pairs:
        assert (own.number, theirs.number, own.request_set) == (0, 2, theirs.request_set)
        assert theirs.violations["ttft_es95"] == pytest.approx(
            theirs.measurement.value("ttft_es95") / (1.2 * own.measurement.value("ttft_es95")) - 1
        )


@pytest.mark.parametrize(
    ("own", "theirs", "worth"),
    [
        ((1.0, 9, 0.9, 1.1), (0.95, 9, 0.9, 1.0), True),
        ((1.0, 9, 0.9, 1.1), (1.05, 9, 1.0, 1.2), True),
        ((1.0, 9, 0.9, 1.1), (1.3, 9, 1.1, 1.5), False),
        ((1.0, 9, 0.9, 1.1), (1.3, 9, 1.2, 1.5), False),
        ((1.0, 9, 0.9, 1.1), (1.0, 9, 0.9, 1.1), False),
        ((1.0,), (1.1,), False),
    ],
    ids=["better", "within", "its edge", "beyond", "the same", "no interval"],
)
def test_a_candidate_that_measured_surely_no_better_is_not_confirmed(
    confirm: Any, own: Any, theirs: Any, worth: bool
) -> None:
    def inverse(reading: Any) -> Any:
        value, *rest = reading
        return (1 / value, rest[0], 1 / rest[2], 1 / rest[1]) if rest else (1 / value,)

    baseline, candidate = trial(0, 2048, itl_es99=own), trial(1, 512, itl_es99=theirs)
    assert bool(fresh(confirm(Told([baseline, candidate], [candidate]))[1])) == worth
    missing = replace(baseline, violations={SERVES: 0.0, "ttft_es95": 0.5})
    assert fresh(confirm(Told([missing, candidate], [candidate]))[1]) == [(1, 4)]
    rate = parse_slo("throughput")
    if own[0] != 1.0 or len(own) > 1:
        more = [trial(0, 2048, throughput=inverse(own)), trial(1, 512, throughput=inverse(theirs))]
        more = [replace(result, violations={SERVES: 0.0}) for result in more]
        assert bool(fresh(confirm(Told(more, more[1:]), slo=rate)[1])) == worth


def test_a_baseline_that_does_not_serve_is_not_compared_with(confirm: Any) -> None:
    failed = TrialResult(0, DEFAULTS, BASELINE, "failed", "exited", violations={SERVES: 1.0})
    outcome, notebook = confirm(Told([failed, GOOD], [GOOD]), 900.0)
    assert (outcome.kind, outcome.best, notebook.phases) == ("better", GOOD, [])
    nothing = confirm(
        Told([failed], proposal=SimpleNamespace(number=1, config=GOOD.config, origin="x")), 900.0
    )
    assert (nothing[0].kind, nothing[1].phases) == ("failed", [])


def test_without_a_candidate_the_best_guess_is_proven_where_two_pairs_are_left(confirm: Any) -> None:
    proposal = SimpleNamespace(number=1, config=GOOD.config, origin="a guess")
    study = Told([OWN], proposal=proposal)
    outcome, notebook = confirm(study, OPENING + 2 * PAIR)
    assert (fresh(notebook), notebook.phases) == ([(1, 2)], ["confirmation"])
    assert outcome.kind == "better"
    [(of, told)] = study.told
    assert of is proposal
    assert (told.status, told.violations[SERVES]) == ("measured", 0.0)
    assert outcome.best == told
    assert told.violations.keys() >= {"ttft_es95", "throughput", "failed"}
    assert told.measurement == outcome.confirmation.candidate
    assert not fresh(confirm(Told([OWN], proposal=proposal), OPENING + 2 * PAIR - 1)[1])
    assert not fresh(confirm(Told([OWN], proposal=proposal), 900.0, budget=None)[1])
    assert not fresh(confirm(Told([OWN]), 900.0)[1])


def test_no_guess_is_made_beyond_the_trials_that_were_allowed(confirm: Any) -> None:
    proposal = SimpleNamespace(number=2, config=GOOD.config, origin="a guess")
    for allowed, begun in [(1, []), (2, [(2, 8)])]:
        study = Told([OWN, trial(1, 2040, itl_es99=2.0)], proposal=proposal)
        assert fresh(confirm(study, OPENING + 8 * PAIR, trials=allowed)[1]) == begun


def test_a_guess_that_fails_on_fresh_runs_is_told_as_failed(confirm: Any) -> None:
    def dies(config: Any) -> None:
        if config["max_num_batched_tokens"] == 512:
            raise RunFailed("killed", "the server was ended by SIGKILL", "Killed")

    proposal = SimpleNamespace(number=1, config=GOOD.config, origin="a guess")
    study = Told([OWN], proposal=proposal)
    outcome, _ = confirm(study, OPENING + 4 * PAIR, AnalyticTarget(run_fault=dies))
    assert (outcome.kind, outcome.best) == ("baseline", None)
    [(_, told)] = study.told
    assert (told.status, told.violations) == ("failed", {SERVES: 1.0})
    assert "killed" in told.reason


def test_the_nearest_miss_is_proven_before_any_guess(confirm: Any) -> None:
    far, near, worse = (
        replace(trial(n, tokens), violations={SERVES: 0.0, "ttft_es95": miss, "throughput": other})
        for n, tokens, miss, other in [(1, 512, 0.3, -0.9), (2, 768, 0.1, -0.1), (3, 2040, 0.01, -0.1)]
    )
    worse = replace(worse, measurement=trial(3, 2040, itl_es99=2.0).measurement)
    unchanged = replace(trial(4, 2048, itl_es99=0.1), violations={"ttft_es95": 0.05})
    stopped = replace(near, number=5, status="stopped", violations={})
    study = Told([OWN, far, near, worse, unchanged, stopped])
    assert fresh(confirm(study, OPENING + 5 * PAIR)[1]) == [(2, 5)]
    assert study.told == []


@pytest.mark.parametrize(("tokens", "reason", "raises"), [(2048, "killed", True), (512, "disk_full", True)])
def test_what_is_not_the_candidates_fault_ends_the_study(
    confirm: Any, tokens: int, reason: str, raises: bool
) -> None:
    def dies(config: Any) -> None:
        if config["max_num_batched_tokens"] == tokens:
            raise RunFailed(reason, "it ended", "the log")

    with pytest.raises(SetupFailed, match="confirmation: it ended"):
        confirm(Told([OWN, GOOD], [GOOD]), target=AnalyticTarget(run_fault=dies))


def test_a_confirmation_ends_at_a_look_that_settles_it_and_keeps_its_runs(
    confirm: Any, tmp_path: Path
) -> None:
    outcome, _ = confirm(Told([OWN, GOOD], [GOOD]), OPENING + 7 * PAIR)
    assert outcome.confirmation.pairs == 4
    kept = {path.parent.name for path in (tmp_path / "confirmation").rglob("*.json")}
    assert kept == {"001-before", "001-after"}
    assert len(list((tmp_path / "confirmation").rglob("*.json"))) == 8

"""Figures from hand-made records: every one can be checked on paper."""

import math

import numpy as np
import pytest
from recorded_exchange import record, records
from scipy.stats import binom, mannwhitneyu

from loadgen.measure.distribution import Distribution, binomial_quantile, min_samples, rank_test
from loadgen.measure.record import Failure, RequestRecord
from loadgen.measure.stats import METRICS, FigureError, RequestBound, Summary
from servers.slo.bounds import PER_REQUEST


@pytest.mark.parametrize(
    ("quantile", "needed"), [(0.5, 5), (0.9, 29), (0.95, 59), (0.99, 299), (0.999, 2995)]
)
def test_smallest_samples(quantile: float, needed: int) -> None:
    assert min_samples(quantile) == needed
    enough, few = (Distribution.of(range(n)) for n in (needed, needed - 1))
    assert math.isfinite(enough.percentile(quantile))
    assert math.isnan(few.percentile(quantile))
    assert math.isfinite(few.rank(quantile))


def test_percentiles_are_samples() -> None:
    samples = Distribution.of(range(100, 0, -1))
    assert [samples.percentile(q) for q in (0.5, 0.9, 0.95)] == [50, 90, 95]
    assert samples.mean() == 50.5


def test_weights_count_as_copies() -> None:
    rng = np.random.default_rng(0)
    values, weights = rng.random(200), rng.integers(1, 6, 200)
    weighted = Distribution.of(values, weights.astype(np.float64))
    copied = Distribution.of(np.repeat(values, weights))
    for quantile in (0.01, 0.5, 0.9, 0.95, 0.99):
        assert weighted.percentile(quantile) == copied.percentile(quantile)
    assert weighted.count == copied.count
    assert weighted.mean() == pytest.approx(copied.mean())


def test_failures_are_infinite_in_percentiles_and_absent_from_means() -> None:
    samples = Distribution.of([1.0] * 94 + [math.inf] * 6)
    assert samples.percentile(0.9) == 1
    assert samples.percentile(0.95) == math.inf
    assert samples.mean() == 1


def test_binomial_interval_of_the_median() -> None:
    """The classic table: of 100 samples, ranks 40 and 61 hold the median with 95 %."""
    assert Distribution.of(range(1, 101)).interval(0.5) == (40, 61)


@pytest.mark.parametrize("p", [0.5, 0.9, 0.95, 0.99, 0.999])
def test_binomial_quantiles_are_those_of_scipys_distribution(p: float) -> None:
    for n in (1, 2, 7, 30, 59, 100, 299, 2995, 1_000_000):
        for share in (0.005, 0.025, 0.05, 0.95, 0.975, 0.995):
            assert binomial_quantile(share, n, p) == binom.ppf(share, n, p)


@pytest.mark.parametrize("ties", [False, True])
def test_the_rank_test_is_scipys(ties: bool) -> None:
    rng = np.random.default_rng(0)
    for shift in (0.0, 0.3, 2.0):
        a, b = (rng.normal(mean, 1, size) for mean, size in ((0.0, 30), (shift, 45)))
        if ties:
            a, b = a.round(), b.round()
        expected = mannwhitneyu(a, b, method="asymptotic").pvalue
        assert rank_test(list(a), list(b)) == pytest.approx(expected, rel=1e-9)
    assert rank_test([1.0] * 10, [1.0] * 10) == 1.0


def test_an_interval_the_sample_cannot_close_is_open() -> None:
    low, high = Distribution.of(range(1, 60)).interval(0.95)
    assert low > 50
    assert high == math.inf


def test_intervals_cover_what_they_promise() -> None:
    rng = np.random.default_rng(1)
    hits = 0
    for _ in range(400):
        low, high = Distribution.of(rng.exponential(size=400)).interval(0.95)
        hits += low <= -math.log(0.05) <= high
    assert hits / 400 > 0.93


def test_intervals_of_gaps_know_that_gaps_of_one_request_go_together() -> None:
    """Requests differ, the gaps inside one do not: 40 requests are 40 facts, not 2,000."""
    rng = np.random.default_rng(2)
    hits = {True: 0, False: 0}
    for _ in range(200):
        speed = np.repeat(rng.exponential(size=40), 50)
        groups = np.repeat(np.arange(40), 50)
        for grouped in hits:
            low, high = Distribution.of(speed, None, groups if grouped else None).interval(0.5)
            hits[grouped] += low <= math.log(2) <= high
    assert hits[True] / 200 > 0.9
    assert hits[False] / 200 < 0.4


def test_a_small_run_in_full() -> None:
    """Five requests of 5 tokens, 10 ms apart, first token after 100 ms."""
    summary = Summary(records([record(k, float(k)) for k in range(5)]))
    assert summary.value("ttft_p50") == pytest.approx(0.1)
    assert summary.value("tpot_p50") == pytest.approx(0.01)
    assert summary.value("itl_p50") == pytest.approx(0.01)
    assert summary.value("e2e_mean") == pytest.approx(0.14)
    assert summary.value("max_stall_p50") == pytest.approx(0.01)
    assert math.isnan(summary.value("ttft_p90"))
    assert summary.count("itl_p50") == 20
    assert summary.count("ttft_p50") == 5
    assert summary.value("throughput") == pytest.approx(25 / 10)
    assert summary.value("request_rate") == pytest.approx(0.5)
    assert summary.value("completed") == 5
    assert summary.value("failed") == 0


def test_itl_is_token_weighted_and_inter_chunk_is_not() -> None:
    """4 tokens every 40 ms, and one gap of 100 ms with one token."""
    at = tuple(round(ms * 1e6) for ms in (100, 140, 180, 280))
    one = RequestRecord(0, "a", 0, 0, at[-1], at, (4, 4, 4, 1), completion_tokens=13, max_tokens=13)
    summary = Summary(records([one]))
    itl, chunk = summary.distribution("itl"), summary.distribution("inter_chunk")
    assert sorted(zip(itl.values.tolist(), itl.weights.tolist(), strict=True)) == [
        (0.01, 4),
        (0.01, 4),
        (0.1, 1),
    ]
    assert chunk.values.tolist() == [0.04, 0.04, 0.1]
    assert summary.value("tpot_mean") == pytest.approx(0.18 / 9)


def test_latency_runs_from_the_intended_time_and_service_latency_from_sending() -> None:
    summary = Summary(records([record(k, float(k), first_s=0.5, late_s=0.4) for k in range(6)]))
    assert summary.value("ttft_p50") == pytest.approx(0.5)
    assert summary.value("service_ttft_p50") == pytest.approx(0.1)
    assert summary.value("service_e2e_p50") == pytest.approx(0.14)
    assert summary.value("lateness_p50") == pytest.approx(0.4)


def test_only_requests_intended_in_the_window_count() -> None:
    made = [record(k, float(k), first_s=k) for k in range(10)]
    summary = Summary(records(made, window=(2.0, 6.0)))
    assert summary.count("ttft_p50") == 5
    assert summary.distribution("ttft").values.tolist() == [2, 3, 4, 5, 6]


def test_throughput_counts_the_tokens_that_arrive_in_the_window() -> None:
    """One request starts before the window and ends in it, one ends after it."""
    early, late = record(0, 0.0, first_s=0.9, gap_s=0.1), record(1, 1.5, first_s=0.1, gap_s=0.3)
    summary = Summary(records([early, late], window=(1.0, 2.0)))
    assert summary.value("throughput") == pytest.approx(4 + 2)


def test_tokens_cut_off_by_the_end_of_the_run_were_work_and_tokens_of_failures_were_not() -> None:
    made = [
        record(0, 0.0),
        record(1, 0.0, failure=Failure.CANCELLED),
        record(2, 0.0, failure=Failure.TOKEN_COUNT),
    ]
    summary = Summary(records(made, window=(0.0, 1.0)))
    assert summary.value("throughput") == 10
    assert (summary.value("measured"), summary.value("completed"), summary.value("failed")) == (2, 1, 1)


def test_failed_requests_pull_every_percentile_up() -> None:
    made = [record(k, 0.0) for k in range(90)] + [record(k, 0.0, failure=Failure.STALLED) for k in range(10)]
    summary = Summary(records(made, window=(0.0, 1.0)))
    assert summary.value("ttft_p90") == pytest.approx(0.1)
    assert summary.value("ttft_p95") == math.inf
    assert summary.value("ttft_mean") == pytest.approx(0.1)


def test_the_gaps_a_failed_request_never_delivered_are_infinite() -> None:
    broken = RequestRecord(0, "a", 0, 0, 10, (1, 2, 3), (1, 1, 1), failure=Failure.STALLED, max_tokens=10)
    itl = Summary(records([broken])).distribution("itl")
    assert itl.count == 9
    assert itl.weights[np.isinf(itl.values)].sum() == 7


def test_goodput_wants_every_bound_met_by_the_same_request() -> None:
    made = [record(k, 0.5, first_s=0.1 * (k + 1), gap_s=0.1 / (k + 1)) for k in range(4)]
    made.append(record(4, 0.5, failure=Failure.REFUSED, tokens=0))
    run = records(made, window=(0.0, 1.0))
    assert Summary(run).value("goodput") == 4
    assert Summary(run, [RequestBound("ttft", 0.25)]).value("goodput") == 2
    assert Summary(run, [RequestBound("ttft", 0.35), RequestBound("tpot", 0.06)]).value("goodput") == 2
    assert Summary(run, [RequestBound("ttft", 0.0, cls="other")]).value("goodput") == 4


def test_a_closed_loop_offers_what_ends_in_the_window() -> None:
    """Four clients, a request a second each: in nine seconds 40 begin and 36 end."""
    made = [record(k, k // 4, first_s=0.1, gap_s=0.1, tokens=10) for k in range(40)]
    closed, opened = (Summary(records(made, window=(0.0, 9.0), mode=mode)) for mode in ("closed", "open"))
    assert [closed.value(name) for name in ("request_rate", "offered_rate", "goodput")] == [4, 4, 4]
    assert opened.value("offered_rate") == pytest.approx(40 / 9)


def test_a_request_of_one_token_has_no_gap_to_miss() -> None:
    summary = Summary(records([record(0, 0.5, tokens=1)], window=(0.0, 1.0)), [RequestBound("itl", 1e-9)])
    assert summary.value("goodput") == 1
    assert summary.count("tpot_p50") == 0
    assert math.isnan(summary.value("tpot_mean"))


def test_every_figure_also_by_class() -> None:
    made = [record(k, 0.1 * k, first_s=0.1 if k % 2 else 1.0, cls="ab"[k % 2]) for k in range(40)]
    summary = Summary(records(made))
    assert summary.value("ttft_p50", "b") == pytest.approx(0.1)
    assert summary.value("ttft_p50", "a") == pytest.approx(1.0)
    assert summary.value("throughput", "a") == summary.value("throughput") / 2
    assert [row["class"] for row in summary.table()] == ["all", "a", "b"]
    assert summary.table()[1]["ttft_n"] == 20
    with pytest.raises(FigureError, match="no class 'c'"):
        summary.value("ttft_p50", "c")


@pytest.mark.parametrize("name", ["ttft", "ttft_p", "latency_p50", "itl_q99", "p50", ""])
def test_unknown_figures_are_refused(name: str) -> None:
    with pytest.raises(FigureError, match="unknown figure"):
        Summary(records([])).value(name)


@pytest.mark.parametrize("metric", METRICS)
def test_an_empty_run_has_no_figures_and_no_crash(metric: str) -> None:
    summary = Summary(records([]))
    assert math.isnan(summary.value(f"{metric}_p50"))
    assert math.isnan(summary.value(f"{metric}_mean"))
    assert all(math.isnan(end) for end in summary.interval(f"{metric}_p50"))
    assert summary.value("throughput") == 0


def test_names_of_statistics() -> None:
    assert Summary._split("ttft_p999") == ("ttft", "p", 0.999)
    assert Summary._split("inter_chunk_p5") == ("inter_chunk", "p", 0.05)
    assert Summary._split("itl_es99") == ("itl", "es", 0.99)


def test_the_shortfall_is_the_mean_of_the_slowest_share() -> None:
    samples = Distribution.of([1.0] * 90 + [2.0] * 6 + [5.0] * 4)
    assert samples.shortfall(0.95) == pytest.approx((4 * 5 + 1 * 2) / 5)
    assert samples.shortfall(0.99) == 5.0
    weighted = Distribution.of([1.0, 3.0], [99.5, 0.5])
    assert weighted.shortfall(0.99) == pytest.approx((0.5 * 3 + 0.5 * 1) / 1)
    assert weighted.rank(0.99) == 1.0, "the percentile does not see what fewer than 1 % of the gaps are"
    assert Distribution.of([1.0] * 300 + [math.inf]).shortfall(0.99) == math.inf
    assert math.isnan(Distribution.of([]).shortfall(0.99))


def test_the_interval_of_a_shortfall_holds_the_truth() -> None:
    """Requests differ in how many of their gaps stall; the truth is that of ten thousand of them."""
    rng = np.random.default_rng(3)

    def run(requests: int) -> Distribution:
        stalled = rng.random((requests, 40)) < rng.gamma(1.0, 0.03, (requests, 1))
        gaps = np.where(stalled, rng.lognormal(-1.5, 0.3, stalled.shape), 0.01)
        return Distribution.of(gaps.ravel(), groups=np.repeat(np.arange(requests), 40))

    truth = run(10_000).shortfall(0.99)
    ends = [run(60).shortfall_interval(0.99) for _ in range(200)]
    assert 180 <= sum(low <= truth <= high for low, high in ends) <= 199


def test_a_bound_on_what_a_request_has_not() -> None:
    for metric in PER_REQUEST:  # what an SLO may ask of each request
        assert RequestBound(metric, 1.0).limit == 1.0
    with pytest.raises(FigureError, match="a request has"):
        RequestBound("throughput", 1.0)

"""Whose a series is: parts of a whole, copies, and engines, read from scrapes and asked of a Prometheus."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from live_prometheus import load_recordings, needs_prometheus, prometheus
from prometheus_api_client import PrometheusConnect

from doctor.diagnosis.diagnose import diagnose
from doctor.diagnosis.finding import Finding
from doctor.diagnosis.judged_objectives import DEFAULTS
from doctor.diagnosis.playbook import load_all
from doctor.export.alerts import alert_rules
from doctor.export.compile import RuleCompiler
from doctor.export.export import compiler
from doctor.metrics.evaluators import Group
from doctor.metrics.signals import SIGNALS
from doctor.metrics.sources import Observation, PrometheusSource, Scrapes
from servers.metrics.exposition import record
from servers.reading import Number

Labels = Mapping[str, str]
FLAGS = {"max_num_seqs": 40}
START_MS, STEP_MS, STEPS = 1_700_000_000_000, 15_000, 13
BOUNDS = ("0.1", "0.5", "1.0", "2.0", "+Inf")


@dataclass(frozen=True)
class Gauges:
    """What one series says of an engine; None: there is none of that metric."""

    labels: Labels
    running: float | None = None
    waiting: float | None = None
    kv: float | None = None


@dataclass(frozen=True)
class Case:
    """``served``: labels of the counters and histograms, with the requests that each gains per scrape.

    ``engines``: by the labels that tell each apart what it is judged by: running, waiting, first tokens.
    """

    gauges: Sequence[Gauges]
    served: Sequence[tuple[Labels, int]]
    engines: Mapping[tuple[tuple[str, str], ...], tuple[float, float, float]]
    names: str = "sglang:"


SGLANG = {"model_name": "m", "engine_type": "unified"}
M = {"model_name": "m"}


def ranked(*labels: Labels, running: float = 4, waiting: float = 3) -> list[Gauges]:
    return [Gauges({**SGLANG, **own}, running, waiting, 0.4) for own in labels]


def engine(**labels: str) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(labels.items()))


REQUESTS = 10.0 * (STEPS - 1)
CASES: Mapping[str, Case] = {
    "an aggregate beside its parts": Case(
        [
            Gauges({**SGLANG, "tp_rank": "0", "priority": ""}, 14, 2, 0.4),
            Gauges({**SGLANG, "tp_rank": "0", "priority": "-1"}, 0, 2),
            Gauges({**SGLANG, "tp_rank": "0", "priority": "0"}, 14, 0),
        ],
        [(M, 10)],
        {engine(model_name="m"): (14, 2, REQUESTS)},
    ),
    "an aggregate called total": Case(
        [
            Gauges({**M, "tenant": "total"}, 9, 3),
            Gauges({**M, "tenant": "a"}, 4, 3),
            Gauges({**M, "tenant": "b"}, 5, 0),
            Gauges(M, kv=0.4),
        ],
        [(M, 10)],
        {engine(model_name="m"): (9, 3, REQUESTS)},
    ),
    "an aggregate without the label of its parts": Case(
        [
            *(
                Gauges({**M, "lora": lora}, *own)
                for lora, own in {"": (9, 3), "a": (4, 3), "b": (5, 0)}.items()
            ),
            Gauges(M, kv=0.4),
        ],
        [(M, 10), ({**M, "lora": "a"}, 4), ({**M, "lora": "b"}, 6)],
        {engine(model_name="m"): (9, 3, REQUESTS)},
    ),
    "requests without an adapter beside those with one": Case(
        [
            *(Gauges({**M, "lora": lora}, *own) for lora, own in {"": (9, 3), "a": (4, 3)}.items()),
            Gauges(M, kv=0.4),
        ],
        [(M, 10), ({**M, "lora": "a"}, 4)],
        {engine(model_name="m"): (13, 6, 1.4 * REQUESTS)},
    ),
    "an aggregate beside the ranks": Case(
        [
            Gauges({**M, "dp_rank": "0"}, 4, 3, 0.4),
            Gauges({**M, "dp_rank": "1"}, 6, 0, 0.6),
            Gauges(M, 10, 3, 0.5),
        ],
        [({**M, "dp_rank": "0"}, 4), ({**M, "dp_rank": "1"}, 6), (M, 10)],
        {
            engine(model_name="m", dp_rank="0"): (4, 3, 0.4 * REQUESTS),
            engine(model_name="m", dp_rank="1"): (6, 0, 0.6 * REQUESTS),
        },
    ),
    "prefill and decode behind a gateway": Case(
        [
            Gauges({**M, "engine_type": kind, "worker_addr": f"{kind}:1"}, running, 0, 0.4)
            for kind, running in (("prefill", 2), ("decode", 30))
        ],
        [({**M, "worker_addr": "prefill:1"}, 10), ({**M, "worker_addr": "decode:1"}, 10)],
        {
            engine(model_name="m", engine_type="prefill", worker_addr="prefill:1"): (2, 0, REQUESTS),
            engine(model_name="m", engine_type="decode", worker_addr="decode:1"): (30, 0, REQUESTS),
        },
    ),
    "parts without an aggregate": Case(
        [
            Gauges({**M, "lora": "a"}, 4, 1),
            Gauges({**M, "lora": "b"}, 5, 0),
            Gauges(M, kv=0.4),
        ],
        [({**M, "streaming": "true"}, 6), ({**M, "streaming": "false"}, 4)],
        {engine(model_name="m"): (9, 1, REQUESTS)},
    ),
    "ranks of a tensor-parallel group": Case(
        ranked(*({"tp_rank": str(rank), "pp_rank": "0"} for rank in range(8))),
        [(M, 10)],
        {engine(model_name="m"): (4, 3, REQUESTS)},
    ),
    "ranks of pipeline and expert parallelism, in the counters too": Case(
        ranked(*({"pp_rank": str(rank), "moe_ep_rank": str(rank)} for rank in range(4))),
        [({**M, "pp_rank": str(rank), "moe_ep_rank": str(rank)}, 10) for rank in range(4)],
        {engine(model_name="m"): (4, 3, REQUESTS)},
    ),
    "data-parallel ranks behind one front end": Case(
        [
            *ranked(
                {"dp_rank": "0", "tp_rank": "0"}, {"dp_rank": "0", "tp_rank": "1"}, running=30, waiting=9
            ),
            *ranked({"dp_rank": "1", "tp_rank": "2"}, {"dp_rank": "1", "tp_rank": "3"}, running=2, waiting=0),
        ],
        [(M, 10)],
        {
            engine(model_name="m", dp_rank="0"): (30, 9, REQUESTS / 2),
            engine(model_name="m", dp_rank="1"): (2, 0, REQUESTS / 2),
        },
    ),
    "a gateway's page": Case(
        [
            *ranked({"worker_addr": "grpc://a:1", "tp_rank": "0"}, running=40, waiting=90),
            *ranked({"worker_addr": "grpc://b:1", "tp_rank": "0"}, running=3, waiting=0),
        ],
        [({**M, "worker_addr": "grpc://a:1"}, 9), ({**M, "worker_addr": "grpc://b:1"}, 2)],
        {
            engine(model_name="m", worker_addr="grpc://a:1"): (40, 90, 9.0 * (STEPS - 1)),
            engine(model_name="m", worker_addr="grpc://b:1"): (3, 0, 2.0 * (STEPS - 1)),
        },
        names="sglang_",
    ),
    "a router that counts for its servers": Case(
        [
            Gauges({**M, "instance": "a:1"}, 7, 1, 0.4),
            Gauges({**M, "instance": "b:1"}, 5, 0, 0.4),
            Gauges({"instance": "router:1", "server": "http://a:1"}, 7),
            Gauges({"instance": "router:1", "server": "http://b:1"}, 5),
        ],
        [({**M, "instance": "a:1"}, 6), ({**M, "instance": "b:1"}, 4)],
        {
            engine(model_name="m", instance="a:1"): (7, 1, 0.6 * REQUESTS),
            engine(model_name="m", instance="b:1"): (5, 0, 0.4 * REQUESTS),
        },
    ),
    "a router's page": Case(
        [Gauges({"server": f"http://{name}:1"}, running, 0) for name, running in (("a", 7), ("b", 5))],
        [({"server": "http://a:1"}, 10), ({"server": "http://b:1"}, 10)],
        {engine(server="http://a:1"): (7, 0, REQUESTS), engine(server="http://b:1"): (5, 0, REQUESTS)},
    ),
    "Ray's workers on one node": Case(
        [
            Gauges({**M, "instance": "n:1", "WorkerId": "a"}, 7, 1, 0.4),
            Gauges({**M, "instance": "n:1", "WorkerId": "b"}, 5, 0, 0.4),
        ],
        [({**M, "instance": "n:1", "WorkerId": "a"}, 6), ({**M, "instance": "n:1", "WorkerId": "b"}, 4)],
        {
            engine(model_name="m", instance="n:1", WorkerId="a"): (7, 1, 6.0 * (STEPS - 1)),
            engine(model_name="m", instance="n:1", WorkerId="b"): (5, 0, 4.0 * (STEPS - 1)),
        },
        names="ray_sglang:",
    ),
    "pods behind one service's address": Case(
        [Gauges({**M, "namespace": "n", "pod": f"p{i}", "instance": "svc:80"}, i, 0, 0.4) for i in (1, 2)],
        [({**M, "namespace": "n", "pod": f"p{i}", "instance": "svc:80"}, 10) for i in (1, 2)],
        {
            engine(model_name="m", namespace="n", pod=f"p{i}", instance="svc:80"): (i, 0, REQUESTS)
            for i in (1, 2)
        },
        names="otel_collector_sglang_",
    ),
    "two replicas of a Prometheus": Case(
        [Gauges({**M, "instance": "a:1", "prometheus_replica": r}, 4, 3, 0.4) for r in "xy"],
        [({**M, "instance": "a:1", "prometheus_replica": r}, 10) for r in "xy"],
        {engine(model_name="m", instance="a:1"): (4, 3, REQUESTS)},
    ),
}


def scrapes(case: Case) -> list[tuple[int, str]]:
    return [(START_MS + step * STEP_MS, page(case, step)) for step in range(STEPS)]


def page(case: Case, step: int) -> str:
    lines = []
    for gauges in case.gauges:
        named = {
            "num_running_reqs": gauges.running,
            "num_queue_reqs": gauges.waiting,
            "token_usage": gauges.kv,
        }
        lines += [
            f"{case.names}{name}{written(gauges.labels)} {value}"
            for name, value in named.items()
            if value is not None
        ]
    for labels, grown in case.served:
        done = grown * step
        lines += [
            f"{case.names}generation_tokens_total{written(labels)} {200 * done}",
            f"{case.names}prompt_tokens_total{written(labels)} {300 * done}",
            *(
                f"{case.names}time_to_first_token_seconds_bucket{written({**labels, 'le': bound})} "
                f"{0 if bound == '0.1' else done}"
                for bound in BOUNDS
            ),
            f"{case.names}time_to_first_token_seconds_count{written(labels)} {done}",
            f"{case.names}time_to_first_token_seconds_sum{written(labels)} {0.3 * done}",
        ]
    return "\n".join(lines) + "\n"


def written(labels: Labels) -> str:
    return "{" + ",".join(f'{name}="{value}"' for name, value in labels.items()) + "}"


def figures(seen: Observation, without: Sequence[str] = ()) -> dict[Group, dict[str, float]]:
    """Every signal that is known, of every engine."""
    read = seen.evaluator.read_all(list(SIGNALS.values()))
    return {
        group.without(without): {
            name: reading.point for name, own in read.items() if isinstance(reading := own[group], Number)
        }
        for group in seen.evaluator.groups
    }


@pytest.mark.parametrize("name", CASES)
def test_each_engine_is_judged_by_its_own_series_counted_once(name: str) -> None:
    case = CASES[name]
    found = figures(Scrapes(scrapes(case)).observe(None, DEFAULTS))
    told = {
        group.labels: (own["running_max"], own["waiting_max"], round(own["first_tokens"]))
        for group, own in found.items()
    }
    assert told == case.engines


@needs_prometheus
def test_a_prometheus_tells_the_same_of_every_engine(tmp_path: Path) -> None:
    pages = {name: scrapes(case) for name, case in CASES.items()}
    load_recordings([(record(own), {"case": name}) for name, own in pages.items()], tmp_path)
    end, told = (START_MS + (STEPS - 1) * STEP_MS) / 1000, 0
    with prometheus(tmp_path) as url:
        for name, own in pages.items():
            recorded = Scrapes(own).observe(None, DEFAULTS)
            live = PrometheusSource(url, f'case="{name}"', at=end).observe(recorded.window_s, DEFAULTS)
            ours, theirs = figures(recorded), figures(live, ("case",))
            assert ours.keys() == theirs.keys(), name
            for group, known in ours.items():
                assert theirs[group].keys() == known.keys(), name
                assert theirs[group] == pytest.approx(known, rel=0.01, abs=1e-9), name
            found = diagnose(Scrapes(own), FLAGS).findings
            told += len(found)
            source = PrometheusSource(url, f'case="{name}"', at=end)
            exported = compiler(source, FLAGS, window=recorded.window_s, selector=f'case="{name}"')
            firing = alerted(url, exported, end)
            # An objective on a histogram that is not there is judged by a mean, which no alert does.
            sure = [f for f in found if not f.id.endswith("-missed")]
            assert {of(f) for f in sure} <= firing <= {of(f) for f in found}, name
    assert told >= 4


def of(finding: Finding) -> tuple[str, tuple[tuple[str, str], ...]]:
    return finding.id, tuple(finding.labels.items())


def alerted(url: str, exported: RuleCompiler, at: float) -> set[tuple[str, tuple[tuple[str, str], ...]]]:
    """The playbooks whose alerts hold, with the labels of the engine."""
    groups = alert_rules(load_all(), exported).document["groups"]
    client = PrometheusConnect(url)
    return {
        (rule["labels"]["playbook"], Group.of(**element["metric"]).without(("case", "__name__")).labels)
        for rule in groups[0]["rules"]
        for element in client.custom_query(rule["expr"], params={"time": at})
    }


def test_ranks_and_workers_are_held_against_each_other() -> None:
    for name in ("data-parallel ranks behind one front end", "a gateway's page"):
        found = diagnose(Scrapes(scrapes(CASES[name]), "page"), {})
        unequal = {f.title: f.labels for f in found.findings if f.id == "replica-imbalance"}
        busiest = next(iter(CASES[name].engines))
        assert unequal["One instance carries far more load than its peers"] == dict(busiest)
        assert found.to_json()["findings"][0]["labels"]
        assert len(found.engines) == 2


def test_prefill_and_decode_are_no_peers() -> None:
    found = diagnose(Scrapes(scrapes(CASES["prefill and decode behind a gateway"]), "page"), {})
    assert "replica-imbalance" not in {finding.id for finding in found.findings}


def test_engines_of_other_namespaces_are_no_peers() -> None:
    """Production is busy, staging is not: that is no imbalance."""
    labels = [{**M, "namespace": space, "pod": f"p{i}"} for space in ("prod", "staging") for i in range(2)]
    gauges = [Gauges(own, 20.0 if own["namespace"] == "prod" else 1.0, 0, 0.4) for own in labels]
    found = diagnose(Scrapes(scrapes(Case(gauges, [(own, 10) for own in labels], {}))), {})
    assert "replica-imbalance" not in {finding.id for finding in found.findings}
    assert [(fleet.model, fleet.engines) for fleet in found.fleets] == [("m", 2), ("m", 2)]

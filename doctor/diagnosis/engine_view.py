"""One engine under examination: its signals, its flags, and what the metrics give away about those."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from doctor.diagnosis.adapters import adapters_of
from doctor.diagnosis.judged_objectives import MISSED, JudgedObjectives
from doctor.diagnosis.objective_judgement import (
    Measured,
    ObjectiveJudgement,
    any_missed,
    histograms_of,
    judgements,
    signals_of,
)
from doctor.diagnosis.playbook import ASSUMPTIONS, BENCH, LOG, told_by
from doctor.metrics.evaluators import Group
from doctor.metrics.signals import SIGNALS, Signal, metrics_of
from doctor.metrics.sources import Observation
from servers import known_flags as server_flags
from servers.command import ServerCommand
from servers.expression import Clause, without
from servers.kind import ServerKind
from servers.known_flags import Flags
from servers.logs.log_facts import LogFacts
from servers.metrics.catalog import never_had
from servers.metrics.identity import is_rank
from servers.reading import Missing, Number, Reading

MOSTLY_PREFILL = 0.3
"""Time in decode over time in prefill, or output over prompt tokens, below which prompts fill the steps."""


@dataclass(frozen=True)
class EngineView:
    """One engine with everything that rules may ask about it."""

    group: Group
    name: str
    readings: Mapping[str, Reading]
    queries: Mapping[str, str]
    flags: Flags
    constants: Mapping[str, float]
    """SLOs, assumptions, and what a log, a benchmark or a baseline told."""
    objectives: tuple[ObjectiveJudgement, ...] = ()
    silent: Mapping[str, str] = field(default_factory=dict)
    """By what :data:`TOLD` asks for, what is said instead where it was passed and does not tell."""
    baseline: EngineView | None = None
    """The same engine in an earlier recording."""

    def lookup(self, name: str) -> Reading:
        if name in self.readings:
            return self.readings[name]
        if name in self.constants:
            return Number.exactly(self.constants[name])
        if name in MISSED:
            return any_missed(name, self.objectives)
        if name in ASSUMPTIONS:
            return Missing(name, "assumption", ASSUMPTIONS[name])
        if (who := told_by(name)) is not None:
            why = self.silent.get(who, who)
            return self._before(name.removeprefix("baseline_")) or Missing(name, "elsewhere", why)
        reading = self.flags.reading(name)
        return reading if isinstance(reading, Number) else Missing(name, "flag", reading.why)

    def _before(self, name: str) -> Reading | None:
        if self.baseline is None or told_by(name) is not None:
            return None
        reading = self.baseline.lookup(name)
        return (
            Missing(f"baseline_{name}", reading.kind, reading.why)
            if isinstance(reading, Missing)
            else reading
        )

    @property
    def idle(self) -> bool:
        """No request was seen in the window."""
        return self._all_zero("running_max", "waiting_max", "deferred_mean", "first_tokens")

    def asked(self, clause: Clause) -> Clause | None:
        """A rule without the branches that ask for what this version never had; None where it needs one."""
        readings = {name: self.lookup(name) for name in clause.names}
        return without(
            clause, {n for n, r in readings.items() if isinstance(r, Missing) and r.kind == "never"}
        )

    def excuses(self, missing: Iterable[Missing]) -> bool:
        """Whether a rule does not apply here, rather than being undecided.

        It compares with peers, and there are none; or requests are so few and short that no scrape met one,
        and nothing builds up.
        """
        kinds = {item.kind for item in missing}
        return "peers" in kinds or (kinds <= {"empty"} and self._all_zero("running_max", "waiting_max"))

    def _all_zero(self, *names: str) -> bool:
        known = [reading.point for name in names if isinstance(reading := self.readings[name], Number)]
        return bool(known) and not any(known)


def engine_views(
    observation: Observation,
    given: ServerCommand | Mapping[str, Any] | None,
    slo: JudgedObjectives,
    log: LogFacts | None,
    assume: Mapping[str, float],
    kind: ServerKind | None,
) -> list[EngineView]:
    """``given``: the server's command, or only its flags; None: not known."""
    command = (
        given if given is None or isinstance(given, ServerCommand) else ServerCommand("", None, {**given})
    )
    evaluator = observation.evaluator
    signals = {**SIGNALS, **{figure.name: figure for figure in signals_of(slo)}}
    read = evaluator.read_all(list(signals.values()))
    buckets = {key: evaluator.bounds(key) for key in histograms_of(slo)}
    version = observation.version or (log.version if log else None) or (command.version if command else None)
    queries = {name: evaluator.query(signal) for name, signal in signals.items()}
    configs = [labels for labels, _ in evaluator.samples("cache_config")]
    kind = kind or observation.kind
    lacking = never_had(kind, version, evaluator.available)
    names = _names(evaluator.groups, observation.name)
    ranks = Counter(map(_server_of, evaluator.groups))
    servers = Counter(server.peers for server in ranks)
    told = {**log.durations, **log.incidents} if log else {}
    silent = {LOG: "the log has no line on it"} if log else {}
    if observation.facts:
        silent[BENCH] = "the benchmark's result does not say"
    seen = []
    for group in evaluator.groups:
        config = {**_config_of(group, configs)}
        adapters = adapters_of(group, evaluator.samples("adapters"), observation.window_s)
        if adapters.slots is not None:
            config["max_loras"] = str(adapters.slots)
        flags = server_flags.resolve(
            command.flags if command else None,
            log,
            config,
            kind=kind,
            version=version,
            from_file=command.from_file if command else (),
        )
        own = {name: values[group] for name, values in read.items()}
        drafts = _drafts(own, queries, flags)
        readings = _without_prefill(own | drafts[0])
        readings = {name: _never(signals[name], reading, lacking) for name, reading in readings.items()}
        own_buckets = {key: bounds.get(group, ()) for key, bounds in buckets.items()}
        measured = Measured(names[group], readings, queries, own_buckets)
        seen.append(
            EngineView(
                group,
                names[group],
                readings,
                {**queries, **drafts[1]},
                _infer(flags, readings, adapters.full and "deferred" not in evaluator.keys),
                {
                    **slo.values,
                    **assume,
                    **observation.facts,
                    **told,
                    "ranks": float(ranks[_server_of(group)]),
                    "servers": float(servers[group.peers]),
                    "adapters_running": float(adapters.running),
                    "adapters_waiting": float(adapters.waiting),
                    "adapters_seen": float(adapters.seen),
                    "reasons_told": float("deferred" in evaluator.keys),
                },
                judgements(slo, measured),
                silent,
            )
        )
    return seen


def with_baseline(examined: Sequence[EngineView], baseline: Sequence[EngineView]) -> list[EngineView]:
    """Each engine beside itself in an earlier recording, or the only one there was."""
    compared = []
    for view in examined:
        old = counterpart(view, baseline) or (baseline[0] if len(baseline) == 1 else None)
        facts = {} if old is None else _against(view, old)
        compared.append(replace(view, baseline=old, constants={**view.constants, **facts}))
    return compared


def counterpart(view: EngineView, others: Sequence[EngineView]) -> EngineView | None:
    """The same engine in another recording: all labels are the same, or those that a server has whoever
    scrapes it, and these are no other engine's."""
    for labels_of in (lambda group: group, _named):
        found = [other for other in others if labels_of(other.group) == labels_of(view.group)]
        if len(found) == 1:
            return found[0]
    return None


def _named(group: Group) -> Group:
    return group.only(
        [name for name, _ in group.labels if name in ("instance", "model_name") or is_rank(name)]
    )


def _against(view: EngineView, old: EngineView) -> dict[str, float]:
    """Whether the model is another, and how much larger the KV pool is."""
    facts = {"model_changed": float(view.group.model_name != old.group.model_name)}
    pools = [p.flags.reading("kv_cache_tokens") for p in (view, old)]
    if isinstance(pools[0], Number) and isinstance(pools[1], Number) and pools[1].point > 0:
        facts["pool_change"] = pools[0].point / pools[1].point
    return facts


def _server_of(group: Group) -> Group:
    """What the data-parallel ranks of one server have in common."""
    return group.without([name for name, _ in group.labels if is_rank(name)])


def _config_of(group: Group, configs: Sequence[Mapping[str, str]]) -> Mapping[str, str]:
    """``cache_config_info`` carries no model name: the labels that it shares with an engine's must agree."""
    for labels in configs:
        if all(labels.get(name, "") in ("", value) for name, value in group.labels):
            return labels
    return {}


def _never(signal: Signal, reading: Reading, lacking: frozenset[str]) -> Reading:
    """A reading that is missing, where every way to it asks for a metric that this version never had."""
    if not isinstance(reading, Missing) or reading.kind != "metric":
        return reading
    if all(metrics_of(node) & lacking for node in signal.sources):
        return Missing(reading.name, "never", f"{reading.why}: this version never had it")
    return reading


def _without_prefill(readings: Mapping[str, Reading]) -> dict[str, Reading]:
    """No gap between tokens by Little's law while prompts fill the steps: what runs is not decoding then."""
    ratio, measured = readings["decode_per_prefill"], isinstance(readings["itl_p50"], Number)
    if measured or not isinstance(ratio, Number) or ratio.point > MOSTLY_PREFILL:
        return dict(readings)
    why = "what runs is mostly in prefill, and there is no histogram of it"
    return {**readings, **{name: Missing(name, "empty", why) for name in ("itl_mean", "load_share")}}


def _drafts(
    readings: Mapping[str, Reading], queries: Mapping[str, str], flags: Flags
) -> tuple[dict[str, Reading], dict[str, str]]:
    """SGLang counts no drafts: what a step accepts, beside the number it drafts, says how many there were."""
    drafted, length, generated = (
        flags.known["num_speculative_tokens"],
        readings["accept_length"],
        readings["generated"],
    )
    if not drafted.certain or not isinstance(length, Number) or not isinstance(generated, Number):
        return {}, {}
    each = drafted.number.point
    if each < 1 or length.point < 1:
        return {}, {}
    own = queries["accept_length"]
    figures = {
        "draft_tokens": (
            each * generated.point / length.point,
            f"{each:g} * ({queries['generated']}) / ({own})",
        ),
        "acceptance": ((length.point - 1) / each, f"(({own}) - 1) / {each:g}"),
        "tokens_drafted_per_draft": (each, f"vector({each:g})"),
    }
    return (
        {name: Number.exactly(value) for name, (value, _) in figures.items()},
        {name: query for name, (_, query) in figures.items()},
    )


def _infer(flags: Flags, readings: Mapping[str, Reading], held_by_adapters: bool) -> Flags:
    """Read off the metrics what no metric says outright."""
    flags = _at_least_what_runs(_infer_budget(_infer_speculation(flags, readings), readings), readings)
    wanted = (
        "running_max",
        "running_when_waiting",
        "waiting_share",
        "kv_max",
        "decode_per_prefill",
        "scrapes",
        "running_last",
        "waiting_last",
        "waiting_mean",
        "deferred_mean",
    )
    found = [reading.point for name in wanted if isinstance(reading := readings[name], Number)]
    if flags.known["max_num_seqs"].certain or len(found) < len(wanted) or held_by_adapters:
        return flags
    most, usual, waiting, kv, decode, scrapes, last, queue, queued, deferred = found
    # Requests wait, the KV pool has room, and running stays at its maximum: that maximum is the cap. A slot
    # is empty for a step whenever a request finishes, hence half a slot less. Two or three of them can also
    # be what a small token budget admits; then they are held by prefill and not by decoding.
    # A wide batch that only grew has a level of its own: it is flat where it is within 1.5 % of its maximum.
    room = max(0.1 * min(most, 16), 0.015 * most)
    flat = usual > most - room if most >= 16 or (most >= 4 and decode <= 1) else usual > 0.8 * most - 0.5
    # One scrape with a queue says nothing of a level: it takes two, or the queue and the level at the end.
    held = waiting * (scrapes - 1) > 1.5 or (queue > 0 and last > most - room)
    # What is observed outweighs a default that is guessed.
    if held and queued >= deferred and waiting > 0.5 and kv < 0.9 and flat and (most >= 4 or decode > 1):
        return flags.with_flag(server_flags.inferred("max_num_seqs", most, most, most))
    return flags


def _at_least_what_runs(flags: Flags, readings: Mapping[str, Reading]) -> Flags:
    """The sequence cap is no smaller than the batch was."""
    seqs, most = flags.known["max_num_seqs"], readings["running_max"]
    if seqs.certain or not isinstance(most, Number) or most.point <= seqs.number.low:
        return flags
    return flags.with_flag(seqs.bounded(seqs.number.maximum(Number.exactly(most.point))))


def _infer_budget(flags: Flags, readings: Mapping[str, Reading]) -> Flags:
    """The least the token budget can be: it covers every running sequence, and the largest step booked.

    A step books each prompt that ends in it with its whole length. All of them but the first began in the
    same step, so the budget is at least the step less one prompt. Bucket bounds stand for the values: the
    lower one for the step (its buckets are powers of two), the upper one for the prompt.
    """
    tokens = flags.known["max_num_batched_tokens"]
    if tokens.certain or not flags.kind.budget_counts_decodes:
        return flags
    least = 1.0
    running, step, prompt = (
        readings[name] for name in ("running_max", "iteration_tokens_max", "prompt_tokens_max")
    )
    if isinstance(running, Number):
        least = max(least, running.point)
    if isinstance(step, Number) and isinstance(prompt, Number) and math.isfinite(prompt.high):
        least = max(least, step.point / 2 - prompt.point)
    return flags.with_flag(tokens.bounded(tokens.number.maximum(Number.exactly(least))))


def _infer_speculation(flags: Flags, readings: Mapping[str, Reading]) -> Flags:
    """The speculative families exist only while speculation is on."""
    known = flags.known["num_speculative_tokens"]
    if (known.certain and not known.unset) or not flags.kind.drafts_show:
        return flags
    drafted = readings["tokens_drafted_per_draft"]
    if isinstance(drafted, Number):
        tokens = float(math.ceil(round(drafted.point, 3)))
        return flags.with_flag(
            server_flags.inferred("num_speculative_tokens", tokens, drafted.point, max(tokens, 64.0))
        )
    if isinstance(drafts := readings["draft_tokens"], Number):  # a log counts the tokens alone
        each = 1.0 if drafts.point > 0 else 0.0
        return flags.with_flag(
            server_flags.inferred("num_speculative_tokens", each, each, 64.0 if each else 0.0)
        )
    if "metric" in (drafted.kind, drafts.kind):
        return flags.with_flag(server_flags.inferred("num_speculative_tokens", 0.0, 0.0, 0.0))
    return flags


def _names(groups: Sequence[Group], source: str) -> dict[Group, str]:
    """The instance, with the labels in which it differs from others of that instance."""
    names = {}
    for group in groups:
        labels = dict(group.labels)
        beside = [dict(other.labels) for other in groups if other.instance == group.instance]
        unlike = [name for name, value in labels.items() if any(other.get(name) != value for other in beside)]
        parts = [group.instance or source]
        if "model_name" in unlike:
            parts.append(group.model_name)
        parts += [f"{name} {labels[name]}" for name in unlike if name != "model_name"]
        names[group] = " ".join(parts)
    return names

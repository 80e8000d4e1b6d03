"""What alerts and dashboards are generated for: a server's metric names, its flags, the user's objectives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from doctor.diagnosis.engine_view import engine_views
from doctor.diagnosis.judged_objectives import judged_objectives
from doctor.export.compile import RuleCompiler
from doctor.metrics.promql import PromQL
from doctor.metrics.sources import Source, subquery_step
from servers import known_flags as server_flags
from servers.kinds import VLLM
from servers.logs.log_facts import LogFacts
from servers.metrics import catalog

DEFAULT_WINDOW_S = 300.0


def compiler(
    source: Source | None = None,
    flags: Mapping[str, Any] | None = None,
    slo: str | None = None,
    *,
    log: LogFacts | None = None,
    assume: Mapping[str, float] | None = None,
    window: float | None = None,
    selector: str = "",
    version: str | None = None,
) -> RuleCompiler:
    """A compiler for one kind of server.

    ``source`` (optional) is looked at for the metric names and for flags that its metrics hold; else
    ``version`` says which vLLM's names to write, by default the newest. Raises SourceError, SloError,
    ValueError.
    """
    objectives = judged_objectives(slo)
    window_ms = round((window or DEFAULT_WINDOW_S) * 1000)
    promql = PromQL(window_ms, subquery_step(window_ms), selector, slo=objectives.values)
    constants = {**objectives.values, **(assume or {})}
    if source is not None:
        observation = source.observe(None, objectives.values)
        examined = engine_views(observation, flags, objectives, log, assume or {}, None)
        seen = observation.evaluator.promql
        promql = replace(promql, available=seen.available, identity=seen.identity, bounds=seen.bounds)
        return RuleCompiler(promql, examined[0].flags, constants, objectives)
    if version is not None:
        promql = replace(
            promql,
            available=catalog.spellings(catalog.names_of(version)),
            bounds=catalog.stated_bounds(VLLM, version),
        )
    known = server_flags.resolve(flags, log, None, kind=VLLM, version=version)
    return RuleCompiler(promql, known, constants, objectives)

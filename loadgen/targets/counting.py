"""The engine in this process, without HTTP, counted step by step."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from loadgen.measure.counters import Counters, CountersError
from loadgen.measure.processor import processor
from loadgen.plan.workload import Schedule

if TYPE_CHECKING:
    from engine.step import StepOutput, StepPlan


def count(model: str, flags: Mapping[str, Any], schedule: Schedule, steps_per_second: float) -> Counters:
    """Run ``schedule`` on the engine, request i before step ``intended * steps_per_second``.

    Raises CountersError where the ``engine`` extra is missing, or for a model, flag or request that the
    engine refuses.
    """
    try:
        import torch

        from engine.config import EngineConfig
        from engine.errors import EngineUserError
        from engine.llm import LLM
        from engine.request import SamplingParams
        from engine.runner import ModelRunner
    except ImportError as error:
        raise CountersError(
            f"counting runs the bundled engine, and {error.name} is missing: pip install 'vtune-llm[engine]'"
        ) from None
    if unknown := sorted(set(flags) - {field.name for field in fields(EngineConfig)}):
        raise CountersError(f"--{unknown[0].replace('_', '-')}: the bundled engine has no such flag")
    requests = schedule.requests
    tally = _Tally()
    try:
        llm = LLM(model, **flags)
        answers = llm.generate(
            [_prompt(request.prompt_token_ids) for request in requests],
            [
                SamplingParams(max_tokens=r.max_tokens, temperature=r.temperature, ignore_eos=r.ignore_eos)
                for r in requests
            ],
            arrivals=[round(request.intended * steps_per_second) for request in requests],
            priorities=[request.priority for request in requests],
            observe=tally.observe,
        )
    except EngineUserError as error:
        raise CountersError(str(error)) from None
    digest = hashlib.sha256()
    for answer in answers:
        digest.update(repr(answer.token_ids).encode())
    stats, runner = llm.core.scheduler.stats, llm.core.runner
    assert isinstance(runner, ModelRunner)
    return Counters(
        schedule_sha256=schedule.sha256,
        steps_per_second=steps_per_second,
        flags=dict(flags),
        requests=len(requests),
        steps=tally.steps,
        scheduled_tokens=tally.scheduled_tokens,
        output_tokens=sum(len(answer.token_ids) for answer in answers),
        prefix_queries=stats.prefix_queries,
        prefix_hits=stats.prefix_hits,
        preemptions=stats.num_preemptions,
        draft_tokens=tally.draft_tokens,
        accepted_tokens=tally.accepted_tokens,
        most_running=tally.most_running,
        fewest_free_blocks=tally.fewest_free,
        num_blocks=llm.core.memory_plan.num_blocks,
        environment={
            "torch": torch.__version__,
            "capability": torch.backends.cpu.get_cpu_capability(),
            "threads": torch.get_num_threads(),
            "machine": platform.machine(),
            "cpu": processor(),  # the kernels choose their instructions by it
            "kernels": runner.kernels,
        },
        output_sha256=digest.hexdigest(),
    )


def _prompt(token_ids: tuple[int, ...] | None) -> list[int]:
    if token_ids is None:
        raise CountersError("counting needs prompts of token ids: give a workload or a trace, no dataset")
    return list(token_ids)


class _Tally:
    """Sums over the steps."""

    def __init__(self) -> None:
        self.steps = self.scheduled_tokens = self.most_running = 0
        self.draft_tokens = self.accepted_tokens = 0
        self.fewest_free = 1 << 62

    def observe(self, plan: StepPlan, output: StepOutput) -> None:
        self.steps += 1
        self.scheduled_tokens += plan.num_scheduled_tokens
        self.most_running = max(self.most_running, plan.num_running)
        self.fewest_free = min(self.fewest_free, plan.free_blocks)
        self.draft_tokens += output.num_draft_tokens
        self.accepted_tokens += output.num_accepted_tokens

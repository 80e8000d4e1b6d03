"""What the scheduler decides, step by step, with no model: what ``vtune explain`` runs.

Sampling is replaced by :func:`pretend`, so that a run depends on the config and the requests only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.baselines.two_track import TwoTrackScheduler
from engine.core import Scheduler, make_scheduler
from engine.explain.explain_input import MAX_STEPS, ExplainError, ExplainRequest, Setup
from engine.request import Request, SamplingParams
from engine.scheduling.scheduler import UnifiedScheduler
from engine.step import AdmissionStop, OneEach, ScheduledRequest, StepOutput, StepPlan, StepResult


@dataclass(frozen=True)
class StepShare:
    """What one request gets of a step's budget. Counts are in tokens, taken when the step was planned."""

    request_id: str
    num_tokens: int
    num_drafts: int
    end: int
    """How far the request is computed after the step."""
    num_known: int
    """How many tokens the request has before the step: prompt and outputs."""
    prefill: bool
    """It computes more than the one token (and drafts) of a decode step."""


@dataclass(frozen=True)
class ExplainedStep:
    """One step: the plan, each request's share of the budget, and the outcome."""

    index: int
    plan: StepPlan
    shares: tuple[StepShare, ...]
    emitted: Mapping[str, int]
    """Tokens emitted, before those after a stop are dropped."""
    output: StepOutput
    running: tuple[str, ...]
    """At the end of the step, in the scheduler's order."""

    def row(self, speculative: bool) -> dict[str, Any]:
        """The step as a JSON object."""
        plan = self.plan
        row: dict[str, Any] = {
            "step": self.index,
            "scheduled": {share.request_id: share.num_tokens for share in self.shares},
            "admitted_with_computed": plan.admitted_with_computed,
            "preempted": sorted(plan.preempted),
            "finished": sorted(request.request_id for request in self.output.finished),
            "running": list(self.running),
            "free_blocks_after_schedule": plan.free_blocks,
        }
        if speculative:
            row["drafts"] = {s.request_id: s.num_drafts for s in self.shares if s.num_drafts}
            row["emitted"] = dict(self.emitted)
        if plan.padding:
            row["padding"] = sum(plan.padding)
        if plan.swap_out or plan.swap_in:
            row["swapped_blocks"] = {"out": len(plan.swap_out), "in": len(plan.swap_in)}
        return row


def explain_steps(setup: Setup, arrivals: Sequence[ExplainRequest]) -> Iterator[ExplainedStep]:
    """Run until every request is finished. Raises ExplainError once nothing can ever happen again."""
    scheduler = make_scheduler(setup.engine, setup.num_gpu_blocks, setup.num_host_blocks)
    if isinstance(scheduler, UnifiedScheduler):
        scheduler.unhashes_preempted = False  # to show what the real one decides; nothing is computed here
    places = {arrival.request_id: place for place, arrival in enumerate(arrivals)}
    coming: dict[int, list[Request]] = {}
    for place, arrival in enumerate(arrivals):
        coming.setdefault(arrival.arrival_step, []).append(_request(arrival, place))
    index = 0
    while coming or scheduler.has_unfinished:
        if index >= MAX_STEPS:
            raise ExplainError(f"not finished after {MAX_STEPS:,} steps, which is where explain gives up")
        for request in coming.pop(index, ()):
            scheduler.add(request)
        step = _one_step(index, scheduler, places, setup.engine.num_speculative_tokens)
        yield step
        idle = not (coming or step.shares or step.plan.preempted)
        if idle and scheduler.has_unfinished:
            raise ExplainError(_stuck(step, scheduler))
        index += 1


def _one_step(
    index: int, scheduler: Scheduler, places: Mapping[str, int], num_speculative_tokens: int
) -> ExplainedStep:
    plan = scheduler.schedule()
    shares = tuple(_share(item) for item in plan.scheduled)
    result = pretend(plan, places, num_speculative_tokens)
    output = scheduler.update(plan, result)
    return ExplainedStep(
        index=index,
        plan=plan,
        shares=shares,
        emitted={request_id: len(tokens) for request_id, tokens in result.tokens.items()},
        output=output,
        running=tuple(request.request_id for request in scheduler.running),
    )


def pretend(plan: StepPlan, places: Mapping[str, int], num_speculative_tokens: int) -> StepResult:
    """A runner without a model: every token is 0, and what is accepted and proposed follows a fixed rule.

    With i the request's place in the list and o its output tokens so far: of d scheduled drafts,
    (3 o + i) mod (d + 1) are accepted; then, o counting the new tokens, (7 o + i) mod (k + 1) are proposed.
    """
    if num_speculative_tokens == 0:
        emitting = plan.rows.emitting
        return StepResult(OneEach(emitting, [0] * len(emitting)))
    tokens: dict[str, list[int]] = {}
    drafts: dict[str, list[int]] = {}
    for item in plan.scheduled:
        if not item.emits:
            continue
        request = item.request
        place, outputs = places[request.request_id], request.num_output_tokens
        emitted = 1 + (3 * outputs + place) % (len(item.drafts) + 1)
        proposed = (7 * (outputs + emitted) + place) % (num_speculative_tokens + 1)
        tokens[request.request_id] = [0] * emitted
        drafts[request.request_id] = [0] * proposed
    return StepResult(tokens, drafts)


def _request(arrival: ExplainRequest, place: int) -> Request:
    return Request(
        request_id=arrival.request_id,
        prompt_token_ids=list(arrival.prompt_token_ids),
        sampling=SamplingParams(max_tokens=arrival.output_len, ignore_eos=True),
        priority=arrival.priority,
        arrival_time=float(place),
        lora_name=arrival.lora_name,
    )


def _share(item: ScheduledRequest) -> StepShare:
    num_drafts = len(item.drafts)
    return StepShare(
        request_id=item.request.request_id,
        num_tokens=item.num_tokens,
        num_drafts=num_drafts,
        end=item.start + item.num_tokens - num_drafts,
        num_known=item.request.num_tokens,
        prefill=item.request.num_output_tokens == 0 or item.num_tokens - num_drafts > 1 or not item.emits,
    )


def _stuck(step: ExplainedStep, scheduler: Scheduler) -> str:
    """Why an empty step will be followed by empty steps only."""
    swapped = scheduler.swapped if isinstance(scheduler, TwoTrackScheduler) else ()
    head, reason = swapped[0] if swapped else scheduler.waiting.peek(), step.plan.admission_stop
    assert reason is not None
    message = (
        f"step {step.index}: nothing can ever be scheduled again. Request {head.request_id!r} waits "
        f"with {head.num_tokens} tokens, because {reason.value}"
    )
    if reason in (AdmissionStop.BLOCKS, AdmissionStop.SWAPPED):
        needed = -(-head.num_tokens // scheduler.kv.block_size)
        message += f" ({needed} needed, {step.plan.free_blocks} free): raise num_gpu_blocks"
    elif reason is AdmissionStop.PADDING:
        message += ": raise max_num_batched_tokens or lower num_speculative_tokens"
    return message

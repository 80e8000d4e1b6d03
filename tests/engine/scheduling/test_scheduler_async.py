"""Rule 13: steps planned ahead. The same tokens as without, and never one beyond a limit."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_workloads import EOS, Spec, configs, many, workloads
from scheduler_lab import ShadowKV
from tiny_llama import VOCAB, write_config

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.errors import ConfigError
from engine.request import Request, RequestStatus, SamplingParams
from engine.runner import ModelRunner
from engine.scheduling.scheduler import UnifiedScheduler
from engine.speculative_config import SpeculativeConfig
from engine.step import PLACEHOLDER_TOKEN_ID, ScheduledRequest, StepPlan, StepResult


def next_token(token_ids: Sequence[int]) -> int:
    """What the model would say: depends on the tokens before, and on nothing else."""
    state = hash(tuple(token_ids[-3:])) + len(token_ids)
    return EOS if state % 13 == 0 else state % 3 + 2


class Done:
    def __init__(self, result: StepResult) -> None:
        self._result = result

    def result(self) -> StepResult:
        return self._result


class StrictRunner:
    """Checks every plan at the moment it is started, as exact as the runner has to have it."""

    weights_bytes = kv_bytes_per_token = 1
    max_model_len = 512

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.shadow = ShadowKV(config.block_size)
        self.num_tokens = self.num_drafts = self.num_accepted = 0

    def profile_activation(self) -> int:
        return 1

    def allocate(self, num_blocks: int) -> None:
        pass

    def allocate_host(self, num_blocks: int) -> None:
        pass

    def execute(self, plan: StepPlan) -> StepResult:
        self.shadow.run(plan)
        tokens: dict[str, list[int]] = {}
        drafts: dict[str, list[int]] = {}
        for item in plan.scheduled:
            self._check(item)
            if item.emits:
                emitted = self._verify(item)
                tokens[item.request.request_id] = emitted
                drafts[item.request.request_id] = self._propose([*item.request.token_ids, *emitted])
        self.num_tokens += plan.num_scheduled_tokens
        return StepResult(tokens, drafts)

    def start(self, plan: StepPlan) -> Done:
        return Done(self.execute(plan))

    def _check(self, item: ScheduledRequest) -> None:
        request, end = item.request, item.start + item.num_tokens
        assert self.config.max_model_len is not None
        assert request.status is RequestStatus.RUNNING
        assert item.num_tokens >= 1
        assert end < self.config.max_model_len
        own_end = end - len(item.drafts)
        assert own_end == request.num_tokens if item.emits else own_end < request.num_tokens
        if item.emits:
            assert request.num_output_tokens < request.sampling.max_tokens

    def _verify(self, item: ScheduledRequest) -> list[int]:
        token_ids = list(item.request.token_ids)
        for draft in item.drafts:
            token_ids.append(next_token(token_ids))
            if draft != token_ids[-1]:
                break
        else:
            token_ids.append(next_token(token_ids))
        if PLACEHOLDER_TOKEN_ID not in item.drafts:
            self.num_drafts += len(item.drafts)
            self.num_accepted += len(token_ids) - item.request.num_tokens - 1
        return token_ids[item.request.num_tokens :]

    def _propose(self, token_ids: list[int]) -> list[int]:
        """Up to k drafts: some of them right, the last sometimes wrong."""
        count = len(token_ids) * 5 % (self.config.num_speculative_tokens + 1)
        ahead = list(token_ids)
        for _ in range(count):
            ahead.append(next_token(ahead))
        if count and len(token_ids) % 3 == 0:
            ahead[-1] += 1
        return ahead[len(token_ids) :]


class Run:
    """A workload on a core, step by step."""

    def __init__(self, flags: dict[str, Any], *, ahead: bool) -> None:
        flags = dict(flags)
        k, blocks = flags.pop("k", 0), flags.pop("num_blocks")
        speculative = SpeculativeConfig(num_speculative_tokens=k) if k else None
        config = EngineConfig(
            num_gpu_blocks_override=blocks,
            speculative_config=speculative,
            async_scheduling=ahead,
            device_memory=1 << 20,
            **flags,
        )
        self.runner = StrictRunner(config)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a budget that cannot be used up
            self.core = EngineCore(config, self.runner)
        self.tokens: dict[str, list[int]] = {}
        self.requests: dict[str, Request] = {}

    def add(self, name: str, prompt: Sequence[int], max_tokens: int, **fields: Any) -> Request:
        request = Request(name, list(prompt), SamplingParams(max_tokens=max_tokens), (EOS,), **fields)
        self.requests[name] = request
        self.tokens[name] = []
        self.core.add(request)
        return request

    def step(self) -> StepPlan:
        plan, output = self.core.step()
        self.core.scheduler.check()
        for item in output.outputs:
            self.tokens[item.request_id] += item.token_ids
        return plan

    def finish(self, limit: int = 3000) -> None:
        steps = 0
        while self.core.has_unfinished:
            self.step()
            steps += 1
            assert steps < limit, "does not end"
        assert self.core.scheduler.kv_usage == 0

    def play(self, workload: list[Spec]) -> None:
        """Arrivals and aborts come before the step they name."""
        limit = self.core.config.max_model_len
        assert limit is not None
        for index in range(31):
            for place, spec in enumerate(workload):
                if spec.arrival_step == index:
                    shared = [100 * (spec.family + 1) + offset for offset in range(spec.shared)]
                    own = [1000 * (place + 1) + offset for offset in range(spec.own)]
                    prompt = ([*shared, *own] or [7])[: limit - 1]
                    at = float(place)
                    self.add(f"r{place}", prompt, spec.max_tokens, priority=spec.priority, arrival_time=at)
                if spec.abort_step == index:
                    self.core.abort([f"r{place}"])
            self.step()
        self.finish()


@settings(many, max_examples=150)
@given(config=configs(), workload=workloads)
def test_the_tokens_are_those_of_synchronous_scheduling(config: dict[str, Any], workload: list[Spec]) -> None:
    """An aborted request has a beginning of them, as it is cut at another moment."""
    runs = Run(config, ahead=False), Run(config, ahead=True)
    for run in runs:
        run.play(workload)
    for name, tokens in runs[0].tokens.items():
        ahead = runs[1].tokens[name]
        if runs[0].requests[name].status is runs[1].requests[name].status:
            shorter = min(len(tokens), len(ahead))
            assert tokens[:shorter] == ahead[:shorter]
        if runs[1].requests[name].status is not RequestStatus.FINISHED_ABORTED:
            assert ahead == runs[1].requests[name].output_token_ids
            assert tokens == ahead[: len(tokens)]


@settings(many, max_examples=50)
@given(config=configs(), workload=workloads, roomy=st.just({"num_blocks": 400, "k": 0}))
def test_without_drafts_or_preemption_no_token_is_computed_that_would_not_be_otherwise(
    config: dict[str, Any], workload: list[Spec], roomy: dict[str, Any]
) -> None:
    quiet = [replace(spec, abort_step=None) for spec in workload]
    flags = {**config, **roomy, "enable_prefix_caching": False}
    runs = Run(flags, ahead=False), Run(flags, ahead=True)
    for run in runs:
        run.play(quiet)
    assert runs[0].tokens == runs[1].tokens
    assert runs[0].runner.num_tokens == runs[1].runner.num_tokens


FLAGS: dict[str, Any] = {
    "block_size": 4,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "max_model_len": 64,
    "num_blocks": 60,
}


def test_a_step_is_planned_while_the_one_before_it_computes() -> None:
    run = Run(FLAGS, ahead=True)
    events = []
    scheduler, runner = run.core.scheduler, run.runner
    schedule, start = scheduler.schedule, runner.start

    class Watched(Done):
        def result(self) -> StepResult:
            events.append("result")
            return super().result()

    def watched_schedule() -> StepPlan:
        events.append("schedule")
        return schedule()

    def watched_start(plan: StepPlan) -> Done:
        events.append("start")
        return Watched(start(plan).result())

    scheduler.schedule, runner.start = watched_schedule, watched_start  # type: ignore[method-assign]
    run.add("a", [5] * 4, 8)
    run.step()
    run.step()
    assert events == ["schedule", "start", *["schedule", "result", "start"] * 2]


def test_nothing_is_planned_for_what_ends_with_the_step_in_flight() -> None:
    run = Run(FLAGS, ahead=True)
    scheduler = run.core.scheduler
    run.add("a", [5] * 4, 1)
    plan = scheduler.schedule()
    assert not scheduler.schedule().scheduled
    assert plan.num_scheduled_tokens == 4


def test_max_model_len_is_not_planned_past() -> None:
    run = Run({**FLAGS, "max_model_len": 8, "max_num_batched_tokens": 8}, ahead=True)
    run.add("a", [5] * 7, 9)
    scheduler = run.core.scheduler
    assert scheduler.schedule().num_scheduled_tokens == 7
    assert not scheduler.schedule().scheduled  # its 8th token is its last


def test_a_stop_that_was_not_foreseen_leaves_the_plan() -> None:
    run = Run(FLAGS, ahead=True)
    scheduler = run.core.scheduler
    assert isinstance(scheduler, UnifiedScheduler)
    a, b = run.add("a", [5] * 4, 9), run.add("b", [6] * 4, 9)
    plan = scheduler.schedule()
    ahead = scheduler.schedule()
    assert [item.num_tokens for item in ahead.scheduled] == [1, 1]
    scheduler.update(plan, StepResult({"a": [EOS], "b": [7]}))
    assert a.status is RequestStatus.FINISHED_STOPPED
    reconciled = scheduler.reconcile(ahead)
    assert [(item.request, item.start) for item in reconciled.scheduled] == [(b, 4)]
    scheduler.check()


def test_output_in_flight_of_a_victim_is_stale() -> None:
    run = Run({**FLAGS, "num_blocks": 4, "max_model_len": 12, "enable_prefix_caching": False}, ahead=True)
    scheduler = run.core.scheduler
    run.add("a", [5] * 4, 6)
    b = run.add("b", [6] * 7, 6)
    plan = scheduler.schedule()
    ahead = scheduler.schedule()  # a needs a second block: b goes
    assert ahead.preempted == ("b",)
    output = scheduler.update(plan, StepResult({"a": [3], "b": [4]}))
    assert [item.request_id for item in output.outputs] == ["a"]
    assert b.output_token_ids == []
    assert (b.num_placeholders, b.num_computed_tokens) == (0, 0)


def test_room_is_kept_for_drafts_and_given_back_where_fewer_come() -> None:
    run = Run({**FLAGS, "k": 3}, ahead=True)
    scheduler = run.core.scheduler
    assert isinstance(scheduler, UnifiedScheduler)
    a = run.add("a", [5] * 4, 20)
    plan = scheduler.schedule()
    ahead = scheduler.schedule()
    assert ahead.scheduled[0].drafts == (PLACEHOLDER_TOKEN_ID,) * 3
    scheduler.update(plan, StepResult({"a": [7]}, {"a": [8, 9]}))
    reconciled = scheduler.reconcile(ahead)
    assert reconciled.scheduled[0] == ScheduledRequest(a, 4, 3, (8, 9))
    beyond = scheduler.schedule()  # 4 + 3 computed if both drafts hold, then one token and three drafts
    assert (beyond.scheduled[0].start, beyond.scheduled[0].num_tokens) == (7, 4)
    scheduler.update(reconciled, StepResult({"a": [8, 6]}, {"a": [1, 2, 3]}))  # the second does not
    assert scheduler.reconcile(beyond).scheduled[0] == ScheduledRequest(a, 6, 4, (1, 2, 3))


def test_speculation_accepts_as_much_as_without() -> None:
    flags = {**FLAGS, "k": 3, "num_blocks": 200}
    workload = [Spec(place, 0, 3, 4, 24, 0, None) for place in range(6)]
    runs = Run(flags, ahead=False), Run(flags, ahead=True)
    for run in runs:
        run.play(workload)
    assert runs[0].runner.num_accepted == runs[1].runner.num_accepted > 0


def test_requests_that_arrive_while_the_engine_idles_are_not_lost() -> None:
    run = Run(FLAGS, ahead=True)
    for name in "ab":
        run.add(name, [5] * 4, 3)
        run.finish()
        assert run.requests[name].status.finished
    run.add("c", [5] * 4, 9)
    run.step()
    run.core.abort(["c"])
    assert run.core.has_unfinished  # a step is in flight
    run.finish()


# ------------------------------------------------------- on the real runner


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("dummy"))


def generate(model: Path, ahead: bool, samplings: Sequence[SamplingParams], **flags: Any) -> list[list[int]]:
    """Outputs of one request for each sampling, two of which are aborted on their way."""
    config = EngineConfig(
        model=str(model),
        load_format="dummy",
        async_scheduling=ahead,
        max_model_len=96,
        **{"num_gpu_blocks_override": 40, "max_num_batched_tokens": 48, "max_num_seqs": 8, **flags},
    )
    core = EngineCore(config, ModelRunner(config))
    tokens: dict[str, list[int]] = {}
    for place, sampling in enumerate(samplings):
        prompt = [(place * 7 + offset * offset) % 11 + 3 for offset in range(9 + 5 * place)]
        core.add(Request(f"r{place}", prompt, sampling, (2,), arrival_time=float(place)))
        tokens[f"r{place}"] = []
    step = 0
    while core.has_unfinished:
        _, output = core.step()
        core.scheduler.check()
        for item in output.outputs:
            tokens[item.request_id] += item.token_ids
        step += 1
        if step == 12:
            core.abort(["r1"])
    del tokens["r1"]
    return list(tokens.values())


SAMPLINGS = [
    SamplingParams(max_tokens=40, temperature=0.0),
    SamplingParams(max_tokens=40, temperature=0.0),
    SamplingParams(max_tokens=40, temperature=1.0, seed=3),
    SamplingParams(max_tokens=30, temperature=0.9, seed=4, top_p=0.9, repetition_penalty=1.2),
    SamplingParams(max_tokens=40, temperature=0.8, seed=5, frequency_penalty=0.5, min_tokens=10),
    SamplingParams(max_tokens=20, temperature=0.0, stop_token_ids=tuple(range(40, VOCAB, 7))),
]


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"num_gpu_blocks_override": 8, "scheduling_policy": "fcfs"},
        {"num_gpu_blocks_override": 8, "scheduling_policy": "priority"},
        {"speculative_config": SpeculativeConfig(num_speculative_tokens=3, prompt_lookup_min=1)},
        {"speculative_config": SpeculativeConfig(method="suffix"), "num_gpu_blocks_override": 8},
        {"speculative_config": SpeculativeConfig(num_speculative_tokens=3, disable_by_batch_size=3)},
    ],
    ids=["plain", "preemption", "priority", "n-gram", "suffix and preemption", "off at peak"],
)
def test_the_model_says_the_same(model: Path, flags: dict[str, Any]) -> None:
    outputs = [generate(model, ahead, SAMPLINGS, **flags) for ahead in (False, True)]
    assert outputs[0] == outputs[1]
    assert all(outputs[0])


def test_the_model_says_the_same_with_a_draft_model(model: Path, tmp_path: Path) -> None:
    draft = write_config(tmp_path / "draft", hidden_size=32, num_hidden_layers=1)
    speculative = SpeculativeConfig(method="draft_model", model=str(draft), num_speculative_tokens=3)
    outputs = [generate(model, ahead, SAMPLINGS, speculative_config=speculative) for ahead in (False, True)]
    assert outputs[0] == outputs[1]


def test_a_fault_in_the_runner_is_raised(model: Path) -> None:
    run = Run(FLAGS, ahead=True)

    class Broken:
        def result(self) -> StepResult:
            raise RuntimeError("out of luck")

    run.runner.start = lambda plan: Broken()  # type: ignore[assignment, method-assign, return-value]
    run.add("a", [5] * 4, 3)
    with pytest.raises(RuntimeError, match="out of luck"):
        run.step()


def test_the_baseline_schedulers_refuse_it() -> None:
    config = EngineConfig(async_scheduling=True, scheduler="static", max_model_len=64)
    with pytest.raises(ConfigError, match=r"--async-scheduling True: .*static"):
        config.validate()

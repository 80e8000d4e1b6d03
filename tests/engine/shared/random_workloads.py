"""Random configs and workloads for property tests, and a lab that runs one of them step by step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from scheduler_lab import Lab

from engine.request import Request, SamplingParams
from engine.step import StepPlan

EOS = 1
many = settings(
    max_examples=1500,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)


@dataclass(frozen=True)
class Spec:
    """One request: a prompt that shares ``shared`` tokens with a family, when it arrives, when it goes."""

    arrival_step: int
    family: int
    shared: int
    own: int
    max_tokens: int
    priority: int
    abort_step: int | None
    lora_name: str = ""


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    """A config that a server would start with, whose pool holds one full-length request, or a few."""
    block_size = draw(st.sampled_from([1, 2, 4, 8]))
    max_model_len = draw(st.integers(8, 40))
    chunked = draw(st.booleans())
    k = draw(st.sampled_from([0, 1, 3, 5]))
    seqs = draw(st.integers(1, 6))
    least = max(seqs, 1 + k) if chunked else max(seqs, 1 + k, max_model_len)
    enough = -(-max_model_len // block_size) + 1
    return {
        "block_size": block_size,
        "max_model_len": max_model_len,
        "max_num_seqs": seqs,
        "max_num_batched_tokens": draw(st.integers(least, least + 24)),
        "enable_chunked_prefill": chunked,
        "enable_prefix_caching": draw(st.sampled_from([True, True, False])),
        "scheduling_policy": draw(st.sampled_from(["fcfs", "priority"])),
        "long_prefill_token_threshold": draw(st.sampled_from([0, 0, 1, 3, 7])),
        "num_blocks": enough + draw(st.integers(0, enough // 2)),
        "k": k,
        "enable_lora": True,
        "max_loras": draw(st.integers(1, 3)),
    }


specs = st.builds(
    Spec,
    arrival_step=st.integers(0, 8),
    family=st.integers(0, 1),
    shared=st.one_of(st.sampled_from([9, 17]), st.integers(0, 30)),
    own=st.one_of(st.just(0), st.integers(0, 12)),
    max_tokens=st.integers(1, 24),
    priority=st.integers(-1, 1),
    abort_step=st.one_of(st.none(), st.none(), st.integers(0, 30)),
    lora_name=st.sampled_from(["", "", "", "a", "b", "c"]),
)
workloads = st.lists(specs, min_size=1, max_size=10)


class Run:
    """A workload on a lab, step by step."""

    def __init__(self, config: dict[str, Any], workload: list[Spec], emits_eos: bool = False) -> None:
        self.lab = Lab(**config, emit=self.emit, propose=self.propose)
        self.emits_eos = emits_eos
        self.workload = workload
        self.requests: dict[str, Request] = {}
        self.index = 0

    def emit(self, request: Request, drafts: Sequence[int]) -> list[int]:
        """Some drafts accepted, and tokens that are often the same in different requests."""
        state = request.num_tokens * 7 + request.num_prompt_tokens
        return [*drafts[: state % (len(drafts) + 1)], self._token(state)]

    def propose(self, request: Request, emitted: Sequence[int]) -> list[int]:
        state = request.num_tokens * 5 + len(emitted)
        count = state % (self.lab.config.num_speculative_tokens + 1)
        return [self._token(state + place) for place in range(count)]

    def _token(self, state: int) -> int:
        return EOS if self.emits_eos and state % 11 == 0 else state % 3 + 2

    def arrive(self) -> None:
        limit = self.lab.config.max_model_len
        assert limit is not None
        for place, spec in enumerate(self.workload):
            if spec.arrival_step == self.index:
                shared = [100 * (spec.family + 1) + offset for offset in range(spec.shared)]
                prompt = [*shared, *(1000 * (place + 1) + offset for offset in range(spec.own))] or [7]
                sampling = SamplingParams(max_tokens=spec.max_tokens)
                self.requests[f"r{place}"] = self.lab.add(
                    f"r{place}",
                    prompt[: limit - 1],
                    sampling=sampling,
                    priority=spec.priority,
                    eos_token_ids=(EOS,),
                    lora_name=spec.lora_name,
                )

    def abort(self) -> None:
        names = [f"r{place}" for place, spec in enumerate(self.workload) if spec.abort_step == self.index]
        self.lab.scheduler.abort(names)

    def step(self) -> StepPlan:
        """One step. Aborts come before it at even steps, and while its result is in flight at odd ones."""
        self.arrive()
        if self.index % 2 == 0:
            self.abort()
        plan = self.lab.schedule()
        result = self.lab.execute(plan)
        if self.index % 2 == 1:
            self.abort()
        self.lab.update(plan, result)
        self.index += 1
        return plan

    @property
    def done(self) -> bool:
        coming = any(spec.arrival_step >= self.index for spec in self.workload)
        return not coming and not self.lab.scheduler.has_unfinished


def without_aborts(workload: list[Spec]) -> list[Spec]:
    return [replace(spec, abort_step=None) for spec in workload]

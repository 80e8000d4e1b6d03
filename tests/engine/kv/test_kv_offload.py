"""Rule 12: KV that is loaded while others run, from host memory or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_workloads import Run, Spec, configs, many, without_aborts, workloads
from scheduler_lab import Lab, shares
from tiny_llama import write_config

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.errors import ConfigError
from engine.kernels.host import HostBlocks
from engine.kv.kv_offload import HostOffload
from engine.kv.kv_transfer import KVConnectorWorker, KVLoad
from engine.request import Request, RequestStatus, SamplingParams
from engine.runner import ModelRunner
from engine.scheduling.scheduler import UnifiedScheduler
from engine.step import AdmissionStop, StepPlan

PROMPT = list(range(100, 113))  # three full blocks of 4, and one token


class OffloadLab(Lab):
    """A lab with host blocks. Loads end when the test says so; the shadow KV is moved as the KV would be."""

    def __init__(self, num_host_blocks: int = 50, **flags: Any) -> None:
        super().__init__(**flags)
        self.scheduler = UnifiedScheduler(self.config, self.pool.num_blocks, num_host_blocks)
        self.pool = self.scheduler.kv.pool
        self.host: dict[int, dict[int, int]] = {}
        self.loads: list[KVLoad] = []

    @property
    def connector(self) -> HostOffload:
        assert isinstance(self.scheduler.loading.connector, HostOffload)
        return self.scheduler.loading.connector

    def schedule(self) -> StepPlan:
        plan = super().schedule()
        self.connector.check()
        size = self.config.block_size
        if plan.transfers is not None:
            for block, host_block in plan.transfers.stores:
                slots = range(block * size, (block + 1) * size)
                self.host[host_block] = {slot % size: self.shadow.slots[slot] for slot in slots}
            self.loads += plan.transfers.loads
        return plan

    def finish(self, limit: int = 5000) -> list[StepPlan]:
        """Steps, each of which lands what was under way, until no request is left."""
        plans = []
        while self.scheduler.has_unfinished:
            plans.append(self.schedule())
            self.update(plans[-1])
            self.land()
            assert len(plans) < limit
        self.assert_all_free()
        return plans

    def land(self, failed: bool = False) -> None:
        """All loads end."""
        size = self.config.block_size
        for load in self.loads:
            for host_block, block in () if failed else load.pairs:
                for offset, held in self.host[host_block].items():
                    self.shadow.slots[block * size + offset] = held
            load.finish(failed)
        self.loads.clear()


def evicted(**flags: Any) -> OffloadLab:
    """The three blocks of PROMPT are in host memory only."""
    lab = OffloadLab(**{"num_blocks": 9, **flags})
    lab.add("first", PROMPT, max_tokens=1)
    lab.finish()
    lab.add("other", 30, max_tokens=1)
    lab.finish()
    return lab


def test_a_hit_in_host_memory_is_loaded_while_others_run() -> None:
    lab = evicted()
    a = lab.add("a", PROMPT)
    lab.add("b", 5)
    plan = lab.schedule()
    assert shares(plan) == {"b": 5}  # n = 0, nothing of the budget
    assert a.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    assert len(a.block_ids) == 3
    assert plan.admission_stop is AdmissionStop.GATE
    lab.update(plan)
    assert lab.step() == {"b": 1}
    lab.land()
    plan = lab.schedule()
    assert shares(plan) == {"b": 1, "a": 1}
    assert plan.admitted_with_computed == {"a": 12}
    lab.update(plan)  # the shadow KV is read, and is what it should be
    assert (lab.scheduler.stats.external_queries, lab.scheduler.stats.external_hits) == (13 + 30 + 13 + 5, 12)
    lab.finish()


def test_what_has_arrived_is_cached() -> None:
    lab = evicted()
    lab.add("a", PROMPT)
    lab.step()
    lab.add("same", [*PROMPT, 5])
    assert lab.step() == {}  # not there yet for another request either: it loads them too
    lab.land()
    assert lab.step() == {"a": 1, "same": 2}


def test_a_full_hit_leaves_the_last_token_to_compute() -> None:
    lab = evicted()
    lab.add("a", PROMPT[:12])
    lab.step()
    lab.land()
    plan = lab.schedule()
    assert plan.admitted_with_computed == {"a": 11}
    assert shares(plan) == {"a": 1}
    lab.update(plan)
    lab.finish()


def test_a_failed_load_falls_back_to_computing() -> None:
    lab = evicted()
    a = lab.add("a", PROMPT)
    lab.step()
    lab.land(failed=True)
    plan = lab.schedule()
    assert plan.admitted_with_computed == {"a": 0}
    assert shares(plan) == {"a": 13}
    lab.update(plan)
    assert a.num_external_tokens == 0
    lab.finish()


def test_blocks_of_an_aborted_load_are_free_only_when_it_has_ended() -> None:
    lab = evicted()
    lab.add("a", PROMPT)
    lab.step()
    lab.scheduler.abort(["a"])
    lab.scheduler.check()
    assert lab.pool.num_free == 5
    assert not lab.scheduler.reset_prefix_cache()
    lab.land()
    assert lab.scheduler.reset_prefix_cache(reset_connector=True)
    lab.assert_all_free()
    lab.add("b", PROMPT)
    assert lab.step() == {"b": 13}  # nothing is left to be hit, anywhere


def test_a_waiting_request_gives_its_blocks_back_before_any_is_preempted() -> None:
    lab = evicted(max_num_seqs=2)
    running = lab.add("running", 15, max_tokens=12)
    a = lab.add("a", PROMPT, max_tokens=2)
    lab.step()
    lab.land()
    lab.add("late", 1, max_tokens=1)
    lab.finish()
    assert running.num_preemptions == 0
    assert a.num_output_tokens == 2


def test_the_least_recently_used_host_block_goes_first() -> None:
    lab = evicted(num_host_blocks=3)
    held = lab.connector.get_num_new_matched_tokens(Request("x", PROMPT, SamplingParams()), 0)
    lab.add("more", 30, max_tokens=1)
    lab.finish()
    after = lab.connector.get_num_new_matched_tokens(Request("y", PROMPT, SamplingParams()), 0)
    assert (held, after) == (12, 0)


class OffloadRun(Run):
    """A random workload on a lab with host memory; loads end, or fail, some steps later."""

    def __init__(self, config: dict[str, Any], workload: list[Spec], host: int, fails: bool) -> None:
        super().__init__(config, workload)
        self.lab = OffloadLab(host, **config, emit=self.emit, propose=self.propose)
        self.fails = fails

    def step(self) -> StepPlan:
        plan = super().step()
        assert isinstance(self.lab, OffloadLab)
        if self.index % 3 == 0:
            self.lab.land(failed=self.fails and self.index % 2 == 0)
        return plan


@settings(many, max_examples=40)
@given(config=configs(), workload=workloads, host=st.integers(1, 30), fails=st.booleans())
def test_invariants_hold_with_host_memory(
    config: dict[str, Any], workload: list[Spec], host: int, fails: bool
) -> None:
    """Every read of the KV is checked, no request starves, everything is free at the end."""
    run = OffloadRun({**config, "enable_prefix_caching": True}, without_aborts(workload), host, fails)
    for _ in range(3000):
        if run.done:
            break
        run.step()
    assert run.done
    run.lab.assert_all_free()
    for request in run.requests.values():
        assert request.status is RequestStatus.FINISHED_LENGTH


@settings(many, max_examples=20)
@given(config=configs(), workload=workloads, host=st.integers(1, 30))
def test_aborts_leave_nothing_behind(config: dict[str, Any], workload: list[Spec], host: int) -> None:
    run = OffloadRun({**config, "enable_prefix_caching": True}, workload, host, fails=True)
    for _ in range(3000):
        if run.done:
            break
        run.step()
    assert isinstance(run.lab, OffloadLab)
    run.lab.land()
    assert run.lab.scheduler.reset_prefix_cache(reset_connector=True)
    run.lab.assert_all_free()


# ------------------------------------------------------- on the real runner


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("dummy"))


def generate(model: Path, **flags: Any) -> tuple[list[list[int]], EngineCore]:
    """Rounds of the same long prompts in a pool that holds few of them."""
    config = EngineConfig(
        model=str(model),
        load_format="dummy",
        max_model_len=96,
        num_gpu_blocks_override=12,
        max_num_batched_tokens=64,
        max_num_seqs=2,
        **flags,
    )
    core = EngineCore(config, ModelRunner(config))
    outputs = []
    for turn in range(2):
        for place in range(4):
            prompt = [(place * 7 + offset * (place + 1)) % 90 + 3 for offset in range(70)]
            request = Request(f"{turn}-{place}", prompt, SamplingParams(max_tokens=8, temperature=0.0))
            core.add(request)
            while core.has_unfinished:
                core.step()
                core.scheduler.check()
            outputs.append(request.output_token_ids)
    return outputs, core


@pytest.mark.parametrize("ahead", [False, True])
def test_the_model_says_the_same_from_reloaded_blocks(model: Path, ahead: bool) -> None:
    expected, _ = generate(model, enable_prefix_caching=False)
    outputs, core = generate(model, kv_offloading_size=0.01, async_scheduling=ahead)
    assert outputs == expected
    stats = core.scheduler.stats
    assert stats.external_hits >= 4 * 48


def test_a_load_that_fails_in_its_thread_is_computed(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    swap = HostBlocks.swap

    def broken(self: HostBlocks, out: Any, back: Any) -> None:
        if back:
            raise RuntimeError("the bus is down")
        swap(self, out, back)

    monkeypatch.setattr(HostBlocks, "swap", broken)
    expected, _ = generate(model, enable_prefix_caching=False)
    outputs, core = generate(model, kv_offloading_size=0.01)
    assert outputs == expected
    assert core.scheduler.stats.external_hits == 0


def test_the_worker_stores_before_it_loads() -> None:
    calls = []

    class Blocks:
        def swap(self, out: Any, back: Any) -> None:
            calls.append((tuple(out), tuple(back)))

    lab = evicted()
    lab.add("a", PROMPT)
    plan = lab.schedule()
    assert plan.transfers is not None
    worker = KVConnectorWorker(Blocks())
    worker.start(plan.transfers)
    worker._thread.shutdown()
    assert calls == [(plan.transfers.stores, ()), ((), tuple(plan.transfers.loads[0].pairs))]
    assert plan.transfers.loads[0].ready()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"kv_offloading_size": 0.0}, "--kv-offloading-size 0.0: must be GiB"),
        ({"kv_offloading_size": 1.0, "enable_prefix_caching": False}, "--kv-offloading-size 1.0: .*prefix"),
        ({"kv_offloading_size": 1.0, "scheduler": "static"}, "--kv-offloading-size 1.0: .*static"),
        ({"kv_offloading_backend": "lmcache"}, "--kv-offloading-backend lmcache: must be native"),
    ],
)
def test_config_rules(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(max_model_len=2048, **flags).validate()

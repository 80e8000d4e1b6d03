"""Fast decode: it equals stepping singly, with adds and aborts in between; and it is used."""

from __future__ import annotations

import random
from typing import Any

import pytest

import engine.sim.server
from engine.config import EngineConfig
from engine.core import make_scheduler
from engine.request import Request, SamplingParams
from engine.sim.fast_decode import FastDecodeScheduler
from engine.sim.server import SimulatedServer, Simulation
from engine.sim.simulated_runner import ModelSize, SimulatedRunner, TimedRequest
from engine.sim.step_times import StepTimes
from engine.step import OneEach, StepResult

TIMES = StepTimes(
    host=0.003, host_per_sequence=1e-4, launch=0.002, weights=0.01, per_token=3e-4, per_row=7e-6,
    per_context=1.1e-6, per_pair=1.3e-7, spread=((0.018, (0.9, 1.0, 1.4)), (0.03, (0.95, 1.1))),
)  # fmt: skip
SIZE = ModelSize(weights_bytes=0, kv_bytes_per_token=1, max_model_len=96)
FLAGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no prefix caching": {"enable_prefix_caching": False},
    "blocks of one": {"block_size": 1, "num_gpu_blocks_override": 400},
    "little memory": {"num_gpu_blocks_override": 40},
    "little memory, priority": {"num_gpu_blocks_override": 40, "scheduling_policy": "priority"},
    "few places": {"max_num_seqs": 3},
    "small budget": {"max_num_batched_tokens": 9},
    "threshold": {"long_prefill_token_threshold": 5},
    "partial prefills": {"max_num_partial_prefills": 2, "long_prefill_token_threshold": 8},
    "async": {"async_scheduling": True},
    "speculation": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
}


class Bed:
    """A server under random requests and hang-ups. Equal seeds do the same to any."""

    def __init__(self, seed: int, flags: dict[str, Any]) -> None:
        defaults = {"block_size": 4, "max_num_seqs": 9, "max_num_batched_tokens": 40, "max_model_len": 96}
        defaults["num_gpu_blocks_override"] = 160
        flags = {**defaults, **flags}
        self.server = SimulatedServer(Simulation(engine.sim.server._config(flags), SIZE, TIMES))
        self.scheduler: Any = self.server.core.scheduler
        self.chance = random.Random(seed)
        self.requests: dict[str, Request] = {}
        self.fast = self.stepped = 0

    def live(self, events: int) -> list[dict[str, Any]]:
        """What is to be seen after each of so many events, and when all is over."""
        seen, moment = [], 0.0
        for number in range(events):
            moment += self.chance.expovariate(1.0) * self.chance.choice((0.02, 0.5))
            self.pass_until(moment)
            if self.chance.random() < 0.2 and self.requests:
                self.server.abort(self.chance.choice(list(self.requests)))
            else:
                self.arrive(number, moment)
            seen.append(self.seen())
        self.pass_until(float("inf"))
        return [*seen, self.seen(), {"scrapes": self.server.scrapes}]

    def arrive(self, number: int, moment: float) -> None:
        chance = self.chance
        shared = [100 * chance.randint(1, 2) + place for place in range(chance.randint(0, 20))]
        own = [1000 * (number + 1) + place for place in range(chance.randint(1, 20))]
        prompt = [*shared, *own]
        output = chance.choice((1, 2, chance.randint(3, 50)))
        sampling = SamplingParams(max_tokens=output, ignore_eos=True)
        self.server.add(TimedRequest(f"r{number}", moment, prompt, sampling, priority=chance.randint(0, 2)))
        self.requests |= self.scheduler._requests

    def pass_until(self, moment: float) -> None:
        while self.server.busy and self.server.now < moment:
            if ends := self.server.run_fast_decodes(moment):
                self.fast += len(ends)
            else:
                self.server.step()
                self.stepped += 1

    def seen(self) -> dict[str, Any]:
        scheduler, runner = self.scheduler, self.server.core.runner
        assert isinstance(runner, SimulatedRunner)
        scheduler.check()
        pool = scheduler.kv.pool
        return {
            "now": self.server.now,
            "device": runner.device_seconds,
            "steps": scheduler._num_steps,
            "running": [r.request_id for r in scheduler.running],
            "waiting": [r.request_id for r in scheduler.waiting],
            "free": pool.free_list(),
            "hashes": list(pool._hashes),
            "stats": vars(scheduler.stats).copy(),
            "scrapes": len(self.server.scrapes),
            "metrics": self.server.scrape(),
            "finished": dict(self.server.finished),
            "requests": {
                name: (
                    r.status,
                    r.num_computed_tokens,
                    len(r.token_ids),
                    list(r.block_ids),
                    r.num_preemptions,
                )
                for name, r in self.requests.items()
            },
        }


@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
def test_it_is_the_same_as_stepping_singly(flags: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(3):
        fast = Bed(seed, flags)
        with monkeypatch.context() as patch:
            patch.setattr(engine.sim.server, "_make_scheduler", make_scheduler)
            plain = Bed(seed, flags)
        assert not isinstance(plain.scheduler, FastDecodeScheduler)
        assert fast.live(50) == plain.live(50), seed
        assert plain.fast == 0
        assert bool(fast.fast) == isinstance(fast.scheduler, FastDecodeScheduler)


def test_it_is_taken_through_blocks_and_beside_prefills_and_ends() -> None:
    bed = Bed(0, {})
    sampling = SamplingParams(max_tokens=60, ignore_eos=True)
    for number in range(4):
        bed.server.add(TimedRequest(f"r{number}", 0.0, [1000 * number + 7] * 9, sampling))
    bed.pass_until(float("inf"))
    assert (bed.stepped, bed.fast) == (2, 58)
    scheduler = bed.scheduler
    assert isinstance(scheduler, FastDecodeScheduler)
    bed.server.add(TimedRequest("a", bed.server.now, [1] * 9, sampling))
    bed.server.step()
    bed.server.add(TimedRequest("b", bed.server.now, [2] * 80, SamplingParams(max_tokens=2, ignore_eos=True)))
    bed.server.step()
    assert len(scheduler.cohort) == 1
    assert [r.request_id for r in scheduler.running] == ["a", "b"]


def test_a_request_that_any_token_may_stop_is_not_in_fast_decode() -> None:
    config = EngineConfig(max_model_len=96, block_size=4, num_gpu_blocks_override=100)
    scheduler = FastDecodeScheduler(config.resolved(96), 100, token=0)
    for name, stops in (("plain", ()), ("stops", (0,)), ("behind", ())):
        sampling = SamplingParams(max_tokens=9, stop_token_ids=stops, min_tokens=5)
        scheduler.add(Request(name, [5] * 6, sampling))
    plan = scheduler.schedule()
    scheduler.update(plan, StepResult(OneEach(plan.rows.emitting, [0, 0, 0])))
    assert scheduler.cohort.joined == ["plain"]
    assert scheduler.plan_fast_decodes() is None

"""The engine process seen from its handle: output, refusals, failures, ends."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from serving_kit import make_model, process_alive

from engine.config import EngineConfig
from engine.request import Request, RequestStatus, SamplingParams
from engine.server.process import EngineDeadError, EngineInfo, EngineProcess, EngineStartError, Stepped


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


def config(model: Path, **flags: Any) -> EngineConfig:
    return EngineConfig(
        model=str(model), load_format="dummy", device_memory=256 << 20, max_num_batched_tokens=256, **flags
    )


@asynccontextmanager
async def started(config: EngineConfig) -> AsyncIterator[tuple[EngineProcess, EngineInfo]]:
    process = EngineProcess(config)
    try:
        yield process, await process.ready()
    finally:
        process.close()
        assert not process_alive(process.pid)


def request(name: str, length: int = 5, max_tokens: int = 4) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return Request(name, list(range(1, length + 1)), sampling)


async def until(process: EngineProcess, *names: str) -> dict[str, Stepped]:
    """The step in which each of ``names`` finished."""
    finished: dict[str, Stepped] = {}
    async for step in process.steps():
        finished |= {item.request_id: step for item in step.outputs if item.finish is not None}
        if set(names) <= set(finished):
            break
    return finished


def test_a_request_that_the_scheduler_refuses_fails_alone(model: Path) -> None:
    async def check() -> None:
        async with started(config(model)) as (process, info):
            assert info.config.max_model_len == 2048
            assert info.kv_tokens == (info.num_blocks - 1) * 16
            process.submit([request("good"), request("too long", length=3000)])
            finished = await until(process, "good", "too long")
            ends = {
                name: next(item.finish for item in step.outputs if item.request_id == name)
                for name, step in finished.items()
            }
            assert ends == {
                "good": RequestStatus.FINISHED_LENGTH,
                "too long": RequestStatus.FINISHED_ERROR,
            }

    asyncio.run(check())


def test_an_abort_reports_gauges_though_no_step_follows(model: Path) -> None:
    async def check() -> None:
        async with started(config(model)) as (process, _):
            process.submit([request("a", max_tokens=2000)])
            async for step in process.steps():
                if step.outputs and step.stats.num_running == 1:
                    process.abort(["a"])
                if step.stats.num_running == 0:
                    assert step.stats.kv_usage == 0
                    break

    asyncio.run(check())


def test_after_a_kill_it_is_dead_and_says_how(model: Path) -> None:
    async def check() -> None:
        async with started(config(model)) as (process, _):
            os.kill(process.pid, signal.SIGKILL)
            assert [step async for step in process.steps()] == []
            assert not process.alive
            assert process.exit_reason() == "killed by SIGKILL"
            with pytest.raises(EngineDeadError):
                process.submit([request("a")])

    asyncio.run(check())


def test_a_config_that_does_not_fit_is_the_users_to_mend(model: Path) -> None:
    async def check() -> None:
        async with started(config(model, num_gpu_blocks_override=5)):
            pass

    with pytest.raises(EngineStartError, match="--num-gpu-blocks-override 5") as caught:
        asyncio.run(check())
    assert caught.value.expected


def test_too_little_memory_is_the_users_to_mend(model: Path) -> None:
    async def check() -> None:
        async with started(replace(config(model), max_num_batched_tokens=(1 << 31) - 1)):
            pass

    with pytest.raises(EngineStartError, match=r"not enough memory .* Lower --device-memory") as caught:
        asyncio.run(check())
    assert caught.value.expected


def test_a_death_during_the_start_is_reported(model: Path) -> None:
    async def check() -> None:
        process = EngineProcess(config(model))
        os.kill(process.pid, signal.SIGKILL)
        try:
            await process.ready()
        finally:
            process.close()

    with pytest.raises(EngineStartError, match="died while starting") as caught:
        asyncio.run(check())
    assert not caught.value.expected


def test_nothing_interrupts_the_end_of_an_engine_whose_parent_has_gone() -> None:
    """Its reader sends SIGUSR1 when it finds the parent gone, while the interpreter may be ending already."""
    code = (
        "import signal, socket, engine.server.process as process\n"
        "def gone(*_): raise BrokenPipeError\n"
        "process._serve = gone\n"
        "ours, theirs = socket.socketpair()\n"
        "theirs.sendall(process.encode_message(None))\n"
        "assert process.run_engine(ours.detach()) == 0\n"
        "signal.raise_signal(signal.SIGUSR1)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")

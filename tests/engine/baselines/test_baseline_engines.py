"""The baseline schedulers on a model: their tokens are those of the unified scheduler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_llama import VOCAB, write_config

from engine.baselines.occupancy import Occupancy
from engine.baselines.two_track import TwoTrackScheduler
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.errors import ConfigError
from engine.explain.explain import explain_steps
from engine.explain.explain_input import ExplainError, read_config, read_requests
from engine.explain.explain_table import budget_bar, describe_events, describe_setup
from engine.kernels.host import HostBlocks, block_tensors
from engine.request import Request, SamplingParams

SIZES = [(5 + 3 * place, 3 + 7 * place % 30) for place in range(14)]
"""Prompt and output lengths."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("lab"))


def run(model: Path, **flags: Any) -> tuple[dict[str, list[int]], EngineCore, Occupancy]:
    config = EngineConfig(
        model=str(model),
        load_format="dummy",
        dtype="float32",
        max_model_len=128,
        max_num_seqs=6,
        max_num_batched_tokens=512,
        device_memory=1 << 26,
        **flags,
    )
    core = EngineCore(config)
    occupancy = Occupancy(config.max_num_seqs)
    for place, (prompt, output) in enumerate(SIZES):
        ids = [3 + (7 * place + 3 * position) % (VOCAB - 3) for position in range(prompt)]
        core.add(
            Request(f"r{place}", ids, SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True))
        )
    tokens: dict[str, list[int]] = {}
    while core.has_unfinished:
        plan, done = core.step()
        core.scheduler.check()
        occupancy.observe(plan, done, 1.0)
        for item in done.outputs:
            tokens.setdefault(item.request_id, []).extend(item.token_ids)
    return tokens, core, occupancy


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, list[int]]:
    tokens, _, occupancy = run(model)
    assert {name: len(ids) for name, ids in tokens.items()} == {
        f"r{place}": output for place, (_, output) in enumerate(SIZES)
    }
    assert occupancy.utilisation == 1.0
    return tokens


def test_static(model: Path, expected: dict[str, list[int]]) -> None:
    tokens, _, occupancy = run(model, scheduler="static")
    assert tokens == expected
    assert 0.3 < occupancy.utilisation < 0.8
    assert 0.2 < occupancy.bubble_share < 0.7


def test_two_track(model: Path, expected: dict[str, list[int]]) -> None:
    tokens, _, occupancy = run(model, scheduler="two-track")
    assert tokens == expected
    assert occupancy.utilisation == 1.0
    assert occupancy.bubble_share > 0.1


@pytest.mark.parametrize("native", ["1", "0"])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_two_track_preempting(
    model: Path, expected: dict[str, list[int]], mode: str, native: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VTUNE_NATIVE", native)
    flags = {"scheduler": "two-track", "preemption_mode": mode, "enable_prefix_caching": False}
    tokens, core, occupancy = run(model, num_gpu_blocks_override=12, swap_space=0.01, **flags)
    assert tokens == expected
    assert core.scheduler.stats.num_preemptions >= 3
    assert (occupancy.moved_blocks > 0) == (mode == "swap")
    assert (occupancy.utilisation == 1.0) == (mode == "swap")


def test_swap_space_holds_what_can_run_and_no_more(model: Path) -> None:
    _, core, _ = run(model, scheduler="two-track", preemption_mode="swap", swap_space=1_000_000)
    assert isinstance(core.scheduler, TwoTrackScheduler)
    assert core.scheduler.num_free_host_blocks == 6 * 128 // 16
    with pytest.raises(ConfigError, match=r"--swap-space 1000000: this machine has .*lower --swap-space"):
        core.runner.allocate_host(1 << 40)


def test_blocks_go_to_the_host_and_back_in_every_layer(model: Path) -> None:
    _, core, _ = run(model)
    caches = core.runner._caches  # type: ignore[attr-defined]
    tensors = [tensor for cache in caches for tensor in block_tensors(cache)]
    assert tensors
    assert len(tensors) % 2 == 0  # one or more of each of two layers
    for tensor in tensors:
        tensor[3], tensor[4] = 3.0, 4.0
    host = HostBlocks(caches, num_blocks=2)
    host.swap([(3, 1), (4, 0)], [])
    for tensor in tensors:
        tensor[3] = tensor[4] = 0.0
    host.swap([], [(0, 3), (1, 7)])
    for tensor in tensors:
        assert torch.all(tensor[3] == 4.0)
        assert torch.all(tensor[7] == 3.0)
        assert torch.all(tensor[4] == 0.0)


# ---------------------------------------------------------------- explain

REQUESTS = [
    {"id": "A", "prompt_token_ids": [1, 2, 3], "output_len": 3},
    {"id": "B", "prompt_token_ids": [1, 2], "output_len": 5},
]


def config(**changes: Any) -> dict[str, Any]:
    base = {
        "max_model_len": 16,
        "num_gpu_blocks": 20,
        "block_size": 4,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 16,
        "scheduler": "static",
    }
    return {**base, **changes}


def test_explain_shows_padding() -> None:
    setup = read_config(config())
    steps = list(explain_steps(setup, read_requests(REQUESTS, setup)))
    assert budget_bar(steps[0]) == "pppppx.........."
    assert "pads with 1" in describe_events(steps[0])
    assert [step.row(False).get("padding") for step in steps] == [1, None, None, 1, 1]
    assert describe_setup(setup).startswith("static scheduler; ")
    assert "chunked prefill off" in describe_setup(setup)
    assert describe_setup(setup).endswith("x padding")


def test_explain_shows_swaps() -> None:
    changes = {"scheduler": "two-track", "preemption_mode": "swap", "num_host_blocks": 4}
    setup = read_config(config(num_gpu_blocks=5, **changes))
    longer = [{**request, "output_len": 9} for request in REQUESTS]
    steps = list(explain_steps(setup, read_requests(longer, setup)))
    swaps = [step.row(False)["swapped_blocks"] for step in steps if "swapped_blocks" in step.row(False)]
    assert swaps == [{"out": 2, "in": 0}, {"out": 0, "in": 2}]
    assert any("swaps 2 blocks out" in describe_events(step) for step in steps)
    assert "swaps to 4 host blocks" in describe_setup(setup)


def test_explain_says_what_never_comes_back() -> None:
    changes = {"scheduler": "two-track", "preemption_mode": "swap", "num_host_blocks": 4}
    setup = read_config(config(num_gpu_blocks=3, **changes))
    alone = read_requests([{**REQUESTS[0], "output_len": 9}], setup)
    with pytest.raises(
        ExplainError, match=r"'A' waits with 9 tokens.*3 needed, 2 free.*raise num_gpu_blocks"
    ):
        list(explain_steps(setup, alone))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scheduler": "fastest"}, "must be unified, static or two-track"),
        ({"num_host_blocks": -1}, "num_host_blocks must be an integer of 0 to"),
        ({"num_speculative_tokens": 2}, "the static scheduler has no num_speculative_tokens"),
        ({"max_num_batched_tokens": 8}, "never splits a prompt"),
    ],
)
def test_explain_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ExplainError, match=message):
        read_config(config(**changes))

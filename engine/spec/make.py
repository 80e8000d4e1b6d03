"""Which proposer a config asks for."""

from __future__ import annotations

from collections.abc import Callable

from engine.config import EngineConfig
from engine.models.model import Decoder
from engine.spec.draft_model import DraftModelProposer
from engine.spec.eagle import EagleProposer
from engine.spec.ngram import NgramProposer
from engine.spec.proposer import Proposer
from engine.spec.suffix import SuffixProposer

ProposerFactory = Callable[[EngineConfig, Decoder], Proposer | None]


def make_proposer(config: EngineConfig, target: Decoder) -> Proposer | None:
    """The proposer, its weights loaded, or None where there is no speculation.

    Raises ModelError for a draft that does not load, or does not fit the target.
    """
    speculative, max_model_len = config.speculative_config, config.max_model_len
    if speculative is None:
        return None
    assert max_model_len is not None
    if speculative.method == "ngram":
        return NgramProposer(speculative, max_model_len)
    if speculative.method == "suffix":
        return SuffixProposer(speculative, max_model_len)
    if speculative.method == "draft_model":
        return DraftModelProposer(config, target)
    return EagleProposer(config, target)

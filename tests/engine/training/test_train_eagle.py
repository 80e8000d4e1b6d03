"""The training script on a model of one layer: it learns, writes a head, and reports acceptance."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from tiny_llama import save_tiny_llama

from engine.cache import FetchError
from engine.models.bundled import fetch_bundled
from engine.training.train_eagle import main, prompts


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the bundled tokenizer, and so with its vocabulary."""
    try:
        bundled = fetch_bundled()
    except FetchError as error:
        pytest.skip(f"the bundled tokenizer cannot be had: {error}")
    directory = save_tiny_llama(
        tmp_path_factory.mktemp("model"),
        vocab_size=49_152,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=1,
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(bundled / name, directory)
    return directory


def test_a_head_is_trained_and_measured(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--sequences", "16", "--tokens", "6", "--epochs", "6"]
    assert main(["--out", str(tmp_path / "head"), "--model", str(model), *sizes]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"16 texts, [\d,]+ tokens, generated in \d+ s", printed)
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", printed)]
    assert losses[-1] < losses[0]
    assert re.search(
        r"head: acceptance [\d.]+% of [\d,]+ drafts; by position .*; [\d.]+ tokens per step", printed
    )
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    assert config["architectures"] == ["EagleLlamaForCausalLM"]


def test_held_out_prompts_are_not_trained_on() -> None:
    assert not set(prompts(held_out=True)) & set(prompts(held_out=False))


def test_a_model_that_is_not_there(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["--out", str(tmp_path), "--model", "./nowhere"]) == 2
    assert "error: model './nowhere'" in capsys.readouterr().err

"""LoRA adapters: the text of requests in one batch is that of the models with the adapters merged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from reference_model import Reference
from safetensors.torch import load_file, save_file
from tiny_adapters import merge, save_adapter
from tiny_llama import VOCAB, save_tiny_llama
from tiny_models import CASES, save_tiny
from torch.utils._python_dispatch import TorchDispatchMode

from engine.cache import FetchError
from engine.errors import ConfigError
from engine.kernels.native import NativeKernels
from engine.llm import LLM, PromptError
from engine.lora_config import LoRAModule
from engine.models.adapters import load_adapters
from engine.models.bundled import fetch_bundled
from engine.models.checkpoint import load_model_config
from engine.models.model_error import ModelError
from engine.request import SamplingParams
from engine.runner import ModelRunner

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS = [[3 + (7 * i + 3 * j) % (VOCAB - 3) for j in range(18 + 9 * i)] for i in range(3)]


@pytest.fixture(scope="module", autouse=True)
def tokenizer() -> None:
    try:
        fetch_bundled()
    except FetchError as error:
        pytest.skip(f"the bundled tokenizer cannot be had: {error}")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def adapters(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two of different ranks and targets."""
    home = tmp_path_factory.mktemp("adapters")
    return {
        "all": save_adapter(home / "all", tiny, seed=1, rank=4),
        "some": save_adapter(home / "some", tiny, seed=2, rank=8, targets=("q_proj", "v_proj", "up_proj")),
    }


@pytest.fixture(scope="module")
def references(
    tiny: Path, adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Reference]:
    """transformers on the merged checkpoints; "": without an adapter."""
    home = tmp_path_factory.mktemp("merged")
    merged = {name: Reference(merge(home / name, tiny, path)) for name, path in adapters.items()}
    return {"": Reference(tiny), **merged}


def make_llm(model: Path, adapters: dict[str, Path], **flags: Any) -> LLM:
    modules = tuple(LoRAModule(name, str(path)) for name, path in adapters.items())
    settings = {"dtype": "float32", "max_num_seqs": 16, "max_loras": len(modules), "max_lora_rank": 8}
    return LLM(
        str(model), tokenizer="bundled", enable_lora=True, lora_modules=modules, **{**settings, **flags}
    )


def check(llm: LLM, references: dict[str, Reference], *names: str) -> None:
    """Every prompt with every adapter, in one batch."""
    pairs = [(prompt, name) for prompt in PROMPTS for name in names]
    done = llm.generate([prompt for prompt, _ in pairs], GREEDY, lora_names=[name for _, name in pairs])
    for (prompt, name), completion in zip(pairs, done, strict=True):
        references[name].check_greedy(prompt, completion.token_ids)


def test_adapters_change_the_text(references: dict[str, Reference]) -> None:
    rows = {name: model.logits(PROMPTS[0]).argmax(-1).tolist() for name, model in references.items()}
    assert rows[""] != rows["all"] != rows["some"] != rows[""]


def test_a_batch_of_several_adapters_equals_the_merged_models(
    tiny: Path, adapters: dict[str, Path], references: dict[str, Reference], kernels: str
) -> None:
    llm = make_llm(tiny, adapters)
    runner = llm.core.runner
    assert isinstance(runner, ModelRunner)
    assert isinstance(runner._kernels, NativeKernels) == (kernels == "native")
    check(llm, references, "", "all", "some")


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param({"max_num_batched_tokens": 16}, id="chunks"),
        pytest.param({"num_gpu_blocks_override": 12, "max_model_len": 128}, id="preemption"),
        pytest.param({"async_scheduling": True}, id="async"),
        pytest.param({"max_loras": 1}, id="one slot"),
        pytest.param(
            {"num_gpu_blocks_override": 12, "max_model_len": 128, "kv_offloading_size": 0.01}, id="offload"
        ),
        pytest.param(
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}},
            id="drafts",
        ),
    ],
)
def test_the_text_does_not_depend_on_how_it_is_scheduled(
    tiny: Path, adapters: dict[str, Path], references: dict[str, Reference], flags: dict[str, Any]
) -> None:
    llm = make_llm(tiny, adapters, **flags)
    check(llm, references, "", "all", "some")
    check(llm, references, "some", "all", "")  # what the first left in the caches is there
    if "num_gpu_blocks_override" in flags:
        assert llm.core.scheduler.stats.num_preemptions


def test_prefix_hits_are_within_one_adapter(
    tiny: Path, adapters: dict[str, Path], references: dict[str, Reference]
) -> None:
    llm = make_llm(tiny, adapters)
    prompt = PROMPTS[2]
    found: dict[str, list[int]] = {}
    for name in ("all", "some", "", "all", "some", ""):
        done = llm.generate([prompt], GREEDY, lora_names=[name])[0]
        references[name].check_greedy(prompt, done.token_ids)
        found.setdefault(name, []).append(done.num_cached_tokens)
    assert found == {name: [0, 32] for name in ("all", "some", "")}


@pytest.mark.parametrize("case", ["qwen3", "gemma2", "gemma3", "qwen2"])
def test_every_family(tmp_path: Path, case: str) -> None:
    """Norms on heads and behind projections, biases, windows."""
    model = save_tiny(tmp_path / "model", **CASES[case])
    adapter = save_adapter(tmp_path / "adapter", model, seed=3)
    references = {"": Reference(model), "a": Reference(merge(tmp_path / "merged", model, adapter))}
    check(make_llm(model, {"a": adapter}), references, "", "a")


def test_scales_are_pefts(tmp_path: Path, tiny: Path) -> None:
    """rsLoRA, an alpha of its own for some modules, tensors in bfloat16."""
    adapter = save_adapter(
        tmp_path / "adapter",
        tiny,
        dtype=torch.bfloat16,
        use_rslora=True,
        lora_alpha=3,
        alpha_pattern={"layers\\.\\d+\\.mlp\\.up_proj": 5.5, "_proj": 3},
    )
    references = {"a": Reference(merge(tmp_path / "merged", tiny, adapter, {"up_proj": 5.5}))}
    check(make_llm(tiny, {"a": adapter}), references, "a")


class CountedOperations(TorchDispatchMode):
    """Of torch, within the ``with`` block."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_steps_without_an_adapter_compute_as_much_as_without_the_flag(
    tiny: Path, adapters: dict[str, Path], kernels: str
) -> None:
    def operations(llm: LLM, name: str) -> int:
        with CountedOperations() as counted:
            llm.generate(PROMPTS[:1], GREEDY, lora_names=[name])
        return counted.count

    plain, able = LLM(str(tiny), tokenizer="bundled", dtype="float32"), make_llm(tiny, adapters)
    assert operations(plain, "") == operations(able, "") < operations(able, "all")


def test_weights_of_adapters_are_in_the_memory_plan(tiny: Path, adapters: dict[str, Path]) -> None:
    sizes = {name: (path / "adapter_model.safetensors").stat().st_size for name, path in adapters.items()}
    plain = LLM(str(tiny), tokenizer="bundled", dtype="float32").core.runner.weights_bytes
    more = {
        name: make_llm(tiny, {name: path}).core.runner.weights_bytes - plain
        for name, path in adapters.items()
    }
    headers = 6_000  # and B of q, k and v is stored with zeros beside it
    assert all(sizes[name] - headers < more[name] < 6 * sizes[name] for name in adapters)
    assert make_llm(tiny, adapters).core.runner.weights_bytes - plain == sum(more.values())


def test_an_unknown_adapter_is_refused(tiny: Path, adapters: dict[str, Path]) -> None:
    with pytest.raises(PromptError, match="no adapter is named 'none'; there are: all, some"):
        make_llm(tiny, adapters).generate(PROMPTS[:1], GREEDY, lora_names=["none"])


def load(adapter: Path, model: Path, max_rank: int = 16) -> None:
    load_adapters([LoRAModule("a", str(adapter))], load_model_config(model), max_rank, torch.float32)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3', LORA is supported"),
        ({"use_dora": True}, "use_dora True is not supported"),
        ({"bias": "all"}, "bias 'all' is not supported"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save \['lm_head'\] is not supported"),
        ({"kasa_config": {"beta": 1}}, r"kasa_config \{'beta': 1\} is not supported"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa' is not supported"),
        ({"lora_alpha": "8"}, "lora_alpha must be a number, got '8'"),
        ({"alpha_pattern": {"(": 1}}, "is no regular expression"),
    ],
)
def test_configs_that_are_refused(tmp_path: Path, tiny: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=f"adapter a: .*adapter_config.json: .*{message}"):
        load(save_adapter(tmp_path / "adapter", tiny, **config), tiny)


def change_tensors(adapter: Path, change: Any) -> None:
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


FIRST = "base_model.model.model.layers.0.mlp.down_proj.lora_"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(FIRST + "B.weight"), "model.layers.0.mlp.down_proj lacks lora_B"),
        (
            lambda t: t.update({FIRST + "A.weight": torch.zeros(4, 9)}),
            r"A \(4, 9\).* 96 x 160: an adapter of",
        ),
        (lambda t: t.update({FIRST + "magnitude": torch.zeros(4)}), "is none of LoRA's"),
        (
            lambda t: t.update({"base_model.model.lm_head.lora_A.weight": torch.zeros(4, 96)}),
            "lm_head.* is none",
        ),
        (
            lambda t: t.update({FIRST.replace(".0.", ".7.") + "A.weight": torch.zeros(4, 160)}),
            "another model: this one has 3 layers",
        ),
        (lambda t: t.clear(), "holds no tensors"),
    ],
)
def test_tensors_that_are_refused(tmp_path: Path, tiny: Path, change: Any, message: str) -> None:
    adapter = save_adapter(tmp_path / "adapter", tiny)
    change_tensors(adapter, change)
    with pytest.raises(ModelError, match=message):
        load(adapter, tiny)


def test_files_that_are_missing_or_damaged(tmp_path: Path, tiny: Path) -> None:
    with pytest.raises(ModelError, match=r"adapter a: .*nowhere': no such file or directory"):
        load(tmp_path / "nowhere", tiny)
    adapter = save_adapter(tmp_path / "adapter", tiny)
    (adapter / "adapter_model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ModelError, match=r"adapter_model\.safetensors: damaged safetensors file"):
        load(adapter, tiny)
    (adapter / "adapter_config.json").unlink()
    with pytest.raises(
        ModelError, match=r"adapter_config\.json is missing: an adapter is a directory in PEFT's"
    ):
        load(adapter, tiny)


def test_a_rank_above_the_flag_is_refused(tmp_path: Path, tiny: Path) -> None:
    adapter = save_adapter(tmp_path / "adapter", tiny, rank=9)
    with pytest.raises(ConfigError, match=r"has rank 9, more than --max-lora-rank \(8\)"):
        load(adapter, tiny, max_rank=8)

"""Where models come from: directories, shards, GGUF, dummies, hub ids; and what is said when they do not."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from reference_model import Reference
from tiny_gguf import MERGES, TOKENS, write_gguf
from tiny_llama import make_request, run_step, save_tiny_llama, write_config

from engine.config import EngineConfig
from engine.models.bundled import write_checkpoint
from engine.models.checkpoint import load_model_config, open_checkpoint
from engine.models.gguf_checkpoint import GgufCheckpoint, GgufError
from engine.models.model_config import LayerKind, ModelConfig
from engine.models.model_error import ModelError
from engine.models.rope import RopeConfig
from engine.models.weights import resolve_model
from engine.runner import ModelRunner
from engine.text.tokenizer import Tokenizer


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """The HF twin of the GGUF file below."""
    return save_tiny_llama(
        tmp_path / "hf",
        vocab_size=len(TOKENS),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
    )


@pytest.fixture
def gguf(llama: Path, tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "model.gguf", dict(open_checkpoint(llama).tensors()))


def test_gguf_gives_the_tensors_back(llama: Path, gguf: Path) -> None:
    expected = dict(open_checkpoint(llama).tensors())
    found = dict(open_checkpoint(gguf).tensors())
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor.float(), msg=name)


def test_gguf_runs_as_its_hf_twin(llama: Path, gguf: Path) -> None:
    reference, prompt = Reference(llama), [3, 4, 5, 6, 7, 8, 9]
    runner = ModelRunner(EngineConfig(model=str(gguf), dtype="float32"))
    runner.allocate(4)
    result = run_step(runner, (make_request("a", prompt, [1]), 0, len(prompt)))
    reference.check_greedy(prompt, result.tokens["a"])


def test_gguf_config(gguf: Path) -> None:
    config = load_model_config(gguf)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (2, 1, 32)
    assert (config.kinds, config.rms_norm_eps) == ((LayerKind(None, RopeConfig(1000.0)),), 1e-5)
    assert (config.eos_token_ids, config.vocab_size) == ((2,), len(TOKENS))
    assert not config.tie_word_embeddings


def test_gguf_written_as_a_directory_is_loaded_by_transformers(gguf: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    target = tmp_path / "made"
    write_checkpoint(GgufCheckpoint(gguf), target)
    theirs, ours = AutoTokenizer.from_pretrained(target), Tokenizer.load(target)
    text = "hello world 012 <|im_end|>"
    assert theirs(text)["input_ids"] == ours.encode(text) == Tokenizer.load(gguf).encode(text)
    assert theirs.eos_token_id == 2
    messages = [{"role": "user", "content": "hello"}]
    assert theirs.apply_chat_template(messages, tokenize=False) == ours.apply_chat_template(messages)
    assert Reference(target).model.config.rope_parameters["rope_theta"] == 1000.0
    sizes = json.loads((target / "manifest.json").read_text())["sizes"]
    assert sizes["model.safetensors"] == (target / "model.safetensors").stat().st_size


def test_gguf_tokenizer_splits_digits_and_merges(gguf: Path) -> None:
    tokenizer = Tokenizer.load(gguf)
    assert tokenizer.encode("hello") == [TOKENS.index("hello")]
    assert tokenizer.encode("012") == [TOKENS.index(digit) for digit in "012"]
    assert len(MERGES) == 4


def test_other_gguf_files_are_refused(llama: Path, tmp_path: Path) -> None:
    weights = dict(open_checkpoint(llama).tensors())
    with pytest.raises(GgufError, match="architecture 'falcon' is not supported"):
        GgufCheckpoint(write_gguf(tmp_path / "falcon.gguf", {}, architecture="falcon"))
    with pytest.raises(GgufError, match=r"tokenizer 'llama' .* not supported; name a directory"):
        GgufCheckpoint(write_gguf(tmp_path / "spm.gguf", weights, tokenizer="llama")).tokenizer_json()
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF and then nothing")
    with pytest.raises(GgufError, match=r"broken.gguf: not a readable GGUF file"):
        GgufCheckpoint(broken)


def test_shards_are_read_through_the_index(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path / "one")
    save_tiny_llama(tmp_path / "many", shard_size="60KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 3
    one, many = (dict(open_checkpoint(tmp_path / name).tensors()) for name in ("one", "many"))
    assert set(one) == set(many)
    assert all(torch.equal(one[name], many[name]) for name in one)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path, shard_size="60KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelError, match=f"{shard.name} is missing"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("file", [5, ["model.safetensors"]])
def test_an_index_that_names_no_files(tmp_path: Path, file: object) -> None:
    write_config(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(ModelError, match=r"index\.json: weight_map names something that is no file"):
        open_checkpoint(tmp_path)


def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = save_tiny_llama(tmp_path)
    tensors = load_file(model / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    save_file({**tensors, name: tensors[name].to(torch.int8)}, model / "model.safetensors")
    with pytest.raises(ModelError, match=rf"{model}: tensor {name} is int8: quantised safetensors"):
        ModelRunner(EngineConfig(model=str(model)))


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(ModelError, match=r"notes.txt: not a Hugging Face model directory"):
        load_model_config(tmp_path / "notes.txt")


def test_a_damaged_shard_is_named(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:2000])
    with pytest.raises(ModelError, match=r"model.safetensors: damaged"):
        dict(open_checkpoint(tmp_path).tensors())


def test_a_directory_without_weights(tmp_path: Path) -> None:
    write_config(tmp_path)
    with pytest.raises(ModelError, match=r"no .safetensors file is missing|--load-format dummy"):
        open_checkpoint(tmp_path)
    assert dict(open_checkpoint(tmp_path, "dummy").tensors())


def test_a_directory_without_a_config(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config.json is missing: not a Hugging Face model directory"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config.json: not readable as JSON"):
        open_checkpoint(tmp_path)


def test_dummy_takes_the_path_of_a_config(tmp_path: Path) -> None:
    write_config(tmp_path, tie_word_embeddings=True, attention_bias=True)
    tensors = dict(open_checkpoint(tmp_path / "config.json", "dummy").tensors())
    assert "lm_head.weight" not in tensors
    assert not tensors["model.layers.0.self_attn.q_proj.bias"].any()
    assert tensors["model.norm.weight"].eq(1).all()
    assert tensors["model.embed_tokens.weight"].std() == pytest.approx(0.02, rel=0.1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architecture GPT2LMHeadModel is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, "rope type 'dynamic' is not supported"),
        ({"rope_scaling": {"type": "llama3", "factor": 8}}, "llama3 rope scaling lacks low_freq_factor"),
        ({"architectures": 5}, "architecture 5 is not supported"),
        ({"hidden_size": None}, r"config\.json: hidden_size is missing"),
        ({"hidden_size": 0}, "hidden_size must be a whole number of at least 1, got 0"),
        ({"vocab_size": 1.5}, "vocab_size must be a whole number of at least 1, got 1.5"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be a whole number of at least 1, got True"),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "4 attention heads cannot share 3 KV heads"),
        ({"head_dim": 31}, "head_dim 31 is odd"),
        ({"rms_norm_eps": "tiny"}, "rms_norm_eps must be a number above 0, got 'tiny'"),
        ({"rope_theta": -1.0, "rope_parameters": None}, "rope_theta must be a number above 0, got -1.0"),
        ({"rope_scaling": [1]}, r"config\.json: rope_scaling must be an object, got \[1\]"),
        ({"rope_parameters": {"full_attention": 5}}, "full_attention must be an object, got 5"),
        ({"rope_scaling": {"rope_type": ["yarn"]}}, r"rope type \['yarn'\] is not supported"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "factor must be a number above 0, got None"),
        ({"rope_theta": 1.0, "rope_scaling": {"type": "yarn", "factor": 2}}, "needs a rope_theta above 1"),
        ({"rope_scaling": {"rope_type": "linear"}}, "linear rope scaling lacks factor"),
        ({"rope_scaling": {"factor": 2, "partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5 is not"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        (
            {"quantization_config": {"quant_method": "gptq"}},
            "a checkpoint quantised by gptq is not supported",
        ),
        (
            {"architectures": ["Qwen3MoeForCausalLM"]},
            r"Qwen3MoeForCausalLM is not supported \(LlamaForC.* are\)",
        ),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 0}, "sliding_window must be a whole"),
        (
            {"architectures": ["Gemma3ForCausalLM"], "layer_types": ["full_attention"]},
            "must be a list of num",
        ),
        (
            {"architectures": ["Gemma3ForCausalLM"], "layer_types": ["full_attention", "chunked_attention"]},
            r"layer type 'chunked_attention' is not supported \(full_attention and sliding_attention are\)",
        ),
        (
            {"architectures": ["Gemma3ForCausalLM"], "use_bidirectional_attention": True},
            "generates, causally",
        ),
        (
            {"architectures": ["Gemma3ForCausalLM"], "final_logit_softcapping": 0},
            "final_logit_softcapping must",
        ),
        ({"architectures": ["Gemma3ForConditionalGeneration"]}, "text_config is missing"),
        ({"eos_token_id": "x"}, "eos_token_id must be a token id or a list of them, got 'x'"),
        ({"eos_token_id": [1, None]}, r"eos_token_id must be a token id or a list of them, got \[1, None\]"),
    ],
)
def test_configs_that_cannot_be_run(tmp_path: Path, settings: dict, message: str) -> None:
    write_config(tmp_path, **settings)
    with pytest.raises(ModelError, match=message):
        load_model_config(tmp_path, "dummy")


def test_a_config_that_lacks_a_size() -> None:
    with pytest.raises(ModelError, match="vocab_size is missing"):
        ModelConfig.from_hf(
            {"architectures": ["LlamaForCausalLM"], "num_attention_heads": 1, "hidden_size": 32}
        )


@pytest.mark.parametrize("text", ["{", "[]", "[" * 100_000, "\xff"])
def test_a_config_that_is_no_json_object(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelError, match=r"config\.json: "):
        load_model_config(tmp_path, "dummy")


def test_a_model_larger_than_the_machine(tmp_path: Path) -> None:
    write_config(tmp_path, num_hidden_layers=10**9)
    with pytest.raises(ModelError, match=r"the weights take [\d,]+ GiB .* this machine has"):
        ModelRunner(EngineConfig(model=str(tmp_path), load_format="dummy"))


def test_the_number_of_parameters_is_that_of_the_tensors(tmp_path: Path) -> None:
    write_config(tmp_path, num_hidden_layers=3, attention_bias=True)
    model = load_model_config(tmp_path, "dummy")
    assert model.num_parameters == sum(math.prod(shape) for shape in model.tensor_shapes().values())


def test_eos_of_the_generation_config_wins(tmp_path: Path) -> None:
    write_config(tmp_path, eos_token_id=5)
    assert load_model_config(tmp_path, "dummy").eos_token_ids == (5,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    assert load_model_config(tmp_path, "dummy").eos_token_ids == (7, 8)


@pytest.mark.parametrize("name", ["/no/such/place", "./nothing", "model.gguf", "plain", "a/b/c"])
def test_a_path_that_does_not_exist(name: str) -> None:
    with pytest.raises(ModelError, match="no such file or directory, and not a hub id"):
        resolve_model(name)


@pytest.mark.parametrize("name", ["x" * 5000, "/tmp/\0", "~no-such-user/model"])
def test_a_path_that_cannot_be(name: str) -> None:
    with pytest.raises(ModelError, match=r"^model '"):
        resolve_model(name)


def test_a_hub_id_goes_to_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **options: str(tmp_path / name))
    assert resolve_model("org/model") == tmp_path / "org/model"

    def offline(name: str, **options: object) -> str:
        raise ConnectionError("no route to the hub\nsecond line")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(ModelError, match=r"the hub could not deliver it \(no route to the hub\)"):
        resolve_model("org/model")


def test_a_path_stands_for_itself(tmp_path: Path) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path


def test_tensors_that_the_config_does_not_speak_of_are_named(tmp_path: Path) -> None:
    """A bias that is not added would make the answers nonsense; old rotary tables do not matter."""
    from safetensors.torch import load_file, save_file

    file = save_tiny_llama(tmp_path) / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(16)
    save_file(tensors, file)
    ModelRunner(EngineConfig(model=str(tmp_path), dtype="float32"))
    for name in ("q_proj", "k_proj"):
        tensors[f"model.layers.1.self_attn.{name}.bias"] = torch.ones(96 if name == "q_proj" else 32)
    save_file(tensors, file)
    with pytest.raises(
        ModelError, match=r"has 2 tensors that its config .* model\.layers\.1\.self_attn\.k_proj\.bias"
    ):
        ModelRunner(EngineConfig(model=str(tmp_path), dtype="float32"))


def test_a_tied_head_in_the_file_is_not_used(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    file = save_tiny_llama(tmp_path, tie_word_embeddings=True) / "model.safetensors"
    save_file({**load_file(file), "lm_head.weight": torch.zeros(97, 96)}, file)
    runner, prompt = ModelRunner(EngineConfig(model=str(tmp_path), dtype="float32")), [3, 4, 5]
    runner.allocate(4)
    result = run_step(runner, (make_request("a", prompt, [1]), 0, 3))
    Reference(tmp_path).check_greedy(prompt, result.tokens["a"])


def test_dummy_norms_are_at_rest(tmp_path: Path) -> None:
    """Gemma's are stored as offsets from one."""
    write_config(tmp_path, architectures=["Gemma3ForCausalLM"], head_dim=32)
    tensors = dict(open_checkpoint(tmp_path, "dummy").tensors())
    assert {name for name in tensors if "layers.1" in name and "norm" in name} == {
        f"model.layers.1.{name}.weight"
        for name in (
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
            "self_attn.q_norm",
            "self_attn.k_norm",
        )
    }
    assert not tensors["model.norm.weight"].any()

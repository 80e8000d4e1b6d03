"""Train an EAGLE head for a model, on text that the engine generates with it.

    python -m engine.training.train_eagle --out DIR [--model bundled] [--sequences 320] \
        [--tokens 96] [--epochs 4]

Minutes on a CPU for the bundled model. The hidden states are those that the engine computes as it generates:
a proposer that only looks on keeps them. The loss is EAGLE's: smooth L1 on the next hidden state, and cross
entropy against the target's own distribution (arXiv:2401.15077, section 3.2). Then the head drafts for
prompts that it has not seen, and its acceptance is printed. Use it with

    vtune serve --speculative-config '{"method": "eagle", "model": "DIR", "num_speculative_tokens": 3}'
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from engine.config import EngineConfig
from engine.errors import EngineUserError
from engine.llm import LLM
from engine.models.checkpoint import open_checkpoint
from engine.models.model import Decoder, layer_rope_tables
from engine.models.model_config import ModelConfig
from engine.models.weights import resolve_model
from engine.request import SamplingParams
from engine.runner import ModelRunner
from engine.spec.proposer import Proposer, TargetStep
from engine.step import StepOutput, StepPlan

TASKS = (
    "Explain {} to a child.",
    "Write a short story about {}.",
    "List five facts about {}.",
    "Give me advice on {}.",
    "What are the advantages and disadvantages of {}?",
    "Write a letter to a friend about {}.",
    "Describe the history of {}.",
    "Write a Python function that has to do with {}.",
    "Summarise what is known about {} in one paragraph.",
    "Write a dialogue between two people about {}.",
)
TOPICS: tuple[str, ...] = tuple(
    """
    the moon/bread/trains/swimming/honey bees/chess/volcanoes/the ocean/gardening/clocks/coffee/winter
    bridges/music/dreams/horses/maps/glass/rivers/bicycles/the post office/tea/mountains/computers/painting
    wolves/rain/libraries/cheese/stars/football/forests/democracy/vaccines/money/ships/cooking/languages
    mathematics/elephants
    """.strip()
    .replace("\n    ", "/")
    .split("/")
)
HELD_OUT = 4
"""The last topics are for measuring only."""
FLAGS: dict[str, Any] = {"max_num_seqs": 32, "max_num_batched_tokens": 512, "enable_prefix_caching": False}
NORM = "layers.0.post_attention_layernorm"
BATCH, LEARNING_RATE, WARM_UP_STEPS = 8, 1e-3, 20
CROSS_ENTROPY_WEIGHT = 1.0
"""Ten times the paper's: with so little text, what counts is the likeliest token."""
POSITIONS = 256
"""Of a batch that enter the cross entropy; over the whole vocabulary it is the dearest part of a step."""
NOISE = 0.1
"""Added to the hidden states in training, uniform: as it drafts, the head sees its own, which are inexact."""


@dataclass(frozen=True)
class Example:
    """A text: ``tokens`` [n], and the target's hidden state of each behind its final norm, [n, hidden]."""

    tokens: torch.Tensor
    hidden: torch.Tensor


class HiddenStateRecorder(Proposer):
    """Proposes nothing and keeps the target's hidden states of every request."""

    def __init__(self, target: Decoder) -> None:
        self.target = target
        self.hidden: dict[str, list[torch.Tensor]] = {}

    def propose(self, step: TargetStep) -> dict[str, list[int]]:
        normed = torch.empty_like(step.hidden)
        target = self.target
        target.kernels.rms_norm(step.hidden, target.norm, target.config.rms_norm_eps, normed)
        row = 0
        for item in step.scheduled:
            rows = normed[row : row + item.num_tokens]
            self.hidden.setdefault(item.request.request_id, []).append(rows.to(torch.bfloat16))
            row += item.num_tokens
        return {}


class EagleHead(nn.Module):
    """The network of eagle.py, for autograd. Parameters bear the names of a checkpoint."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        size, query, kv = (
            config.hidden_size,
            config.num_heads * config.head_dim,
            config.num_kv_heads * config.head_dim,
        )
        shapes = {
            "fc": (size, 2 * size),
            "layers.0.self_attn.q_proj": (query, size),
            "layers.0.self_attn.k_proj": (kv, size),
            "layers.0.self_attn.v_proj": (kv, size),
            "layers.0.self_attn.o_proj": (size, query),
            "layers.0.mlp.gate_proj": (config.intermediate_size, size),
            "layers.0.mlp.up_proj": (config.intermediate_size, size),
            "layers.0.mlp.down_proj": (size, config.intermediate_size),
        }
        self.config = config
        self.weights = nn.ParameterDict(
            {
                _key(name): nn.Parameter(torch.randn(shape) / math.sqrt(shape[1]))
                for name, shape in shapes.items()
            }
        )
        self.names = {_key(name): name for name in [*shapes, NORM]}
        self.weights[_key(NORM)] = nn.Parameter(torch.ones(size))

    def checkpoint(self) -> dict[str, torch.Tensor]:
        """Tensors by their names in a checkpoint."""
        return {
            f"{self.names[key]}.weight": tensor.detach().to(torch.bfloat16).contiguous()
            for key, tensor in self.weights.items()
        }

    def forward(self, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Predicted hidden states [B, T, hidden] of the position after each; ``embedded``: the next token."""
        x = F.linear(torch.cat((embedded, hidden), -1), self.weights[_key("fc")])
        x = x + self._linear(self._attention(x), "self_attn.o_proj")
        normed = F.rms_norm(x, x.shape[-1:], self.weights[_key(NORM)], self.config.rms_norm_eps)
        gate, up = self._linear(normed, "mlp.gate_proj"), self._linear(normed, "mlp.up_proj")
        return x + self._linear(F.silu(gate) * up, "mlp.down_proj")

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, self.weights[_key(f"layers.0.{name}")])

    def _attention(self, x: torch.Tensor) -> torch.Tensor:
        def heads(name: str) -> torch.Tensor:
            return self._linear(x, name).unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)

        cos, sin = (table[0] for table in layer_rope_tables(self.config, x.shape[1]))
        query, key = (_rotate(heads(f"self_attn.{name}_proj"), cos, sin) for name in "qk")
        attended = F.scaled_dot_product_attention(
            query,
            key,
            heads("self_attn.v_proj"),
            is_causal=True,
            scale=self.config.attention_scale,
            enable_gqa=True,
        )
        return attended.transpose(1, 2).flatten(2)


def _key(name: str) -> str:
    """A parameter's name must not contain dots."""
    return name.replace(".", "_")


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def prompts(held_out: bool) -> list[str]:
    topics = TOPICS[-HELD_OUT:] if held_out else TOPICS[:-HELD_OUT]
    return [task.format(topic) for topic in topics for task in TASKS]


def generate(model: str, count: int, tokens: int, seed: int) -> tuple[list[Example], Decoder]:
    """``count`` answers of the model to its own prompts with their hidden states, and the model."""
    recorders: list[HiddenStateRecorder] = []

    def record(config: EngineConfig, target: Decoder) -> Proposer:
        recorders.append(HiddenStateRecorder(target))
        return recorders[0]

    runner = ModelRunner(EngineConfig(model=model, **FLAGS), record)
    llm = LLM(model, runner=runner, **FLAGS)
    texts = chats(llm, held_out=False)
    random.Random(seed).shuffle(texts)
    texts = [texts[place % len(texts)] for place in range(count)]
    sampling = [SamplingParams(max_tokens=tokens, temperature=0.7, seed=seed + i) for i in range(count)]
    done = llm.generate(texts, sampling)
    examples = []
    for answer, hidden in zip(done, recorders[0].hidden.values(), strict=True):
        states = torch.cat(hidden)  # one fewer than tokens: nothing was computed behind the last
        known = [*answer.prompt_token_ids, *answer.token_ids][: len(states)]
        examples.append(Example(torch.tensor(known), states))
    return examples, recorders[0].target


def chats(llm: LLM, held_out: bool) -> list[list[int]]:
    """Prompts as the model's chat template has them, or plain where it has none."""
    template = llm.tokenizer.apply_chat_template
    return [
        llm.tokenizer.encode(template([{"role": "user", "content": text}]), add_special_tokens=False)
        for text in prompts(held_out)
    ]


def output_weights(model: str) -> torch.Tensor:
    """The output head [vocab, hidden] in bfloat16: the embedding where they are tied."""
    found = {
        name: tensor
        for name, tensor in open_checkpoint(resolve_model(model)).tensors()
        if name in ("lm_head.weight", "model.embed_tokens.weight")
    }
    return found.get("lm_head.weight", found["model.embed_tokens.weight"]).bfloat16()


def batches(examples: Sequence[Example], epochs: int, seed: int) -> Iterator[tuple[torch.Tensor, ...]]:
    """tokens [B, T], hidden [B, T, H], mask [B, T - 2]: which predictions are of real tokens."""
    shuffle = random.Random(seed)
    for _ in range(epochs):
        order = sorted(range(len(examples)), key=lambda i: (len(examples[i].tokens), shuffle.random()))
        groups = [order[start : start + BATCH] for start in range(0, len(order), BATCH)]
        shuffle.shuffle(groups)
        for group in groups:
            members = [examples[i] for i in group]
            tokens = pad_sequence([member.tokens for member in members], batch_first=True)
            hidden = pad_sequence([member.hidden for member in members], batch_first=True).float()
            lengths = torch.tensor([len(member.tokens) for member in members])
            yield tokens, hidden, torch.arange(tokens.shape[1] - 2) < (lengths - 2)[:, None]


def train(
    head: EagleHead,
    examples: Sequence[Example],
    target: Decoder,
    output: torch.Tensor,
    epochs: int,
    seed: int,
) -> None:
    """Fit ``head``; prints the loss, and how often its likeliest token is the target's, as it goes."""
    steps = epochs * -(-len(examples) // BATCH)
    optimizer = torch.optim.AdamW(head.parameters(), LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / WARM_UP_STEPS, 0.5 + 0.5 * math.cos(math.pi * min(step / steps, 1.0))),
    )
    torch.manual_seed(seed)
    started = time.monotonic()
    for step, (tokens, hidden, mask) in enumerate(batches(examples, epochs, seed)):
        embedded = target.embedding[tokens[:, 1:-1]].float()
        seen = hidden[:, :-2] + NOISE * (2 * torch.rand_like(hidden[:, :-2]) - 1)
        predicted, wanted = head(embedded, seen)[mask], hidden[:, 1:-1][mask]
        some = torch.randperm(len(predicted))[:POSITIONS]
        logits = (predicted[some].bfloat16() @ output.T).float()
        with torch.no_grad():
            truth = (wanted[some].bfloat16() @ output.T).float()
        close = F.smooth_l1_loss(predicted, wanted)
        loss = close + CROSS_ENTROPY_WEIGHT * F.cross_entropy(logits, truth.softmax(-1))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(head.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        if step % 20 == 0 or step == steps - 1:
            agree = (logits.argmax(-1) == truth.argmax(-1)).float().mean()
            passed = time.monotonic() - started
            print(f"step {step:4d}/{steps}  loss {loss:.3f}  agrees {agree:.1%}  {passed:.0f} s", flush=True)


def save(head: EagleHead, target: ModelConfig, directory: Path) -> None:
    """Write the head as vLLM reads it: config.json and model.safetensors."""
    directory.mkdir(parents=True, exist_ok=True)
    save_file(head.checkpoint(), directory / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["EagleLlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": target.num_heads,
        "num_key_value_heads": target.num_kv_heads,
        "head_dim": target.head_dim,
        "rms_norm_eps": target.rms_norm_eps,
        "rope_theta": target.kinds[0].rope.theta,
        "max_position_embeddings": target.max_position_embeddings,
        "torch_dtype": "bfloat16",
    }
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def measure(model: str, directory: Path, drafts: int, tokens: int) -> str:
    """Greedy answers to held-out prompts with the head: what is accepted, in words."""
    speculative = {"method": "eagle", "model": str(directory), "num_speculative_tokens": drafts}
    llm = LLM(model, speculative_config=speculative, **FLAGS)
    verified = proposed = accepted = 0
    by_position: Counter[int] = Counter()

    def observe(plan: StepPlan, output: StepOutput) -> None:
        nonlocal verified, proposed, accepted
        verified += output.num_drafts
        proposed += output.num_draft_tokens
        accepted += output.num_accepted_tokens
        by_position.update(dict(enumerate(output.accepted_per_position)))

    llm.generate(
        chats(llm, held_out=True), SamplingParams(max_tokens=tokens, temperature=0.0), observe=observe
    )
    positions = ", ".join(f"{by_position[place] / max(verified, 1):.1%}" for place in range(drafts))
    return (
        f"acceptance {accepted / max(proposed, 1):.1%} of {proposed:,} drafts; by position {positions}; "
        f"{1 + accepted / max(verified, 1):.2f} tokens per step"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="directory for the head")
    parser.add_argument("--model", default="bundled", help="as vtune serve takes it")
    parser.add_argument("--sequences", type=int, default=320, help="answers to learn from")
    parser.add_argument("--tokens", type=int, default=96, help="tokens of each")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--drafts", type=int, default=3, help="drafts per step in the measurement at the end")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    try:
        started = time.monotonic()
        examples, target = generate(options.model, options.sequences, options.tokens, options.seed)
        count = sum(len(example.tokens) for example in examples)
        print(
            f"{len(examples)} texts, {count:,} tokens, generated in {time.monotonic() - started:.0f} s",
            flush=True,
        )
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        torch.manual_seed(options.seed)
        head = EagleHead(target.config)
        train(head, examples, target, output_weights(options.model), options.epochs, options.seed)
        save(head, target.config, options.out)
        print(f"{options.out}: {measure(options.model, options.out, options.drafts, options.tokens)}")
    except (EngineUserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())

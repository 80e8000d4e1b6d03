"""Runs a step's plan on the model, with one forward for prefill and decode together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from engine.baselines.padding import padding_sequences
from engine.config import GIB, EngineConfig
from engine.errors import ConfigError
from engine.kernels import make_kernels
from engine.kernels.base import Batch
from engine.kernels.device import (
    CPU,
    capture_sizes,
    check_free_memory,
    held_by_others,
    idle_batch,
    make_sampler,
    memory_of,
    pick_device,
    place_on,
    warn_of_unused,
)
from engine.kernels.host import HostBlocks
from engine.kv.kv_format import kv_format
from engine.kv.kv_transfer import KVConnectorWorker
from engine.models.adapters import AdapterSlots, StepAdapters, load_adapters
from engine.models.checkpoint import load_model_config, open_checkpoint
from engine.models.model import TensorError, Workspace, attention_shape, layer_rope_tables, load_decoder
from engine.models.model_config import ModelConfig
from engine.models.model_error import ModelError
from engine.models.weights import resolve_model
from engine.request import Request
from engine.sampling.rejection import accept
from engine.sampling.sampler import Drawn, Sampler, SampleRow
from engine.spec.make import ProposerFactory, make_proposer
from engine.spec.proposer import TargetStep
from engine.step import PLACEHOLDER_TOKEN_ID, OneEach, ScheduledRequest, StepPlan, StepResult, TokenLogprobs

INPUT_BYTES_PER_TOKEN = 64
"""Bytes of a token's id, position and slot, in the widths that the kernels take."""


@dataclass(frozen=True, slots=True)
class _Verify:
    """The rows of logits that decide what one request emits: ``[start, start + 1 + len(drafts))``."""

    request: Request
    drafts: tuple[int, ...]
    start: int


class _Inputs(NamedTuple):
    """The step's requests and token ids, and where each of them stands."""

    scheduled: Sequence[ScheduledRequest]
    token_ids: torch.Tensor
    batch: Batch
    tables: list[list[int]]
    """The requests' block tables, with the blocks for drafts."""
    adapters: StepAdapters | None


class ModelRunner:
    """Holds weights, paged KV and sampler. Between steps it keeps nothing of a request but its KV blocks."""

    def __init__(self, config: EngineConfig, make_proposer: ProposerFactory = make_proposer) -> None:
        """Load the weights. ``make_proposer`` may put another in the place of the config's proposer, for
        experiments. Raises ModelError, FetchError or ConfigError."""
        path = resolve_model(config.model)
        self.model_config = load_model_config(path, config.load_format)
        self.config = config.resolved(self.model_config.max_position_embeddings)
        self._max_model_len = _max_model_len(self.config, self.model_config)
        self.dtype = _dtype(config.dtype, self.model_config.dtype)
        self._device = pick_device()
        self._check_device(path)
        self.model_config = self.model_config.within(self._max_model_len)
        shape = attention_shape(
            self.model_config, config.block_size, kv_format(config.kv_cache_dtype, self.dtype)
        )
        cos, sin = layer_rope_tables(self.model_config, self._max_model_len)
        self._kernels = make_kernels(
            shape,
            self.dtype,
            cos,
            sin,
            config.quantization is not None,
            capture_sizes(self.config, self._device),
        )
        checkpoint = open_checkpoint(path, config.load_format, config.seed)
        try:
            self._decoder = load_decoder(self.model_config, self._kernels, checkpoint.tensors())
        except TensorError as error:
            raise ModelError(f"{path}: {error}") from None
        self.weights_bytes = self._decoder.weights_bytes
        self._adapters: AdapterSlots | None = None
        if config.enable_lora:
            adapters = load_adapters(config.lora_modules, self.model_config, config.max_lora_rank, self.dtype)
            self._adapters = AdapterSlots(adapters, config.max_loras, self._kernels)
            self.weights_bytes += self._adapters.nbytes
        self.kv_bytes_per_token = shape.kv_bytes(self.dtype) * self.model_config.num_layers
        self._max_rows = min(
            config.max_num_seqs * (1 + config.num_speculative_tokens), config.max_num_batched_tokens
        )
        self._workspace = Workspace(
            self.model_config, self.dtype, config.max_num_batched_tokens, self._max_rows, self._device
        )
        self._caches: list[Any] = []
        self._host: HostBlocks | None = None
        self._connector: KVConnectorWorker | None = None
        self._sampler = make_sampler(config.seed, self._kernels)
        self._thread = ThreadPoolExecutor(1, "runner")  # started by its first step
        with place_on(self._device):
            self._proposer = make_proposer(self.config, self._decoder)
        if self._proposer is not None:
            self.weights_bytes += self._proposer.weights_bytes
            self.kv_bytes_per_token += self._proposer.kv_bytes_per_token

    def _check_device(self, path: Path) -> None:
        """Complete the config with the device's defaults. Raises ConfigError or ModelError for what it cannot
        do."""
        device, config = self._device, self.config
        warn_of_unused(config, device)
        _check_memory(self.model_config, self._max_model_len, self.dtype, path, device)
        if device.type != "cuda":
            return
        if config.quantization is not None:
            rule = "is for the CPU: there are no such kernels for GPUs"
            raise ConfigError("quantization", config.quantization, rule, "drop the flag")
        check_free_memory(device, config.gpu_memory_utilization)
        if config.device_memory is None:
            self.config = replace(config, device_memory=memory_of(device))

    @property
    def kernels(self) -> str:
        """What computes, e.g. NativeKernels: other kernels round otherwise."""
        return type(self._kernels).__name__

    @property
    def max_model_len(self) -> int:
        """The longest context that the model was made for."""
        return self.model_config.max_position_embeddings

    def profile_activation(self) -> int:
        """Peak bytes of a step of max_num_batched_tokens: every buffer of the step and its inputs, and what
        the operations or the sampler, never both at the same time, allocate beside them."""
        operations = self._kernels.scratch_bytes(
            self.config.max_num_batched_tokens, self.config.max_num_seqs, self._max_model_len
        )
        sampling = Sampler.scratch_bytes(self._max_rows, self.model_config.vocab_size)
        inputs = INPUT_BYTES_PER_TOKEN * self.config.max_num_batched_tokens
        drafting = self._proposer.activation_bytes() if self._proposer is not None else 0
        buffers = self._workspace.nbytes + inputs + drafting
        return buffers + max(operations, sampling) + held_by_others(self._device)

    def allocate(self, num_blocks: int) -> None:
        """Make the paged KV tensors of every layer, ``num_blocks`` blocks each (the null block included).

        Raises ConfigError for more than the machine has: memory is taken only as it is written, too late.
        """
        wanted = self.weights_bytes + num_blocks * self.config.block_size * self.kv_bytes_per_token
        if wanted > (memory := memory_of(self._device)):
            config = self.config
            flag = "device_memory" if config.num_gpu_blocks_override is None else "num_gpu_blocks_override"
            raise ConfigError(
                flag,
                getattr(config, flag),
                f"weights and KV cache take {wanted / GIB:,.1f} GiB, this machine has {memory / GIB:,.1f}",
                f"lower --{flag.replace('_', '-')}",
            )
        model = self.model_config
        self._caches = [
            self._kernels.allocate_cache(num_blocks, model.kind_of(layer))
            for layer in range(model.num_layers)
        ]
        if self._proposer is not None:
            self._proposer.allocate(num_blocks)
        if self._device.type == "cuda":
            self._warm_up()

    @torch.inference_mode()
    def _warm_up(self) -> None:
        """Compile kernels and record graphs, with steps that read no cache and write none."""
        self._kernels.warm_up(self._caches)
        for sequences, each in (
            (1, self.config.max_num_batched_tokens),
            *((size, 1) for size in reversed(capture_sizes(self.config, self._device))),
        ):
            token_ids = self._kernels.upload([0] * (sequences * each))
            batch = idle_batch(sequences, each)
            self._decoder.forward(token_ids, batch, self._caches, self._workspace)

    def allocate_host(self, num_blocks: int) -> None:
        """Make the swap space in host memory. Raises ConfigError for more than the machine has."""
        wanted = num_blocks * self.config.block_size * self.kv_bytes_per_token
        if wanted > (memory := memory_of(CPU)):
            rule = f"this machine has {memory / GIB:,.1f} GiB"
            flag = "swap_space" if self.config.kv_offloading_size is None else "kv_offloading_size"
            fix = f"lower --{flag.replace('_', '-')}"
            raise ConfigError(flag, getattr(self.config, flag), rule, fix)
        self._host = HostBlocks(self._caches, num_blocks)
        self._connector = KVConnectorWorker(self._host)

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute the plan's tokens into the KV cache, and choose the next ones of requests that emit."""
        return self._compute(plan, self._inputs(plan))

    def start(self, plan: StepPlan) -> Future[StepResult]:
        """As :meth:`execute`, in a thread. The inputs are read before this returns, so the scheduler can go
        on."""
        return self._thread.submit(self._compute, plan, self._inputs(plan))

    @torch.inference_mode()
    def _compute(self, plan: StepPlan, inputs: _Inputs) -> StepResult:
        scheduled, token_ids, batch, tables, adapters = inputs
        if self._host is not None:
            self._host.swap(plan.swap_out, plan.swap_in)
        if plan.transfers is not None and self._connector is not None:
            self._connector.start(plan.transfers)
        if not scheduled:
            return StepResult({})
        hidden = self._decoder.forward(token_ids, batch, self._caches, self._workspace, adapters)
        with place_on(self._device):
            return self._choose(plan, scheduled, hidden, batch, tables)

    def _choose(
        self,
        plan: StepPlan,
        scheduled: Sequence[ScheduledRequest],
        hidden: torch.Tensor,
        batch: Batch,
        tables: list[list[int]],
    ) -> StepResult:
        """Tokens, and drafts for the next step, from the residual stream [T, hidden]."""
        rows, verify = _logit_rows(scheduled, batch)
        result = StepResult({})
        if verify:
            logits = self._decoder.logits(hidden, self._kernels.upload(rows), self._workspace)
            result = self._emit(logits, verify)
        if self._proposer is None:
            return result
        drafting = plan.num_running <= self.config.max_drafting
        step = TargetStep(plan.scheduled, tables, result.tokens, hidden, drafting)
        return replace(result, drafts=_in_form(self._proposer.propose(step), step))

    def _inputs(self, plan: StepPlan) -> _Inputs:
        """Everything of the plan's requests that the scheduler may change while the step is computed."""
        scheduled = plan.scheduled
        if plan.padding:
            scheduled = [*scheduled, *padding_sequences(plan, self.config.block_size)]
        block_size = self.config.block_size
        tokens: list[int] = []
        blocks: list[list[int]] = []
        for item in scheduled:
            end = item.start + item.num_tokens
            tokens += item.request.token_ids[item.start : end - len(item.drafts)]
            tokens += (max(draft, 0) for draft in item.drafts)  # a placeholder needs some embedding
            blocks.append(item.request.block_ids[: -(-end // block_size)])
        starts = np.array([item.start for item in scheduled], dtype=np.int32)
        counts = np.array([item.num_tokens for item in scheduled], dtype=np.int32)
        query_start = _offsets(counts)
        table_start = _offsets(np.array([len(table) for table in blocks], dtype=np.int32))
        tables = np.fromiter(chain.from_iterable(blocks), dtype=np.int32, count=int(table_start[-1]))
        sequence = np.repeat(np.arange(len(scheduled), dtype=np.int32), counts)
        positions = np.arange(len(tokens), dtype=np.int32) - query_start[sequence] + starts[sequence]
        slots = tables[table_start[sequence] + positions // block_size] * block_size + positions % block_size
        batch = Batch(positions, slots, query_start, starts + counts, tables, table_start)
        block_ids = [item.request.block_ids for item in plan.scheduled]
        adapters = None
        if self._adapters is not None:
            adapters = self._adapters.of_step([item.request.lora_name for item in scheduled], counts.tolist())
        return _Inputs(scheduled, self._kernels.upload(tokens), batch, block_ids, adapters)

    def _emit(self, logits: torch.Tensor, verify: Sequence[_Verify]) -> StepResult:
        rows = [row for item in verify for row in self._sample_rows(item)]
        _keep_form(logits, verify)
        sampled, logprobs = self._sampler.sample(logits, rows)
        requests = [item.request for item in verify]
        if len(rows) == len(requests) and all(r.sampling.logprobs is None for r in requests):
            return StepResult(OneEach(requests, sampled))
        tokens: dict[str, list[int]] = {}
        found: dict[str, list[TokenLogprobs]] = {}
        for item in verify:
            name, end = item.request.request_id, item.start + len(item.drafts) + 1
            emitted = accept(item.drafts, sampled[item.start : end])
            tokens[name] = emitted
            if item.request.sampling.logprobs is not None:
                asked = logprobs[item.start : item.start + len(emitted)]
                found[name] = [entry for entry in asked if entry is not None]
        return StepResult(tokens, logprobs=found)

    def _sample_rows(self, item: _Verify) -> Iterator[SampleRow]:
        """One row per draft, and one for the token after them."""
        drawn_from = None
        if item.drafts and self._proposer is not None:
            drawn_from = self._proposer.probabilities(item.request.request_id)
        for place, draft in enumerate(item.drafts):
            drawn = None if drawn_from is None else Drawn(draft, drawn_from[place])
            yield SampleRow(item.request, item.drafts[:place], drawn)
        yield SampleRow(item.request, item.drafts)


def _in_form(drafts: dict[str, list[int]], step: TargetStep) -> dict[str, list[int]]:
    """The drafts as far as the grammars of structured outputs allow."""
    for request, emitted in step.emitting():
        name = request.request_id
        if request.grammar is not None and drafts.get(name):
            drafts[name] = request.grammar.keep_valid(request.output_token_ids + emitted, drafts[name])
    return drafts


def _keep_form(logits: torch.Tensor, verify: Sequence[_Verify]) -> None:
    """Mask in ``logits`` [rows, vocab] what the grammars of structured outputs do not allow."""
    for item in verify:
        grammar = item.request.grammar
        if grammar is None:
            continue
        allowed = grammar.allowed(item.request.output_token_ids, item.drafts)
        for row, mask in enumerate(allowed, start=item.start):
            if mask is not None:
                logits[row].masked_fill_(torch.from_numpy(~mask).to(logits.device), -torch.inf)


def _offsets(counts: np.ndarray) -> np.ndarray:
    """[0, c0, c0 + c1, ...]: where each of some runs laid end to end begins."""
    offsets = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=offsets[1:])
    return offsets


def _logit_rows(scheduled: Sequence[ScheduledRequest], batch: Batch) -> tuple[list[int], list[_Verify]]:
    """Rows of the batch that need logits: each emitting request's last token and its drafts."""
    rows: list[int] = []
    verify: list[_Verify] = []
    for item, end in zip(scheduled, batch.query_start[1:].tolist(), strict=True):
        if not item.emits:
            continue
        first = end - 1 - len(item.drafts)
        real = () if PLACEHOLDER_TOKEN_ID in item.drafts else item.drafts
        verify.append(_Verify(item.request, real, len(rows)))
        rows += range(first, first + len(real) + 1)
    return rows, verify


def _max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    length, limit = config.max_model_len, model.max_position_embeddings
    assert length is not None
    if length > limit:
        raise ConfigError(
            "max_model_len",
            length,
            f"exceeds the {limit} positions that the model was trained for",
            f"give at most {limit}, or drop the flag",
        )
    return length


def _check_memory(
    model: ModelConfig, max_model_len: int, dtype: torch.dtype, path: Path, device: torch.device
) -> None:
    """Refuse what cannot be in memory, before trying brings the machine down. Raises ModelError."""
    tables = 4 * max_model_len * model.head_dim * len(model.kinds)
    wanted = model.num_parameters * dtype.itemsize + tables
    if wanted > (memory := memory_of(device)):
        where = "this machine" if device == CPU else str(device)
        raise ModelError(
            f"{path}: the weights take {wanted / GIB:,.0f} GiB in {str(dtype).removeprefix('torch.')}, "
            f"{where} has {memory / GIB:,.0f} GiB; serve a smaller model"
        )


def _dtype(flag: str, checkpoint: str) -> torch.dtype:
    """What to compute in; "auto" is the checkpoint's own where that is float32, else bfloat16."""
    name = checkpoint if flag == "auto" else flag
    return torch.float32 if name == "float32" else torch.bfloat16

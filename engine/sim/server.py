"""A server that is only simulated: from the flags that one would start it with to an engine in virtual time.

The scheduler, the block pool and the metrics are the real ones. What its steps take, and how much memory it
has, is estimated from a data sheet (:func:`on_device`) or given as measured (:func:`on_times`).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from engine.config import GIB, EngineConfig
from engine.core import EngineCore, Scheduler, make_scheduler
from engine.errors import ConfigError
from engine.metrics.exposition import Exposition
from engine.metrics.prometheus import PrometheusMetrics
from engine.metrics.stats import FinishedStats
from engine.models.model_config import ModelConfig
from engine.request import RequestStatus
from engine.sim.devices import FITTED, Device, Sizes, kv_bytes_per_token, layer_parameters, roofline
from engine.sim.fast_decode import FastDecodeScheduler
from engine.sim.simulated_runner import TOKEN_ID, ModelSize, SimulatedRunner, TimedRequest, VirtualClock
from engine.sim.step_times import StepLoad, StepTimes
from engine.speculative_config import SpeculativeConfig
from engine.step import Outputs

RESERVED_BYTES = GIB
"""Of a GPU's memory, for its context, communicators and captured graphs; an assumption."""
LOGIT_BYTES = 4
DEFAULT_ACCEPTANCE = 0.6
"""Chance that a draft is accepted if those before it were; assumed where it is not given."""
_WITHOUT_EFFECT = """
aggregate_engine_logging allow_credentials allow_deprecated_quantization allowed_headers allowed_methods
allowed_origins api_key api_server_count chat_template code_revision cudagraph_capture_sizes
cudagraph_metrics disable_access_log_for_endpoints disable_fastapi_docs disable_log_requests
disable_log_stats disable_uvicorn_access_log distributed_executor_backend download_dir
enable_auto_tool_choice enable_flashinfer_autotune enable_force_include_usage enable_log_deltas
enable_log_outputs enable_log_requests enable_logging_iteration_details enable_mfu_metrics
enable_offline_docs enable_per_request_metrics enable_prompt_tokens_details enable_reasoning
enable_request_id_headers enable_server_load_tracking enable_sleep_mode enable_ssl_refresh
enable_tokenizer_info_endpoint enforce_eager exclude_tools_when_tool_choice_none fail_on_environ_validation
generation_config hf_token host kv_cache_metrics kv_offloading_backend load_format log_error_stack log_level
lora_dtype max_cpu_loras max_cudagraph_capture_size max_log_len max_lora_rank max_loras model
override_generation_config port prefix_caching_hash_algo reasoning_parser renderer_num_workers response_role
return_tokens_as_token_ids revision root_path seed served_model_name shutdown_timeout skip_mm_profiling
sse_keep_alive_interval structured_outputs_config tokenizer tokenizer_mode tokenizer_revision
tool_call_parser trust_remote_code trust_request_chat_template uds use_tqdm_on_load use_v2_block_manager
uvicorn_log_level
"""
WITHOUT_EFFECT = frozenset(_WITHOUT_EFFECT.split())
"""Flags that change neither a simulated step nor the memory."""
_ADAPTERS = {"enable_lora", "lora_modules"}
"""Flags of the engine that are not simulated: what the products of adapters take is not known here."""
SIMULATED_FLAGS = frozenset(field.name for field in fields(EngineConfig)) - _ADAPTERS | {
    "tensor_parallel_size"
}
_ONE = """
data_parallel_size data_parallel_size_local dcp_kv_cache_interleave_size decode_context_parallel_size nnodes
num_scheduler_steps pipeline_parallel_size prefill_context_parallel_size prefill_schedule_interval
stream_interval
"""
_ZERO = """
cpu_offload_gb data_parallel_rank data_parallel_start_rank node_rank num_lookahead_slots offload_group_size
scheduler_delay_factor ubatch_size watermark
"""
_IDLE: Mapping[str, int] = dict.fromkeys(_ONE.split(), 1) | dict.fromkeys(_ZERO.split(), 0)
"""Numbers at which flags that are not simulated change nothing: one of several, none, the first."""
GPU_WEIGHT_BYTES: Mapping[Any, int] = {None: 2, "fp8": 1}
GPU_DTYPES = ("auto", "bfloat16", "float16", "half")
GPU_KV_BYTES: Mapping[str, int] = {"auto": 2, "bfloat16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}


@dataclass(frozen=True)
class Simulation:
    """Everything that a simulated server is made of. ``assumed``: what was not measured, in words."""

    config: EngineConfig
    size: ModelSize
    times: StepTimes
    assumed: tuple[str, ...] = ()
    acceptance: float = DEFAULT_ACCEPTANCE

    @property
    def device_bytes(self) -> int:
        """The device's memory, as the memory plan takes it."""
        return self.config.device_memory or max(GIB, 2 * self.size.weights_bytes)


def on_device(
    model: ModelConfig, device: Device, flags: Mapping[str, Any], acceptance: float | None = None
) -> Simulation:
    """A vLLM of these flags (names of vLLM, snake case) with its defaults on GPUs, by the data sheet.

    Raises ConfigError for a flag that is wrong, or that is not simulated.
    """
    given = _without_idle(flags)
    count = _count(given.pop("tensor_parallel_size", 1), model)
    sizes = Sizes(
        weights=_bytes("quantization", given.pop("quantization", None), GPU_WEIGHT_BYTES),
        kv=_bytes("kv_cache_dtype", given.get("kv_cache_dtype", "auto"), GPU_KV_BYTES),
    )
    _bytes("dtype", given.pop("dtype", "auto"), dict.fromkeys(GPU_DTYPES, 2))
    hidden = given.pop("async_scheduling", True)
    config = _config(
        {
            **device.batch_defaults,
            "device_memory": device.memory_bytes,
            **given,
        }
    )
    times = roofline(model, device, block_size=config.block_size, sizes=sizes, tensor_parallel_size=count)
    if hidden:
        share = 1 - times.overlap
        times = replace(times, host=share * times.host, host_per_sequence=share * times.host_per_sequence)
    assumed = (
        f"kernels reach {device.attainable_flops:.0%} of the data sheet's FLOP/s and "
        f"{device.attainable_bandwidth:.0%} of its bytes/s ({FITTED})",
        f"{device.host * 1e3:g} ms of host time a step and {device.host_per_sequence * 1e6:g} µs a sequence"
        + (", half of it beside the step before (async scheduling)" if hidden else ""),
        f"{device.launch * 1e3:g} ms to launch a step",
        f"{RESERVED_BYTES / GIB:g} GiB for context, communicators and graphs",
        f"{device.entry * 1e3:g} ms in the API server",
        *([f"{device.all_reduce * 1e6:g} µs to begin a sum over devices"] if count > 1 else ()),
        *(["layers with a window attend to everything"] if any(k.window for k in model.kinds) else ()),
        *_about_drafts(config, acceptance),
    )
    size = _size_on(model, sizes, count, config)
    return _checked(config, size, times, assumed, acceptance)


def on_times(
    model: ModelConfig, times: StepTimes, flags: Mapping[str, Any], acceptance: float | None = None
) -> Simulation:
    """The bundled engine of these flags, with step times that were measured. Raises ConfigError."""
    given = _without_idle(flags)
    _bytes("tensor_parallel_size", given.pop("tensor_parallel_size", 1), {1: 1})
    config = _config(given)
    size = ModelSize.of(model, max_num_batched_tokens=config.max_num_batched_tokens)
    silent = () if times.entry else ("no time in the API server",)
    drawn = ("how long steps take, and how late tokens come, is drawn from what was measured",)
    assumed = (*silent, *(drawn if times.spread else ()), *_about_drafts(config, acceptance))
    return _checked(config, size, times, assumed, acceptance)


def on_pool(times: StepTimes, max_model_len: int, flags: Mapping[str, Any]) -> Simulation:
    """A server of which nothing is known but what its steps take and its KV pool, which is given as
    ``num_gpu_blocks_override``. Raises ConfigError."""
    size = ModelSize(weights_bytes=0, kv_bytes_per_token=1, max_model_len=max_model_len)
    return _checked(_config(flags), size, times, (), None)


@dataclass(frozen=True, slots=True)
class Delivery:
    """What a step emitted: ``outputs``, and one token for each of ``num_fast_decodes`` requests."""

    outputs: Outputs
    num_fast_decodes: int
    joined: Sequence[str]
    """Ids of the requests in fast decode from the next step on: one token per step, without an output."""
    left: Sequence[str]
    """Ids of the requests that are in it no more from this step on."""


class SimulatedServer:
    """The engine of a :class:`Simulation`, with the metrics of every second of its virtual time.

    Its driver adds requests and lets it step; ``now`` is the end of the step before. Raises ConfigError
    where the memory does not hold one request of full length.
    """

    def __init__(self, simulation: Simulation, name: str = "simulated", number: int = 0) -> None:
        self._clock = VirtualClock()
        self.times = simulation.times
        config = simulation.config
        runner = SimulatedRunner(
            simulation.size,
            simulation.times,
            self._clock,
            num_speculative_tokens=config.num_speculative_tokens,
            acceptance=simulation.acceptance,
            seed=number,
        )
        self.core = EngineCore(config, runner, self._clock, schedulers=_make_scheduler)
        self._runner = runner
        scheduler = self.core.scheduler
        self._fast_scheduler = scheduler if isinstance(scheduler, FastDecodeScheduler) else None
        self._unchanged = False
        """No request was added or aborted since the last step."""
        plan = self.core.memory_plan
        self.max_model_len = plan.max_model_len
        self.scrapes: list[tuple[float, str]] = []
        """(second, text of the metrics), each second."""
        self.finished: dict[str, FinishedStats] = {}
        """What the engine knows of requests that have ended, by id; for the driver to take out."""
        self._metrics = PrometheusMetrics(
            name,
            max_model_len=plan.max_model_len,
            num_speculative_tokens=config.num_speculative_tokens,
            cache_info={
                "block_size": config.block_size,
                "cache_dtype": config.kv_cache_dtype,
                "enable_prefix_caching": config.enable_prefix_caching,
                "gpu_memory_utilization": config.gpu_memory_utilization,
                "num_gpu_blocks": plan.num_blocks,
                "num_gpu_blocks_override": config.num_gpu_blocks_override,
            },
        )
        self._exposition = Exposition(self._metrics.families)

    @property
    def now(self) -> float:
        return self._clock()

    @property
    def busy(self) -> bool:
        return self.core.has_unfinished

    def add(self, request: TimedRequest) -> None:
        """Raises ValueError for one that is too long."""
        if not self.busy:
            self._scrape_before(request.arrival)
            self._clock.advance_to(request.arrival)
        self._unchanged = False
        self.core.add(request.make())

    def abort(self, request_id: str) -> None:
        self._unchanged = False
        self.core.abort([request_id], RequestStatus.FINISHED_ABORTED)
        self._metrics.record(self.core.stats)

    def step(self) -> Delivery:
        """One step of the engine; what it put out is there at ``now``."""
        plan, output = self.core.step()
        self._scrape_before(self.now)
        self._metrics.record(self.core.stats)
        for finished in self.core.stats.finished:
            self.finished[finished.request_id] = finished
        self._unchanged = True
        joined = self._fast_scheduler.cohort.joined if self._fast_scheduler else ()
        return Delivery(Outputs.of(output.outputs), plan.fast_decodes.count, joined, plan.fast_decodes.left)

    def run_fast_decodes(self, before: float) -> list[float]:
        """Run steps that begin before that moment while all requests are in fast decode. Returns when each of
        them ended; an empty list where there is more to do."""
        ends: list[float] = []
        scheduler, runner, observer = self._fast_scheduler, self._runner, self.core.metrics
        if scheduler is None or not self._unchanged:
            return ends
        latencies: list[float] = []
        usage = scheduler.kv_usage

        def record() -> None:
            if latencies:
                self._metrics.record_decodes(scheduler.num_running, latencies, usage)
                latencies.clear()

        while self.now < before and (decodes := scheduler.plan_fast_decodes()):
            runner.decode(StepLoad.of_decodes(decodes.count, decodes.context))
            if self.now > len(self.scrapes):
                record()
                self._scrape_before(self.now)
            latencies.append(observer.observe_fast_decodes())
            usage = scheduler.kv_usage
            ends.append(self.now)
        record()
        return ends

    def idle_until(self, moment: float) -> None:
        """Nothing happens up to ``moment``, but for scrapes."""
        self._scrape_before(moment)
        self._clock.advance_to(moment)

    def scrape(self) -> str:
        """The metrics now, without those of this process and this day."""
        return self._exposition.render()

    def _scrape_before(self, moment: float) -> None:
        while (due := float(len(self.scrapes))) < moment:
            self.scrapes.append((due, self.scrape()))


def _make_scheduler(config: EngineConfig, num_blocks: int, num_host_blocks: int) -> Scheduler:
    """One with fast decode, where the flags allow it."""
    plain = config.scheduler == "unified" and not num_host_blocks
    if plain and not (config.num_speculative_tokens or config.async_scheduling):
        return FastDecodeScheduler(config, num_blocks, token=TOKEN_ID)
    return make_scheduler(config, num_blocks, num_host_blocks)


def _without_idle(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Raises ConfigError for a flag that is not simulated."""
    given = {name: value for name, value in flags.items() if value is not None}
    for name in sorted(set(given) - SIMULATED_FLAGS - WITHOUT_EFFECT):
        value = given[name]
        idle = not value if isinstance(value, bool) else value == _IDLE.get(name)
        if not idle:
            raise ConfigError(name, value, "it is not simulated", "drop the flag")
    return {name: value for name, value in given.items() if name in SIMULATED_FLAGS - WITHOUT_EFFECT}


def _config(flags: Mapping[str, Any]) -> EngineConfig:
    speculation = flags.get("speculative_config")
    if speculation is not None:
        parsed = SpeculativeConfig.parse(speculation)
        if parsed.uses_model:
            rule = "what a draft model takes is not known here"
            raise ConfigError(
                "speculative_config", f"method={parsed.method}", rule, "simulate ngram or suffix"
            )
        flags = {**flags, "speculative_config": parsed}
    return EngineConfig(**flags)


def _checked(
    config: EngineConfig,
    size: ModelSize,
    times: StepTimes,
    assumed: Sequence[str],
    acceptance: float | None,
) -> Simulation:
    longest = size.max_model_len
    if config.max_model_len is not None and config.max_model_len > longest:
        rule = f"the model was made for at most {longest} tokens"
        raise ConfigError("max_model_len", config.max_model_len, rule, f"lower it to {longest}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a budget that cannot be used up is nothing to print in each trial
        config = config.resolved(longest)
        config.validate()
    chance = DEFAULT_ACCEPTANCE if acceptance is None else acceptance
    return Simulation(config, size, times, tuple(assumed), chance)


def _size_on(model: ModelConfig, sizes: Sizes, count: int, config: EngineConfig) -> ModelSize:
    """What one of ``count`` devices holds. The activations are the widest layer's, and the logits."""
    layers = layer_parameters(model)
    weights = layers * sizes.weights + (model.num_parameters - layers) * 2
    widest = 2 * model.intermediate_size // count + 4 * model.hidden_size
    logits = min(config.max_num_seqs, config.max_num_batched_tokens) * model.vocab_size * LOGIT_BYTES
    return ModelSize(
        weights_bytes=weights // count,
        kv_bytes_per_token=kv_bytes_per_token(model, sizes, count),
        max_model_len=model.max_position_embeddings,
        activation_bytes=config.max_num_batched_tokens * widest * 2 + logits + RESERVED_BYTES,
    )


def _about_drafts(config: EngineConfig, acceptance: float | None) -> tuple[str, ...]:
    if config.speculative_config is None or acceptance is not None:
        return ()
    return (f"a draft is accepted with a chance of {DEFAULT_ACCEPTANCE:.0%}",)


def _count(value: Any, model: ModelConfig) -> int:
    if not isinstance(value, int) or value < 1 or model.num_heads % value:
        rule = f"must divide the model's {model.num_heads} attention heads"
        raise ConfigError("tensor_parallel_size", value, rule, "e.g. 1, 2 or 4")
    return value


def _bytes(flag: str, value: Any, known: Mapping[Any, int]) -> int:
    if value not in known:
        words = ", ".join(str(name) for name in known if name is not None)
        raise ConfigError(flag, value, f"is not simulated; {words} can be", "drop the flag")
    return known[value]

"""The GPU path on the GPU at hand, in a few minutes: is it right, how near the roofline, how many tokens/s.

    python -m benchmarks.engine.gpu [--part correctness|attention|engine] [--json FILE]
    python -m benchmarks.engine.gpu --dry-run     the same code on the CPU, tiny, in Triton's interpreter

1. Every Triton kernel in bf16 and fp16 against its fp32 reference.
2. Attention over the block table: prefill in FLOP/s, decode in bytes/s, as a fraction of the card's public
   peak, and beside torch's SDPA (flash) on contiguous keys and values, which need no table.
3. The bundled model, output tokens/s: eager, with CUDA graphs, with asynchronous scheduling as well; the
   modes in turn, the median of the rounds, and its ratio to eager.

Exit codes: 0 done, 1 a kernel is wrong, 2 no CUDA device.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import torch
import torch.nn.functional as F

from engine.kernels.base import AttentionShape, Kernels
from engine.kernels.cpu import Paged, TorchCache
from engine.kv.kv_format import KV_FORMATS

PEAKS = {
    "H200": (989e12, 4.8e12),
    "H100 PCIe": (756e12, 2.0e12),
    "H100 NVL": (835e12, 3.9e12),
    "H100": (989e12, 3.35e12),
    "A100-SXM4-40GB": (312e12, 1.555e12),
    "A100-PCIE-40GB": (312e12, 1.555e12),
    "A100": (312e12, 2.039e12),
    "B200": (2250e12, 8.0e12),
    "L40S": (362e12, 0.864e12),
    "L4": (121e12, 0.3e12),
    "RTX 4090": (165e12, 1.008e12),
    "MI300X": (1307e12, 5.3e12),
}
"""Dense bf16 FLOP/s and memory bytes/s, from the makers' data sheets; the first name found in the card's."""

LIMIT = {torch.bfloat16: 1.6e-2, torch.float16: 2.5e-3}
"""Largest error, of the largest number: two roundings of the type."""


@dataclass(frozen=True)
class Scale:
    """How much is computed: on a GPU, or in the interpreter."""

    device: torch.device
    prefill: tuple[int, ...]
    decode: tuple[tuple[int, int], ...]
    """Sequences, and tokens of each."""
    concurrency: tuple[int, ...]
    prompt: int
    output: int
    rounds: int


GPU = Scale(
    torch.device("cuda"), (1024, 4096, 16384), ((1, 8192), (16, 4096), (128, 2048)), (1, 32, 256), 256, 128, 3
)
DRY = Scale(torch.device("cpu"), (40,), ((2, 70),), (2,), 10, 3, 1)
LLAMA, TINY = AttentionShape(32, 8, 128, 16, 128**-0.5), AttentionShape(4, 2, 16, 16, 0.25)


@dataclass(frozen=True)
class Problem:
    """A batch whose sequences' last ``counts`` tokens are queries, with a cache full of random numbers."""

    q: torch.Tensor
    cache: TorchCache
    batch: Any
    tiles: list[Any]
    shape: AttentionShape

    def run(self, out: torch.Tensor) -> None:
        from engine.kernels.triton.attention import attention

        for tiles in self.tiles:
            attention(self.q, self.cache, self.batch, tiles, out, self.shape)


def make_problem(
    shape: AttentionShape,
    contexts: Sequence[int],
    counts: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> Problem:
    """Blocks in random order; tiles as the engine cuts them."""
    import numpy as np

    from engine.kernels.base import Batch
    from engine.kernels.triton.kernels import TritonKernels

    torch.manual_seed(0)
    widths = [-(-context // shape.block_size) for context in contexts]
    tables = torch.randperm(sum(widths)).numpy().astype(np.int32)

    def offsets(values: Sequence[int]) -> Any:
        return np.cumsum([0, *values]).astype(np.int32)

    tokens = sum(counts)
    zeros = np.zeros(tokens, dtype=np.int32)
    table = torch.zeros(1, max(contexts) + 1, shape.head_dim // 2)
    kernels = TritonKernels(shape, dtype, table, table, device)
    batch = Batch(zeros, zeros, offsets(counts), np.array(contexts, dtype=np.int32), tables, offsets(widths))
    step = kernels.begin(batch)
    keys, values = (Paged.allocate(shape, dtype, sum(widths), device) for _ in range(2))
    cache = TorchCache(keys, values, kind=0)
    for half in (cache.keys, cache.values):
        stored, scales = shape.kv_format.quantize(torch.randn(half.stored.shape, device=device).to(dtype))
        half.stored.copy_(stored.view(half.stored.dtype))
        if half.scales is not None and scales is not None:
            half.scales.copy_(scales)
    q = torch.randn(tokens, shape.query_size + 2 * shape.kv_size, device=device).to(dtype)
    return Problem(q, cache, step.batch, [step.short, step.long], shape)


Check = tuple[str, float, float]
"""What was checked, its error, and the largest that may be."""


def correctness(scale: Scale) -> list[Check]:
    """Every kernel against its reference, in both types."""
    dry = scale.device.type == "cpu"
    # The interpreter's products in bf16 are wrong.
    types = (torch.float16,) if dry else (torch.bfloat16, torch.float16)
    checks = [
        check for dtype in types for check in (*attention_checks(scale, dtype), *row_checks(scale, dtype))
    ]
    return checks + token_checks(scale)


def attention_checks(scale: Scale, dtype: torch.dtype) -> Iterator[Check]:
    from engine.kernels.triton.attention import attention_reference

    dry = scale.device.type == "cpu"
    shapes = (
        [TINY] if dry else [LLAMA, AttentionShape(9, 3, 64, 32, 0.125), AttentionShape(8, 8, 80, 16, 0.1)]
    )
    base = shapes[0]
    shapes += [
        replace(base, kv_format=kind) for name, kind in KV_FORMATS.items() if name not in ("auto", "bfloat16")
    ]
    shapes += [replace(base, windows=(20,)), replace(base, softcap=30.0)]
    if not dry:
        shapes += [AttentionShape(8, 4, 256, 16, 0.0625, windows=(512,), softcap=50.0)]
    contexts, counts = ([50, 1, 33], [20, 1, 1]) if dry else ([700, 1, 3000, 65, 16], [300, 1, 1, 4, 16])
    for shape in shapes:
        problem = make_problem(shape, contexts, counts, dtype, scale.device)
        out = torch.zeros(len(problem.q), shape.query_size, dtype=dtype, device=scale.device)
        problem.run(out)
        expected = attention_reference(problem.q, problem.cache, problem.batch, shape)
        name = f"attention {shape.num_heads}/{shape.num_kv_heads}x{shape.head_dim} {shape.kv_format.name}"
        features = (f" window {shape.windows[0]}" if shape.windows[0] else "") + (
            " softcap" if shape.softcap else ""
        )
        yield f"{name}{features} {short_name(dtype)}", error(out, expected), LIMIT[dtype]


def row_checks(scale: Scale, dtype: torch.dtype) -> Iterator[Check]:
    from engine.kernels.triton import activation, norm, rope

    device, shape = scale.device, TINY if scale.device.type == "cpu" else LLAMA
    x, weight = (torch.randn(*size, device=device).to(dtype) for size in ((7, 576), (576,)))
    residual, out = torch.randn_like(x), torch.empty_like(x)
    expected, total = norm.rms_norm_reference(x, weight, 1e-5, residual)
    norm.rms_norm(x, weight, 1e-5, out, residual)
    yield f"norm {short_name(dtype)}", error(out, expected), LIMIT[dtype]
    yield f"residual {short_name(dtype)}", error(residual, total), LIMIT[dtype]
    gate_up, out = (
        torch.randn(7, 2 * 640, device=device).to(dtype),
        torch.empty(7, 640, dtype=dtype, device=device),
    )
    for kind in get_args(activation.Activation):
        activation.gate_mul(gate_up, out, kind)
        yield (
            f"{kind} {short_name(dtype)}",
            error(out, activation.gate_mul_reference(gate_up, kind)),
            LIMIT[dtype],
        )
    angles = 10 * torch.rand(64, shape.head_dim // 2, device=device)
    places = torch.arange(20, dtype=torch.int32, device=device)
    for name in ("auto", "fp8", "fp8_per_token_head", "int8_per_token_head"):
        stored = replace(shape, kv_format=KV_FORMATS[name])
        qkv = torch.randn(20, stored.query_size + 2 * stored.kv_size, device=device).to(dtype)
        halves = [Paged.allocate(stored, dtype, 2, device) for _ in range(4)]
        found, wanted = (TorchCache(keys, values, kind=0) for keys, values in (halves[:2], halves[2:]))
        rope.rope_and_store_reference(qkv, wanted, places, places, angles.cos(), angles.sin(), stored)
        rope.rope_and_store(qkv, found, places, places, angles.cos(), angles.sin(), stored)
        table = torch.arange(2, device=device)[None]
        worst = max(
            error(
                getattr(found, half).gather(table, torch.float32).float(),
                getattr(wanted, half).gather(table, torch.float32).float(),
            )
            for half in ("keys", "values")
        )
        # A number between two codes of e4m3 may go to either: its steps are an eighth.
        limit = 0.07 if "fp8" in name else 1.6e-2
        yield f"cache write {name} {short_name(dtype)}", worst, limit


def token_checks(scale: Scale) -> list[Check]:
    """Sampled tokens and verified drafts: the share that differs. Rounding may swap near-equal ones."""
    from engine.kernels.triton import rejection, sampling

    device, rows = scale.device, 4 if scale.device.type == "cpu" else 200
    vocab = 200 if scale.device.type == "cpu" else 49_152
    torch.manual_seed(0)
    logits = 3 * torch.randn(rows, vocab, device=device)
    ones, whole = torch.ones(rows, device=device), torch.arange(rows, dtype=torch.int32, device=device)
    draws = sampling.Draws(0.8 * ones, 0 * whole + 50, 0.9 * ones, 0 * ones, whole.long(), whole)
    expected = sampling.sample_reference(logits, draws)
    wrong = (sampling.sample(logits, draws).cpu() != expected).float().mean()
    target, probs = logits.softmax(-1), (logits + torch.randn_like(logits)).softmax(-1)
    tokens = probs.multinomial(1).squeeze(-1).int()
    start = torch.arange(rows + 1, dtype=torch.int32, device=device)
    drafts = rejection.Drafts(tokens, start, 0 * whole, whole, whole.long(), whole, probs)
    found, counts = rejection.reject(target, drafts, 1)
    emitted = [row[:count] for row, count in zip(found.tolist(), counts.tolist(), strict=True)]
    differ = sum(a != b for a, b in zip(emitted, rejection.reject_reference(target, drafts), strict=True))
    return [
        ("sampled tokens that differ", float(wrong), 0.01),
        ("verified drafts that differ", differ / rows, 0.01),
    ]


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest, of the largest number."""
    return float((found.float() - expected).abs().max() / expected.abs().max())


def short_name(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]


def seconds(run: Callable[[], object], device: torch.device) -> float:
    """Median of some runs after a warm-up; a GPU by its own clock, with the L2 cache flushed before each."""
    run()
    if device.type == "cpu":
        started = time.perf_counter()
        run()
        return time.perf_counter() - started
    flush = torch.empty(256 << 20, dtype=torch.int8, device=device)
    times = []
    for _ in range(20):
        flush.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


def attention_speed(scale: Scale) -> list[dict[str, Any]]:
    """Prefill by FLOP/s and decode by bytes/s, beside SDPA."""
    device, dtype = scale.device, torch.float16 if scale.device.type == "cpu" else torch.bfloat16
    shape = TINY if device.type == "cpu" else LLAMA
    flops, bandwidth = peaks(device)
    rows = []
    for length in scale.prefill:
        work = 4 * shape.query_size * length * (length + 1) / 2
        rows.append(
            measure(f"prefill {length}", shape, [length], [length], dtype, device, work, flops, "TFLOP/s")
        )
    for sequences, length in scale.decode:
        work = 2 * sequences * length * shape.kv_size * dtype.itemsize
        name = f"decode {sequences} x {length}"
        ones = [1] * sequences
        rows.append(measure(name, shape, [length] * sequences, ones, dtype, device, work, bandwidth, "TB/s"))
    return rows


def measure(
    name: str,
    shape: AttentionShape,
    contexts: list[int],
    counts: list[int],
    dtype: torch.dtype,
    device: torch.device,
    work: float,
    peak: float | None,
    unit: str,
) -> dict[str, Any]:
    problem = make_problem(shape, contexts, counts, dtype, device)
    out = torch.empty(len(problem.q), shape.query_size, dtype=dtype, device=device)
    own = seconds(lambda: problem.run(out), device)
    sequences, heads, length = len(contexts), (shape.num_heads, shape.num_kv_heads), contexts[0]
    q = torch.randn(sequences, heads[0], counts[0], shape.head_dim, device=device).to(dtype)
    k, v = torch.randn(2, sequences, heads[1], length, shape.head_dim, device=device).to(dtype)
    causal = counts[0] > 1
    sdpa = seconds(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True), device)
    share = None if peak is None else work / own / peak
    return {"name": name, "ms": own * 1e3, unit: work / own / 1e12, "of_peak": share, "sdpa_ms": sdpa * 1e3}


def peaks(device: torch.device) -> tuple[float | None, float | None]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((peak for part, peak in PEAKS.items() if part in name), (None, None))


MODES = {
    "eager": {"enforce_eager": True},
    "graphs": {},
    "graphs, async": {"async_scheduling": True},
}


def engine_speed(scale: Scale, model: str, flags: dict[str, Any]) -> list[dict[str, Any]]:
    """Output tokens/s of every mode at every concurrency, the modes in turn."""
    from engine.config import EngineConfig
    from engine.core import EngineCore

    most, length = max(scale.concurrency), scale.prompt + scale.output
    blocks = 1 + most * -(-length // 16)
    common = {
        "model": model,
        "max_model_len": length,
        "max_num_seqs": most,
        "max_num_batched_tokens": max(most, min(8192, most * scale.prompt)),
        "num_gpu_blocks_override": blocks,
        "gpu_memory_utilization": 0.3,
        "enable_prefix_caching": False,
        **flags,
    }
    cores = {mode: EngineCore(EngineConfig(**{**common, **own})) for mode, own in MODES.items()}
    rates: dict[tuple[str, int], list[float]] = {}
    for _ in range(scale.rounds + 1):  # the first warms up
        for concurrency in scale.concurrency:
            for mode, core in cores.items():
                rates.setdefault((mode, concurrency), []).append(generate(core, concurrency, scale))
    rows = []
    for (mode, concurrency), found in rates.items():
        median = statistics.median(found[1:])
        eager = statistics.median(rates["eager", concurrency][1:])
        rows.append(
            {"concurrency": concurrency, "mode": mode, "tokens_per_s": median, "of_eager": median / eager}
        )
    return sorted(rows, key=lambda row: row["concurrency"])


def generate(core: Any, concurrency: int, scale: Scale) -> float:
    """Output tokens/s of so many requests at once, prompts included in the time."""
    from engine.request import Request, SamplingParams

    sampling = SamplingParams(max_tokens=scale.output, temperature=0.0, ignore_eos=True)
    started = time.perf_counter()
    for place in range(concurrency):
        prompt = [3 + (place + 7 * i) % 50 for i in range(scale.prompt)]
        core.add(Request(f"{started}-{place}", prompt, sampling))
    tokens = 0
    while core.has_unfinished:
        _, output = core.step()
        tokens += sum(len(item.token_ids) for item in output.outputs)
    return tokens / (time.perf_counter() - started)


def dry_model(folder: Path) -> str:
    """A config for random weights."""
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
    config = {"architectures": ["LlamaForCausalLM"], **sizes, **heads, "torch_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(folder)


def interpreted(
    shape: AttentionShape,
    dtype: torch.dtype,
    cos: torch.Tensor,
    sin: torch.Tensor,
    int8: bool = False,
    graph_sizes: Sequence[int] = (),
) -> Kernels:
    """The GPU's kernels on the CPU, for the dry run: without int8 and graphs."""
    from engine.kernels.triton.kernels import TritonKernels

    return TritonKernels(shape, dtype, cos, sin, torch.device("cpu"))


def run_engine(scale: Scale) -> list[dict[str, Any]]:
    if scale.device.type == "cuda":
        from engine.models.bundled import fetch_bundled

        return engine_speed(scale, str(fetch_bundled()), {"dtype": "bfloat16"})
    import engine.runner

    engine.runner.make_kernels = interpreted
    with tempfile.TemporaryDirectory() as folder:
        return engine_speed(scale, dry_model(Path(folder)), {"load_format": "dummy", "dtype": "float32"})


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=("correctness", "attention", "engine"), help="only this part")
    parser.add_argument("--dry-run", action="store_true", help="tiny, on the CPU, in Triton's interpreter")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE as well")
    chosen = parser.parse_args(arguments)
    if chosen.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"
    elif not torch.cuda.is_available():
        print("no CUDA device: nothing is measured (--dry-run shows that the code runs)", file=sys.stderr)
        return 2
    scale = DRY if chosen.dry_run else GPU
    with torch.inference_mode():
        figures = {part: run(scale) for part, run in PARTS.items() if chosen.part in (None, part)}
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return report(figures, scale)


PARTS: dict[str, Callable[[Scale], Any]] = {
    "correctness": correctness,
    "attention": attention_speed,
    "engine": run_engine,
}


def report(figures: dict[str, Any], scale: Scale) -> int:
    """Print the tables. 1 if a kernel is wrong."""
    name = torch.cuda.get_device_name() if scale.device.type == "cuda" else "Triton's interpreter (a dry run)"
    print(f"on {name}, torch {torch.__version__}")
    wrong = 0
    for what, found, limit in figures.get("correctness", ()):
        verdict = "ok" if found <= limit else "WRONG"
        wrong += found > limit
        print(f"{what:56} error {found:.1e} of at most {limit:.1e}  {verdict}")
    for row in figures.get("attention", ()):
        unit = "TFLOP/s" if "TFLOP/s" in row else "TB/s"
        share = "no public peak known" if row["of_peak"] is None else f"{row['of_peak']:.0%} of peak"
        ratio = row["sdpa_ms"] / row["ms"]
        print(f"{row['name']:18} {row['ms']:9.3f} ms {row[unit]:8.3f} {unit:8} {share:21} {ratio:.2f}x SDPA")
    for row in figures.get("engine", ()):
        print(
            f"{row['concurrency']:4} requests, {row['mode']:14} {row['tokens_per_s']:9.1f} output tokens/s "
            f"{row['of_eager']:.2f}x eager"
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

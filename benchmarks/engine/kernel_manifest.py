"""What the Triton kernels compile to, without a GPU: registers, spills, shared memory, matrix instructions.

    python -m benchmarks.engine.kernel_manifest            compile everything and compare with the manifest
    python -m benchmarks.engine.kernel_manifest --write    and write it anew (some minutes)
    python -m benchmarks.engine.kernel_manifest --only "llama" --target sm_90

Kernels are compiled for exactly what they are launched with: launches run on small tensors of the CPU, with
Triton's launcher replaced by one that writes down its arguments. Targets: sm_80 (A100), sm_90 (H100, H200),
sm_100 (B200), gfx942 (MI300X). Exit code 1: something spills, is too large, or differs from the manifest.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from engine.kernels.base import AttentionShape
from engine.kernels.cpu import Paged, TorchCache
from engine.kernels.triton import activation, attention, norm, rejection, rope, sampling
from engine.kv.kv_format import KV_FORMATS

MANIFEST = Path(__file__).with_suffix(".json")
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
SHARED_LIMIT = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10}
"""Bytes of shared memory a block may have (CUDA C programming guide, compute capabilities; CDNA 3 ISA)."""

LLAMA = AttentionShape(32, 8, 128, 16, 128**-0.5)
SHAPES = {
    "llama": LLAMA,
    "llama fp8": replace(LLAMA, kv_format=KV_FORMATS["fp8"]),
    "llama int8_per_token_head": replace(LLAMA, kv_format=KV_FORMATS["int8_per_token_head"]),
    "smollm2": AttentionShape(9, 3, 64, 32, 64**-0.5),
    "head 80": AttentionShape(32, 32, 80, 16, 80**-0.5),
    "gemma": AttentionShape(8, 4, 256, 16, 256**-0.5, windows=(4096,), softcap=50.0),
}


@dataclass(frozen=True)
class Launch:
    """A kernel with the arguments that it is launched with."""

    case: str
    kernel: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]


@dataclass(frozen=True)
class Compiled:
    """One line of the manifest. ``spills``: bytes of registers kept in memory (AMD: registers)."""

    case: str
    kernel: str
    target: str
    num_warps: int
    registers: int
    spills: int
    shared: int
    mma: str
    """The tensor-core instruction that it has most of, "" for none."""

    @property
    def key(self) -> tuple[str, str, str]:
        return self.case, self.kernel, self.target

    @property
    def faults(self) -> list[str]:
        found = [f"{self.spills} spilled"] if self.spills else []
        if self.shared > (limit := SHARED_LIMIT[self.target]):
            found.append(f"{self.shared} bytes of shared memory, {limit} are to be had")
        if self.target == "sm_90" and self.case.endswith("prefill") and self.mma != "wgmma":
            found.append(f"prefill multiplies with {self.mma or 'nothing'}, not wgmma")
        return found


def attend(shape: AttentionShape, short: bool, segments: int = 1) -> None:
    """Launch attention for 64 tokens of one sequence each."""
    numbers = torch.zeros(64, dtype=torch.int32)
    tiling = (attention.short_tiling if short else attention.long_tiling)(shape, 2)
    q = torch.zeros(64, shape.query_size + 2 * shape.kv_size, dtype=torch.bfloat16)
    out = torch.zeros(64, shape.query_size, dtype=torch.bfloat16)
    batch = attention.Ragged(numbers, numbers, numbers, numbers)
    tiles = attention.Tiles(numbers, numbers, tiling, segments)
    attention.attention(q, make_cache(shape), batch, tiles, out, shape)


def make_cache(shape: AttentionShape) -> TorchCache:
    keys, values = (Paged.allocate(shape, torch.bfloat16, 2) for _ in range(2))
    return TorchCache(keys, values, kind=0)


def rotate(shape: AttentionShape) -> None:
    numbers, table = torch.zeros(64, dtype=torch.int32), torch.zeros(64, shape.head_dim // 2)
    qkv = torch.zeros(64, shape.query_size + 2 * shape.kv_size, dtype=torch.bfloat16)
    rope.rope_and_store(qkv, make_cache(shape), numbers, numbers, table, table, shape)


def normalise(width: int, residual: bool) -> None:
    x = torch.zeros(64, width, dtype=torch.bfloat16)
    norm.rms_norm(x, x[0], 1e-5, x, x if residual else None)


def gate(kind: activation.Activation) -> None:
    activation.gate_mul(
        torch.zeros(64, 28672, dtype=torch.bfloat16), torch.zeros(64, 14336, dtype=torch.bfloat16), kind
    )


def choose(vocab: int) -> None:
    real, whole = torch.ones(64), torch.ones(64, dtype=torch.int32)
    draws = sampling.Draws(real, whole, real, real, torch.ones(64, dtype=torch.int64), whole)
    sampling.sample(torch.zeros(64, vocab), draws)


def verify(vocab: int, drawn: bool) -> None:
    whole, probs = torch.ones(64, dtype=torch.int32), torch.zeros(64, vocab)
    seed = torch.ones(64, dtype=torch.int64)
    drafts = rejection.Drafts(whole, whole, whole, whole, seed, whole, probs if drawn else None)
    rejection.reject(probs, drafts, 4)


def cases() -> Iterator[tuple[str, Callable[[], None]]]:
    for name, shape in SHAPES.items():
        yield f"{name} prefill", partial(attend, shape, short=False)
        yield f"{name} decode, split", partial(attend, shape, short=True, segments=8)
        yield f"{name} cache write", partial(rotate, shape)
    yield "llama decode", lambda: attend(LLAMA, short=True)
    for width in (576, 4096, 8192):
        yield f"norm of {width}", partial(normalise, width, residual=False)
    yield "norm of 4096 with residual", lambda: normalise(4096, residual=True)
    yield "silu", lambda: gate("silu")
    yield "gelu", lambda: gate("gelu_tanh")
    yield "sample", lambda: choose(128_256)
    yield "verify certain drafts", lambda: verify(128_256, drawn=False)
    yield "verify drawn drafts", lambda: verify(128_256, drawn=True)


def launches() -> list[Launch]:
    """Every launch of every case. Replaces Triton's launcher meanwhile."""
    found: list[Launch] = []
    calls: list[tuple[Any, ...]] = []

    def record(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        calls.append((kernel, arguments, options))

    launcher, JITFunction.run = JITFunction.run, record
    try:
        for case, launch in cases():
            calls.clear()
            launch()
            found += [Launch(case, *call) for call in calls]
    finally:
        JITFunction.run = launcher
    return found


def compile_for(launch: Launch, target: str) -> Compiled:
    """Compile as the launcher would on such a device."""
    kernel, backend = launch.kernel, make_backend(TARGETS[target])
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, options = bind(*launch.arguments, **launch.options)
    options, signature, constexprs, attrs = kernel._pack_args(
        backend, launch.options, bound, specialization, options
    )
    source = ASTSource(kernel, signature, constexprs, attrs)
    made = triton.compile(source, target=TARGETS[target], options=options.__dict__)
    if target.startswith("sm"):
        (registers, spills), mma = cuda_usage(made.asm["cubin"]), most_frequent(made.asm["ptx"])
    else:
        (registers, spills), mma = amd_usage(made.asm["amdgcn"]), most_frequent(made.asm["amdgcn"])
    warps, shared = made.metadata.num_warps, made.metadata.shared
    return Compiled(launch.case, kernel.__name__, target, warps, registers, spills, shared, mma)


def cuda_usage(cubin: bytes) -> tuple[int, int]:
    """Registers, and bytes of local memory, by cuobjdump of the wheel."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    report = done.stdout + done.stderr
    return number_behind("REG:", report), number_behind("STACK:", report) + number_behind("LOCAL:", report)


def amd_usage(assembly: str) -> tuple[int, int]:
    """Vector registers, and how many of them were spilled to memory."""
    return number_behind(r"\.vgpr_count: +", assembly), number_behind(r"\.vgpr_spill_count: +", assembly)


def number_behind(pattern: str, text: str) -> int:
    found = re.search(pattern + r"(\d+)", text)
    assert found is not None, f"no {pattern} in what the compiler's tool says"
    return int(found[1])


def most_frequent(assembly: str) -> str:
    """The tensor-core instruction that there is most of."""
    names = {"wgmma": "wgmma.mma_async", "tcgen05": "tcgen05.mma", "mma": "mma.sync", "mfma": "v_mfma"}
    counts = {name: assembly.count(text) for name, text in names.items()}
    best = max(counts, key=counts.__getitem__)
    return best if counts[best] else ""


def read_manifest() -> tuple[str, list[Compiled]]:
    """The Triton version that it was made with, and its lines."""
    content = json.loads(MANIFEST.read_text(encoding="utf-8"))
    return content["triton"], [Compiled(**line) for line in content["kernels"]]


def keys_of(known: Sequence[Launch]) -> list[tuple[str, str, str]]:
    """Of the lines that the manifest is to have."""
    return [(launch.case, launch.kernel.__name__, target) for launch in known for target in TARGETS]


def write_manifest(found: Sequence[Compiled], known: Sequence[Launch]) -> None:
    """Put lines in the place of the old ones; lines that nothing launches any more are dropped."""
    kept = read_manifest()[1] if MANIFEST.exists() else []
    lines = {line.key: line for line in (*kept, *found)}
    text = ",\n  ".join(json.dumps(asdict(lines[key])) for key in keys_of(known) if key in lines)
    MANIFEST.write_text(
        f'{{"triton": "{triton.__version__}", "kernels": [\n  {text}\n]}}\n', encoding="utf-8"
    )


def differences(found: Sequence[Compiled], known_launches: Sequence[Launch]) -> list[str]:
    """What the manifest lacks or should not have; where the same Triton made both, how lines differ."""
    version, lines = read_manifest()
    listed = {line.key for line in lines}
    wanted = set(keys_of(known_launches))
    if listed != wanted:
        return [
            f"{key}: only in the {'manifest' if key in listed else 'code'}" for key in sorted(listed ^ wanted)
        ]
    if version != triton.__version__:
        return []
    known = {line.key: line for line in lines}
    return [
        f"{line.key}: {line}, the manifest has {known.get(line.key)}"
        for line in found
        if known.get(line.key) != line
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="renew these lines of the manifest")
    parser.add_argument("--only", default="", metavar="REGEX", help="only cases that match")
    parser.add_argument(
        "--target", choices=TARGETS, action="append", help="only this target; may be repeated"
    )
    chosen = parser.parse_args(arguments)
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    found = []
    with tempfile.TemporaryDirectory() as cache:
        triton.knobs.cache.dir = cache
        known = launches()
        for launch in known:
            if re.search(chosen.only, launch.case):
                for target in chosen.target or TARGETS:
                    found.append(compile_for(launch, target))
                    print_line(found[-1])
    if chosen.write:
        write_manifest(found, known)
    faults = [f"{line.key}: {fault}" for line in found for fault in line.faults]
    problems = faults + ([] if chosen.write else differences(found, known))
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


def print_line(line: Compiled) -> None:
    print(
        f"{line.case:34} {line.kernel:16} {line.target:7} {line.num_warps:2} warps "
        f"{line.registers:4} registers {line.spills:3} spilled {line.shared:7} bytes shared {line.mma}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())

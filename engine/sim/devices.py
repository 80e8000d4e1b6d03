"""Accelerators by their data sheets, and what a step takes on them: estimates without the hardware."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.sim.step_times import StepTimes

if TYPE_CHECKING:
    from engine.models.model_config import ModelConfig

MIB = 1 << 20
FITTED = "fitted to published runs of vLLM 0.15 on H100, A100 and L40S: see docs/simulate.md"
"""Where the constants are from that no data sheet has: five for all devices, none for a single one."""


@dataclass(frozen=True)
class Device:
    """What a roofline needs to know of an accelerator. ``sources``: where each number is from."""

    name: str
    memory_bytes: int
    """As the driver reports it; data sheets round."""
    flops: float
    """Dense bfloat16 matrix FLOP/s, as the maker states them."""
    fp8_flops: float | None
    """The same in fp8; None: it has none, and computes in bfloat16 what is stored in fp8."""
    bytes_per_second: float
    """Bytes per second of its memory."""
    host_bytes_per_second: float
    """Bytes per second of its link to the host, one direction."""
    link_bytes_per_second: float
    """Bytes per second of its links to the other devices of a server, one direction."""
    sources: Mapping[str, str]
    attainable_flops: float = 0.9
    attainable_bandwidth: float = 0.75
    """Shares of the stated peaks that kernels reach; fitted (see FITTED)."""
    host: float = 1e-3
    """Seconds of scheduling and preparation per step; an assumption."""
    host_per_sequence: float = 8e-6
    launch: float = 1e-3
    """Seconds of a step that are neither products nor reading; fitted."""
    all_reduce: float = 4e-6
    """Seconds of a sum over the devices before any byte is moved; fitted."""
    entry: float = 12.1e-3
    """Seconds in the API server, of a request and its answers; fitted."""

    @property
    def batch_defaults(self) -> dict[str, int]:
        """The API server's by the device's memory in vLLM 0.28 and later (``EngineArgs.get_batch_defaults``):
        from 160 GiB on the largest, from 70 GiB on larger ones, but for the A100."""
        if self.memory_bytes >= 160 << 30:
            return {"max_num_batched_tokens": 16384, "max_num_seqs": 1024}
        if self.memory_bytes >= 70 << 30 and "A100" not in self.name:
            return {"max_num_batched_tokens": 8192, "max_num_seqs": 1024}
        return {"max_num_batched_tokens": 2048, "max_num_seqs": 256}


_PCIE4, _PCIE5 = "PCI Express 4.0 x16, one direction", "PCI Express 5.0 x16, one direction"
_A100 = "NVIDIA A100 data sheet"
_H100 = "NVIDIA H100 data sheet"


def _a100(name: str, memory_mib: int, bytes_per_second: float, stated: str) -> Device:
    return Device(
        name=name,
        memory_bytes=memory_mib * MIB,
        flops=312e12,
        fp8_flops=None,
        bytes_per_second=bytes_per_second,
        host_bytes_per_second=32e9,
        link_bytes_per_second=300e9,
        sources={
            "memory_bytes": f"nvidia-smi: {memory_mib} MiB",
            "flops": f"{_A100}: bfloat16 tensor core 312 TFLOP/s (624 with sparsity)",
            "fp8_flops": f"{_A100}: no fp8",
            "bytes_per_second": f"{_A100}: {stated}",
            "host_bytes_per_second": _PCIE4,
            "link_bytes_per_second": f"{_A100}: NVLink 600 GB/s, half of it each way",
        },
    )


A100_40 = _a100("A100 SXM 40 GB", 40_960, 1.555e12, "1,555 GB/s")
A100_80 = _a100("A100 SXM 80 GB", 81_920, 2.039e12, "2,039 GB/s")
H100_SXM = Device(
    name="H100 SXM",
    memory_bytes=81_559 * MIB,
    flops=989.4e12,
    fp8_flops=1978.9e12,
    bytes_per_second=3.35e12,
    host_bytes_per_second=64e9,
    link_bytes_per_second=450e9,
    sources={
        "memory_bytes": "nvidia-smi: 81559 MiB",
        "flops": f"{_H100}: bfloat16 tensor core 1,979 TFLOP/s with sparsity, half of it dense",
        "fp8_flops": f"{_H100}: fp8 tensor core 3,958 TFLOP/s with sparsity, half of it dense",
        "bytes_per_second": f"{_H100}: 3.35 TB/s",
        "host_bytes_per_second": _PCIE5,
        "link_bytes_per_second": f"{_H100}: NVLink 900 GB/s, half of it each way",
    },
)
H100_PCIE = Device(
    name="H100 PCIe",
    memory_bytes=81_559 * MIB,
    flops=756.5e12,
    fp8_flops=1513e12,
    bytes_per_second=2.0e12,
    host_bytes_per_second=64e9,
    link_bytes_per_second=64e9,
    sources={
        "memory_bytes": "nvidia-smi: 81559 MiB",
        "flops": f"{_H100}: bfloat16 tensor core 1,513 TFLOP/s with sparsity, half of it dense",
        "fp8_flops": f"{_H100}: fp8 tensor core 3,026 TFLOP/s with sparsity, half of it dense",
        "bytes_per_second": f"{_H100}: 2 TB/s",
        "host_bytes_per_second": _PCIE5,
        "link_bytes_per_second": f"{_PCIE5}; an NVLink bridge would join pairs only",
    },
)
H200 = Device(
    name="H200 SXM",
    memory_bytes=143_771 * MIB,
    flops=989.4e12,
    fp8_flops=1978.9e12,
    bytes_per_second=4.8e12,
    host_bytes_per_second=64e9,
    link_bytes_per_second=450e9,
    sources={
        "memory_bytes": "nvidia-smi: 143771 MiB",
        "flops": "NVIDIA H200 data sheet: bfloat16 tensor core 1,979 TFLOP/s with sparsity, half of it dense",
        "fp8_flops": "NVIDIA H200 data sheet: fp8 tensor core 3,958 TFLOP/s with sparsity, half of it dense",
        "bytes_per_second": "NVIDIA H200 data sheet: 4.8 TB/s",
        "host_bytes_per_second": _PCIE5,
        "link_bytes_per_second": "NVIDIA H200 data sheet: NVLink 900 GB/s, half of it each way",
    },
)
B200 = Device(
    name="B200",
    memory_bytes=183_359 * MIB,
    flops=2.25e15,
    fp8_flops=4.5e15,
    bytes_per_second=8e12,
    host_bytes_per_second=64e9,
    link_bytes_per_second=900e9,
    sources={
        "memory_bytes": "nvidia-smi: 183359 MiB",
        "flops": "half of fp8's",
        "fp8_flops": "NVIDIA DGX B200 data sheet: 72 PFLOP/s with sparsity, an eighth each, half of it dense",
        "bytes_per_second": "NVIDIA DGX B200 data sheet: 64 TB/s, an eighth each",
        "host_bytes_per_second": _PCIE5,
        "link_bytes_per_second": "NVIDIA DGX B200 data sheet: 14.4 TB/s, an eighth each, half of it each way",
    },
)
L40S = Device(
    name="L40S",
    memory_bytes=46_068 * MIB,
    flops=362.05e12,
    fp8_flops=733e12,
    bytes_per_second=864e9,
    host_bytes_per_second=32e9,
    link_bytes_per_second=32e9,
    sources={
        "memory_bytes": "nvidia-smi: 46068 MiB",
        "flops": "NVIDIA L40S data sheet: bfloat16 tensor core 362.05 TFLOP/s (733 with sparsity)",
        "fp8_flops": "NVIDIA L40S data sheet: fp8 tensor core 733 TFLOP/s (1,466 with sparsity)",
        "bytes_per_second": "NVIDIA L40S data sheet: 864 GB/s",
        "host_bytes_per_second": _PCIE4,
        "link_bytes_per_second": f"NVIDIA L40S data sheet: no NVLink; {_PCIE4}",
    },
)
MI300X = Device(
    name="MI300X",
    memory_bytes=196_592 * MIB,
    flops=1307.4e12,
    fp8_flops=2614.9e12,
    bytes_per_second=5.3e12,
    host_bytes_per_second=64e9,
    link_bytes_per_second=448e9,
    sources={
        "memory_bytes": "rocm-smi: 196592 MiB",
        "flops": "AMD Instinct MI300X data sheet: bfloat16 matrix 1,307.4 TFLOP/s",
        "fp8_flops": "AMD Instinct MI300X data sheet: fp8 matrix 2,614.9 TFLOP/s",
        "bytes_per_second": "AMD Instinct MI300X data sheet: 5.3 TB/s",
        "host_bytes_per_second": _PCIE5,
        "link_bytes_per_second": "AMD Instinct MI300X data sheet: 7 links of 128 GB/s, half of it each way",
    },
)
DEVICES: Mapping[str, Device] = {
    "a100-40": A100_40,
    "a100": A100_80,
    "h100": H100_SXM,
    "h100-pcie": H100_PCIE,
    "h200": H200,
    "b200": B200,
    "l40s": L40S,
    "mi300x": MI300X,
}
"""By the names of the command line."""


@dataclass(frozen=True)
class Sizes:
    """Bytes of an element."""

    weights: int = 2
    """Bytes per number of the layers' weights. The embedding and the head always have two."""
    kv: int = 2


def layer_parameters(model: ModelConfig) -> int:
    """Numbers in the layers: everything but the embedding and the head."""
    head = model.vocab_size * model.hidden_size
    return model.num_parameters - head * (1 if model.tie_word_embeddings else 2)


def kv_bytes_per_token(model: ModelConfig, sizes: Sizes, tensor_parallel_size: int = 1) -> int:
    """On each device: KV heads are shared out, and repeated where there are fewer than devices."""
    heads = max(1, model.num_kv_heads // tensor_parallel_size)
    return 2 * model.num_layers * heads * model.head_dim * sizes.kv


def work_ratios(model: ModelConfig) -> tuple[float, float]:
    """What of a step's work is in proportion to what, on every device: a query-key pair of attention to the
    linear layers of a token, and reading the keys and values of a token to reading all weights, where both
    are of one type."""
    layers, sizes = layer_parameters(model), Sizes()
    head = model.vocab_size * model.hidden_size
    pair = 2 * model.num_layers * model.num_heads * model.head_dim / layers
    return pair, kv_bytes_per_token(model, sizes) / (sizes.weights * (layers + head))


def roofline(
    model: ModelConfig,
    device: Device,
    *,
    block_size: int = 16,
    sizes: Sizes | None = None,
    tensor_parallel_size: int = 1,
) -> StepTimes:
    """An estimate from first principles: 2 FLOP per weight and token, every weight read once per step, every
    key and value once per sequence, 4 FLOP per query-key pair and head element (Q K^T and P V).

    Devices in parallel share all of that evenly and sum their activations twice a layer: a ring moves 2 (n -
    1) / n of the bytes over each link, after a fixed delay.
    """
    sizes, count = sizes or Sizes(), tensor_parallel_size
    flops = device.flops * device.attainable_flops * count
    narrow = device.fp8_flops is not None and sizes.weights == 1
    layer_flops = flops * (device.fp8_flops / device.flops if narrow and device.fp8_flops else 1)
    bandwidth = device.bytes_per_second * device.attainable_bandwidth
    head = model.vocab_size * model.hidden_size
    layers = layer_parameters(model)
    kv_bytes = kv_bytes_per_token(model, sizes, count)
    sums = 2 * model.num_layers if count > 1 else 0
    moved = sums * model.hidden_size * 2 * 2 * (count - 1) / count
    return StepTimes(
        host=device.host,
        host_per_sequence=device.host_per_sequence,
        launch=device.launch + sums * device.all_reduce,
        weights=(layers * sizes.weights + head * 2) / (bandwidth * count),
        per_token=2 * layers / layer_flops,
        per_row=2 * head / flops,
        per_exchanged_token=moved / (device.link_bytes_per_second * device.attainable_bandwidth),
        per_context=kv_bytes / bandwidth,
        per_pair=4 * model.num_layers * model.num_heads * model.head_dim / flops,
        per_moved_block=kv_bytes * block_size / device.host_bytes_per_second,
        entry=device.entry,
        source=f"roofline of {f'{count} x ' if count > 1 else ''}{device.name} (estimate)",
    )

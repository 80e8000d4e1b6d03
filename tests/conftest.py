"""Settings every test shares; they must be in place before torch is imported."""

import gc
import os
import signal
from pathlib import Path

import pytest
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# What the tests test is the same everywhere; benchmarks/engine/gpu.py is for a GPU.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a job of a shell's background, for children too
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile(
    "vtune", deadline=None, derandomize=True
)  # the same examples each time, however long
settings.load_profile("vtune")

LONG = (
    "tuner/workers/test_shared_processes.py",
    "engine/models/test_fidelity.py",
    "tuner/study/test_processes.py",
    "engine/scheduling/test_invariants.py",
    "engine/server/test_server_lifecycle.py",
    "tuner/workers/test_scale_out.py",
    "tuner/session/test_connections.py",
    "doctor/diagnosis/test_bundled_engine.py",
    "doctor/diagnosis/test_fault_injection.py",
    "tuner/study/test_optimize.py",
    "engine/structured/test_structured_outputs.py",
    "engine/kernels/test_native_threads.py",
    "engine/kernels/test_kernel_manifest.py",
    "tuner/study/test_keeps_budget.py",
    "engine/kernels/test_triton_model.py",
    "engine/scheduling/test_decode_fast_path.py",
    "tuner/study/test_vllm_study.py",
    "engine/kernels/test_gpu_benchmark.py",
    "doctor/export/test_doctor_export.py",
)
"""Files that take longest, most of them of few tests. They are handed out first: at the end one of two
workers would wait for the other."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    tests = Path(__file__).parent
    ranks = {tests / name: rank for rank, name in enumerate(LONG)}
    items.sort(key=lambda item: ranks.get(item.path, len(LONG)))


def pytest_collection_finish() -> None:
    """What is imported by now stays: the full collection before every load need not look at it each time."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Or extensions complain at the end that what they made is never freed."""
    gc.unfreeze()

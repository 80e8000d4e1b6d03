"""Settings every test shares; they must be in place before torch is imported."""

import os
import signal

from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# What the tests test is the same everywhere; benchmarks/gpu.py is for a GPU.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a job of a shell's background, for children too
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile(
    "vtune", deadline=None, derandomize=True
)  # the same examples each time, however long
settings.load_profile("vtune")

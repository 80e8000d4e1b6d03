"""Triton kernels: the CUDA (and ROCm) path.

Each file holds a kernel, its launch, and what it has to equal in plain fp32 torch. Nothing here is imported
without a GPU, so that the engine needs no triton elsewhere; the tests run the kernels in Triton's interpreter
(``TRITON_INTERPRET=1``, set before the first import of triton) and compile them ahead of time. Launches ask
for ``enable_fp_fusion``, since its default differs between versions of Triton.
"""

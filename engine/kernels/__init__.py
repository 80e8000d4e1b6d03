"""CPU and Triton kernels."""

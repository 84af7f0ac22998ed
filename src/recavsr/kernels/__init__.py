"""Triton kernels for CUDA cards. Each stands behind a function that has a plain PyTorch form."""

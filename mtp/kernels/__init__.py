"""Every Triton kernel of the package, each beside its PyTorch twin: its reference, and what runs without a GPU."""

import torch


def has_kernels(x: torch.Tensor) -> bool:
    """Whether work on this tensor is a kernel's."""
    return x.is_cuda

"""Where this package's Triton kernels run. Everywhere else their PyTorch versions do, which are the reference too."""

import torch


def has_kernels(x: torch.Tensor) -> bool:
    """Whether work on this tensor is a kernel's."""
    return x.is_cuda

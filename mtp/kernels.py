"""Where this package's Triton kernels run: on CUDA, and anywhere under `TRITON_INTERPRET=1`.

Everywhere else their PyTorch versions do, which are the reference too.
"""

import os

import torch
from vllm.triton_utils import HAS_TRITON

INTERPRETED = HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"


def has_kernels(x: torch.Tensor) -> bool:
    """Whether work on this tensor is a kernel's."""
    return x.is_cuda or INTERPRETED

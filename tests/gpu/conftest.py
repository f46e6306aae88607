from typing import Any

import numpy as np
import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config


@pytest.fixture
def vllm_config():
    config = VllmConfig()
    with set_current_vllm_config(config):
        yield config


@pytest.fixture(autouse=True)
def with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU, Triton's interpreter runs them (`tests/engine/test_interpreted_kernels.py`)."""
    if not torch.cuda.is_available():
        for module in ("slots", "decoder", "window", "static_inputs", "fp8_weights"):
            monkeypatch.setattr(f"mtp.kernels.{module}.has_kernels", lambda x: True)


@pytest.fixture(autouse=True)
def products_of_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter has bfloat16 as integers of 16 bits, and multiplies these."""
    if torch.cuda.is_available():
        return
    from triton.language import bfloat16, float32
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    original = InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return original(self, _widened(a), _widened(b), *rest)

    def _widened(x: Any) -> Any:
        if x.dtype.scalar is not bfloat16:
            return x
        return TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), float32)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)

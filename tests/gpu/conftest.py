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
        for module in ("slots", "decoder", "window", "static_inputs"):
            monkeypatch.setattr(f"mtp.kernels.{module}.has_kernels", lambda x: True)

import pytest
from vllm.config import VllmConfig, set_current_vllm_config


@pytest.fixture
def vllm_config():
    config = VllmConfig()
    with set_current_vllm_config(config):
        yield config

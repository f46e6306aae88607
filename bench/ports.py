"""The name under which `tests/engine/test_readme.py` still imports vLLM's `get_open_port`."""

from vllm.utils.network_utils import get_open_port as free_port

__all__ = ["free_port"]

"""Step-3.5's modules with their kernels against vLLM's own, in a real engine."""

import pytest

from tests import scenarios
from tests.engine import mtp, run

# The tiny model's heads are none of FlashAttention's sizes.
TRITON = {
    "attention_config": {"backend": "TRITON_ATTN"},
    "gpu_memory_utilization": 0.1,
    "kv_cache_memory_bytes": 1 << 30,
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_modules_of_fewer_launches_compute_what_the_hosts_do(dtype: str) -> None:
    engine = TRITON | mtp(3, attention_backend="TRITON_ATTN") | {"dtype": dtype}
    value = run(scenarios.modules_against_the_hosts, engine, as_with_kernels=False).value
    assert value["fused"]
    assert value["one product"]
    assert value["wanted rows"][-1] < value["rows"][-1] / 3
    assert max(value["largest"]) < (1e-4 if dtype == "float32" else 0.1), value["largest"]

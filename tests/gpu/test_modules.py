"""Step-3.5's modules with their kernels against vLLM's own, in a real engine."""

from tests.support import scenarios
from tests.support.engine import mtp, run

# The tiny model's heads are none of FlashAttention's sizes.
ENGINE = {
    "attention_config": {"backend": "TRITON_ATTN"},
    "gpu_memory_utilization": 0.1,
    "kv_cache_memory_bytes": 1 << 30,
}


def test_modules_of_fewer_launches_compute_what_the_hosts_do() -> None:
    engine = ENGINE | mtp(3, attention_backend="TRITON_ATTN")
    value = run(scenarios.modules_against_the_hosts, engine, as_with_kernels=False).value
    assert value["fused"]
    # The first one has six heads, and with as many gates rows would not lie on 16 bytes.
    assert value["one product"] == [False, True, True]
    assert value["wanted rows"][-1] < value["rows"][-1] / 3
    assert max(value["largest"]) < 1e-4, value["largest"]

"""Step-3.5's modules with their kernels against vLLM's own, in a real engine."""

from tests.support import scenarios
from tests.support.engine_arguments import ENGINE_ON_CUDA, mtp
from tests.support.forked_engine import run


def test_modules_of_fewer_launches_compute_what_the_hosts_do() -> None:
    engine = ENGINE_ON_CUDA | mtp(3, attention_backend="TRITON_ATTN")
    value = run(scenarios.modules_against_the_hosts, engine, as_with_kernels=False).value
    assert value["fused"]
    # The first one has six heads: with six gates beside them rows would not be aligned to 16 bytes.
    assert value["one GEMM"] == [False, True, True]
    assert value["wanted rows"][-1] < value["rows"][-1] / 3
    assert max(value["largest"]) < 1e-4, value["largest"]

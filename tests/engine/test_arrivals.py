"""What `bench gpu --arrivals` notes of an engine's steps. (Its profile is CUDA's, and is looked at there.)"""

from typing import Any

import pytest

from bench.workers.arrivals import run_arrivals, summarise_steps, watch_steps
from bench.workers.host_parts import REST
from tests.support.forked_engine import run


def arrivals(llm: Any) -> dict[str, Any]:
    log = watch_steps(llm, prompt_tokens=20)
    spec = {"arrivals": 3, "output_tokens": 8, "vocab_size": 256}
    tokens, _ = run_arrivals(llm.llm_engine, spec, 20, 2, "arrivals")
    steps = list(log.steps())
    found = summarise_steps(steps)
    lost = [abs(sum(step.host_ms.values()) - step.step_ms) for step in steps]
    return {"tokens": tokens, "lost_ms": max(lost), "rests": [step.host_ms[REST] for step in steps], **found}


@pytest.mark.parametrize("v2", [False, True], ids=["v1", "v2"])
def test_a_step_is_the_sum_of_its_parts(v2: bool) -> None:
    found = run(arrivals, {"speculative_config": {"method": "mtp", "num_speculative_tokens": 3}}, v2=v2).value
    assert found["tokens"] >= 6 * 4
    assert found["lost_ms"] < 1e-6
    assert min(found["rests"]) > 0  # a part that is counted twice would take it from here
    assert found["num_steps"]["with_prompt"] >= 3
    for kind in ("with_prompt", "without_prompt"):
        parts = found["host_ms"][kind]
        assert all(parts[part] > 0 for part in ("schedule", "prepare", "target", "sample", "propose", "update"))
        assert found["propose_host_ms"][kind]["median"] > 0

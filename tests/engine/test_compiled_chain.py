"""The chain that is compiled with the target, on a CPU."""

from tests.support import compiled_scenarios, weights
from tests.support.engine_arguments import mtp
from tests.support.forked_engine import run


def test_the_compiled_chain_drafts_as_the_eager_one_at_every_size_and_with_new_weights() -> None:
    # More drafts than modules, and prompts in chunks.
    engine = weights.ENGINE | mtp(6) | {"enforce_eager": False, "max_num_batched_tokens": 80}
    value = run(compiled_scenarios.beside_the_eager_chain, engine, max_tokens=20).value
    assert len({(num_rows, num_reqs) for num_rows, num_reqs, _ in value["passes"]}) > 10
    assert all(same for *_, same in value["passes"])
    assert value["largest"] < 1e-4
    assert value["graphs"] == 0
    weights.assert_served_on(value["updated"], "draft")


def test_an_eager_engine_compiles_nothing() -> None:
    assert run(compiled_scenarios.has_a_chain, mtp(3)).value is False

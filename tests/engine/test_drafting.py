"""Drafting on a real engine: whatever is drafted, the tokens are those of no speculation."""

from pathlib import Path
from typing import Any

import pytest

from bench.reference.mimo_checkpoint import VOCAB, write_adapter, write_checkpoint
from tests.support import scenarios
from tests.support.children import ChildFailedError
from tests.support.distributions import chi_square, chi_square_bound, differ
from tests.support.engine_arguments import mtp
from tests.support.forked_engine import Run, run

OURS = "proposers.v1.MultiGroupProposer"


def plain(scenario: Any, engine: dict[str, Any] | None = None, **arguments: Any) -> Any:
    """The same without speculation and without the plugin."""
    return run(scenario, engine, mode="off", **arguments).value


def assert_lossless(drafted: Run, without: Any) -> None:
    assert drafted.value["tokens"] == without["tokens"]
    assert drafted.value["metrics"]["spec_decode_num_accepted_tokens"] > 0


# Three are what most other tests here draft.
@pytest.mark.parametrize("num_speculative_tokens", [1, 6])
def test_outputs_equal_no_speculation_for_every_number_of_drafts(num_speculative_tokens: int) -> None:
    drafted = run(scenarios.lossless, mtp(num_speculative_tokens))
    assert_lossless(drafted, plain(scenarios.lossless))
    accepted = drafted.value["metrics"]["spec_decode_num_accepted_tokens_per_pos"]
    assert len(accepted) == num_speculative_tokens
    assert min(accepted) > 0, f"a position at which no draft was ever right: {accepted}"


def test_our_proposer_drafts_over_several_groups_and_the_log_says_so() -> None:
    drafted = run(scenarios.lossless, mtp(3))
    assert drafted.value["proposer"] == OURS
    assert len(drafted.value["groups"]) >= 2
    assert f"{OURS} drafts for Step3p5MTP on the V1 model runner, 3 tokens a step" in drafted.log
    assert f"First draft by {OURS}" in drafted.log


@pytest.mark.parametrize("as_with_kernels", [False, True])
def test_modules_of_fewer_launches_compute_what_the_hosts_do(as_with_kernels: bool) -> None:
    value = run(scenarios.modules_against_the_hosts, mtp(3), as_with_kernels=as_with_kernels).value
    assert value["fused"]
    assert min(value["rows"]) > 300
    # Only those rows of the last module are computed to the end that a draft is made from.
    assert value["wanted rows"][:-1] == value["rows"][:-1]
    assert value["wanted rows"][-1] < value["rows"][-1] / 3
    assert max(value["largest"]) < 1e-4, value["largest"]


def test_prompts_around_blocks_and_window_are_what_the_scenario_holds() -> None:
    # The lengths are written for this block size and this model's window; another would test other boundaries.
    drafted = run(scenarios.lossless, mtp(3))
    assert drafted.value["block_size"] == scenarios.BLOCK
    lengths = drafted.value["tokens"]["lengths"]
    assert [len(tokens) for tokens in lengths] == [scenarios.MAX_TOKENS] * len(scenarios.LENGTHS)


@pytest.mark.parametrize("num_speculative_tokens", [4, 5])
def test_a_number_of_drafts_that_the_host_refuses_fails_with_its_own_words(num_speculative_tokens: int) -> None:
    message = f"num_speculative_tokens:{num_speculative_tokens} must be divisible by n_predict=3"
    with pytest.raises(ChildFailedError, match=message):
        run(scenarios.lossless, mtp(num_speculative_tokens))


def test_a_number_of_drafts_that_fills_the_context_fails_with_a_remedy() -> None:
    with pytest.raises(ChildFailedError, match="Use fewer drafts or a longer max_model_len"):
        run(scenarios.lossless, {**mtp(33), "max_model_len": 32})


def test_a_prompt_in_chunks_gives_the_same_tokens() -> None:
    drafted = run(scenarios.lossless, {**mtp(3), "max_num_batched_tokens": 48})
    assert_lossless(drafted, plain(scenarios.lossless))


def test_without_prefix_caching_and_with_default_blocks_the_tokens_are_the_same() -> None:
    engine = {**mtp(3), "enable_prefix_caching": False, "block_size": None, "max_num_batched_tokens": 80}
    drafted = run(scenarios.lossless, engine)
    assert_lossless(drafted, plain(scenarios.lossless))
    assert drafted.value["block_size"] != scenarios.BLOCK
    assert drafted.value["metrics"]["prefix_cache_hits"] == 0


def test_reused_prefixes_give_the_same_tokens() -> None:
    drafted = run(scenarios.lossless, mtp(3))
    assert_lossless(drafted, plain(scenarios.lossless))
    assert drafted.value["metrics"]["prefix_cache_hits"] > 0


def test_preempted_requests_give_the_same_tokens() -> None:
    drafted = run(scenarios.crowded, {**mtp(3), "num_gpu_blocks_override": 48})
    assert_lossless(drafted, plain(scenarios.crowded))
    assert drafted.value["metrics"]["num_preemptions"] > 0


def test_without_padded_batches_the_tokens_are_the_same() -> None:
    drafted = run(scenarios.lossless, mtp(3, disable_padded_drafter_batch=True))
    assert_lossless(drafted, plain(scenarios.lossless))


def test_layers_of_one_kv_cache_group_that_differ_in_their_heads_give_the_same_tokens() -> None:
    drafted = run(scenarios.lossless, {**mtp(3), "disable_hybrid_kv_cache_manager": True})
    assert_lossless(drafted, plain(scenarios.lossless))
    assert drafted.value["windows"] == ["[64, 64]", "[None]"]  # though the spec is the same
    assert OURS in drafted.log


def test_who_counts_on_vllms_keys_of_the_prefix_cache_has_them(tmp_path: Path) -> None:
    # It counts on as many as vLLM makes (its offloading connector asserts so), and ours come later.
    connector = {"shared_storage_path": str(tmp_path)}
    connected = {"kv_connector": "ExampleConnector", "kv_role": "kv_both", "kv_connector_extra_config": connector}
    engine = {**mtp(3), "kv_transfer_config": connected}
    drafted = run(scenarios.keyed, engine)
    assert drafted.value["keys"] == run(scenarios.keyed, engine, mode="upstream").value["keys"]
    assert drafted.value["keys"][0] == "vllm.v1.core.kv_cache_utils"
    assert OURS in drafted.log
    assert drafted.log.count("The prefix cache keeps vLLM's keys, which don't have the tokens after a block") == 1
    assert "ExampleConnector may count on vLLM's keys" in drafted.log
    engine = {**mtp(3), "kv_events_config": {"enable_kv_cache_events": True, "publisher": "null"}}
    listened_to = run(scenarios.keyed, engine).value["keys"]
    assert listened_to == run(scenarios.keyed, engine, mode="upstream").value["keys"]  # not as many in all releases
    assert listened_to[0] == "vllm.v1.core.kv_cache_utils"
    ours = run(scenarios.keyed, mtp(3))
    assert ours.value["keys"] == ["mtp.prefix", scenarios.KEYED_BLOCKS - 1]


def test_asynchronous_scheduling_gives_the_same_tokens() -> None:
    drafted = run(scenarios.asynchronous, {**mtp(3), "async_scheduling": True})
    assert drafted.value["async_scheduling"] is True
    assert_lossless(drafted, plain(scenarios.lossless))
    # Outputs would be the same for wrong drafts too; the acceptance shows that the drafts are as good as without it.
    without = run(scenarios.lossless, mtp(3)).value["metrics"]
    acceptance = [
        m["spec_decode_num_accepted_tokens"] / m["spec_decode_num_drafts"] for m in (drafted.value["metrics"], without)
    ]
    assert acceptance[0] == pytest.approx(acceptance[1], rel=0.05)


# Per position, the share of drafting steps whose draft was accepted: somewhat below what the shipped checkpoint reaches
# when every module's cache is exact, and at the later positions above what it reaches when they are not.
FLOORS = (0.80, 0.70, 0.60)


def acceptance(drafted: Run) -> list[float]:
    counted = drafted.value["metrics"]
    return [n / counted["spec_decode_num_drafts"] for n in counted["spec_decode_num_accepted_tokens_per_pos"]]


def test_drafts_are_accepted_at_least_as_often_as_the_floors() -> None:
    drafted = run(scenarios.rates, mtp(3))
    assert drafted.value["tokens"] == plain(scenarios.rates)["tokens"]
    measured = list(zip(acceptance(drafted), FLOORS, strict=True))
    report = ", ".join(f"position {i}: {rate:.3f} (floor {floor})" for i, (rate, floor) in enumerate(measured))
    print(report)
    assert all(rate >= floor for rate, floor in measured), report


def test_the_floors_see_modules_that_never_saw_the_prompt() -> None:
    # vLLM's own proposer runs the later modules over one row per request and step only.
    host = run(scenarios.rates, mtp(3), mode="upstream")
    assert acceptance(host)[-1] < FLOORS[-1]


def test_a_stop_in_the_middle_of_a_draft_ends_the_request_there() -> None:
    drafted, without = run(scenarios.choices, mtp(3)).value, plain(scenarios.choices)
    assert drafted["stop token"] == without["stop token"]
    assert drafted["stop string"] == without["stop string"]
    assert {reason for _, reason, _ in drafted["stop token"]} == {"stop"}
    assert {reason for _, reason, _ in drafted["stop string"]} == {"stop"}


def test_two_sequences_of_a_request_are_drafted_for_apart() -> None:
    drafted = run(scenarios.choices, mtp(3)).value
    assert drafted["n=2 of one"] == [plain(scenarios.choices)["plain"]] * 2
    first, second = drafted["n=2"]
    assert first != second
    assert len(first) == len(second) == len(drafted["n=2 of one"][0])


# Sampling: requests of one prefill step each, because the CPU build can't rewind the generator of a seeded request
# whose prompt comes in chunks ("CPU Generator does not use offset"), with or without speculation.
SAMPLING = {"max_num_seqs": 64, "max_num_batched_tokens": 4096}
SAMPLES = 1200


def prefixes(value: dict[str, Any], length: int) -> list[tuple[int, ...]]:
    return [tuple(tokens[:length]) for tokens in value["tokens"]]


def sampled(method: str) -> dict[str, Any]:
    engine = {**SAMPLING, **mtp(3, draft_sample_method=method)}
    value: dict[str, Any] = run(scenarios.samples, engine, count=SAMPLES, temperature=0.8).value
    return value


@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
def test_sampled_tokens_follow_the_distribution_of_no_speculation(method: str) -> None:
    drafted = sampled(method)
    without = plain(scenarios.samples, SAMPLING, count=SAMPLES, temperature=0.8)
    assert drafted["metrics"]["spec_decode_num_accepted_tokens"] > 0
    for length in (1, 2, 3, 4):
        left, right = prefixes(drafted, length), prefixes(without, length)
        statistic, degrees = chi_square(left, right)
        assert degrees >= 4, f"too few different beginnings of {length} tokens to compare"
        assert statistic <= chi_square_bound(degrees), f"{length} tokens: {statistic:.1f} with {degrees} degrees"


@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
def test_the_same_seed_of_the_process_gives_the_same_tokens(method: str) -> None:
    drawn = sampled(method)["by seed"]
    assert drawn["process"] == drawn["process again"]
    assert drawn["process"] != drawn["process, otherwise"]
    assert len(set(map(tuple, drawn["process"]))) > 1


@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
def test_the_same_seed_of_a_request_gives_the_same_tokens_whatever_runs_beside_it(method: str) -> None:
    # The host would draw probabilistic drafts from the process's generator, and not from the request's.
    drawn = sampled(method)["by seed"]
    assert drawn["requests"] == drawn["requests, reversed"]
    assert len(set(map(tuple, drawn["requests"]))) > 1


def test_the_distribution_check_sees_another_temperature() -> None:
    # 0.8 against 1.0 is a small distortion; the rejection sampler's own faults were larger (vLLM issue 55005).
    cool = plain(scenarios.samples, SAMPLING, count=SAMPLES, temperature=0.8)
    warm = plain(scenarios.samples, SAMPLING, count=SAMPLES, temperature=1.0)
    assert differ(prefixes(cool, 4), prefixes(warm, 4))


@pytest.fixture(scope="module")
def mimo(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder: Path = tmp_path_factory.mktemp("mimo")
    return {"model": write_checkpoint(folder), "skip_tokenizer_init": True}


@pytest.mark.parametrize(
    ("num_speculative_tokens", "chunk"), [(1, 512), (3, 48)], ids=["one draft", "three drafts in chunks"]
)
def test_one_module_is_run_again_for_every_draft_of_mimo(
    mimo: dict[str, Any], num_speculative_tokens: int, chunk: int
) -> None:
    engine = {**mimo, **mtp(num_speculative_tokens), "max_num_batched_tokens": chunk}
    drafted = run(scenarios.random_prompts, engine, vocab_size=VOCAB)
    assert drafted.value["proposer"] == "proposers.v1.MultiGroupProposer"
    assert_lossless(drafted, plain(scenarios.random_prompts, mimo, vocab_size=VOCAB))
    assert min(drafted.value["metrics"]["spec_decode_num_accepted_tokens_per_pos"]) > 0


def test_drafts_are_for_the_adapter_that_a_request_asks_for(mimo: dict[str, Any], tmp_path: Path) -> None:
    asked = {"adapter": write_adapter(tmp_path), "vocab_size": VOCAB}
    engine = {**mimo, "enable_lora": True, "max_lora_rank": 8}
    drafted = run(scenarios.adapted, {**engine, **mtp(2)}, **asked)
    assert drafted.value["proposer"] == "proposers.v1.MultiGroupProposer"
    assert_lossless(drafted, plain(scenarios.adapted, engine, **asked))
    base, adapted, _ = drafted.value["tokens"]
    assert base != adapted

"""Keys of the prefix cache that have the tokens after a block."""

import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.request import Request

from mtp.prefix import look_ahead_in_prefix_cache, make_block_hasher
from tests.support import scenarios
from tests.support.engine_arguments import mtp, offloading
from tests.support.forked_engine import Run, run
from tests.support.tiny_models import SIZES, write_eagle, write_model

BLOCK = 4


@pytest.fixture(autouse=True)
def _root_of_all_keys() -> None:
    init_none_hash(sha256)


def keys(tokens: list[int], lookahead: int, prompt: int | None = None, pieces: int = 1) -> list[bytes]:
    """The keys of a request that has these tokens, the ones after `prompt` as output, `pieces` at a time."""
    prompt = len(tokens) if prompt is None else prompt
    params = SamplingParams(max_tokens=100)
    hasher = make_block_hasher(BLOCK, sha256, lookahead)
    request = Request("r", tokens[:prompt], params, None, block_hasher=hasher)
    for start in range(prompt, len(tokens), pieces):
        request.append_output_token_ids(tokens[start : start + pieces])
    return list(request.block_hashes)


@pytest.mark.parametrize("lookahead", [1, 2, 3, 6])
def test_a_block_has_a_key_once_the_tokens_after_it_are_known(lookahead: int) -> None:
    for length in range(1, 30):
        assert len(keys(list(range(length)), lookahead)) == max(0, length - lookahead) // BLOCK


@pytest.mark.parametrize("lookahead", [1, 3])
@pytest.mark.parametrize("pieces", [1, 2, 5])
def test_keys_do_not_depend_on_when_the_tokens_came(lookahead: int, pieces: int) -> None:
    tokens = [random.Random(0).randrange(100) for _ in range(33)]
    for prompt in (1, 4, 5, 13, 32):
        assert keys(tokens, lookahead, prompt, pieces) == keys(tokens, lookahead)


@pytest.mark.parametrize("lookahead", [1, 2, 3, 6])
def test_two_requests_share_the_keys_of_blocks_whose_following_tokens_they_share(lookahead: int) -> None:
    tokens = list(range(40))
    for parting in range(1, 40):
        other = [*tokens[:parting], *(1000 + t for t in tokens[parting:])]
        shared = sum(a == b for a, b in zip(keys(tokens, lookahead), keys(other, lookahead), strict=True))
        assert shared == max(0, parting - lookahead) // BLOCK


class ManagerSpy:
    """Of one KV cache group."""

    def __init__(self) -> None:
        self.boundaries: list[list[int]] = []

    def cache_blocks(
        self, request: Any, num_tokens: int, retention_interval: int, replay_boundaries: Sequence[int]
    ) -> None:
        self.boundaries.append(sorted(replay_boundaries))


class CoordinatorSpy:
    """What `look_ahead_in_prefix_cache` touches of the host's coordinator."""

    num_reprefillable_tokens = 2
    enable_partial_hash_hits = False

    def __init__(self) -> None:
        self.block_pool = SimpleNamespace(hash_block_size=BLOCK, cache_partial_block=lambda **given: given)
        self.asked: list[int] = []
        self.single_type_managers = [ManagerSpy(), ManagerSpy()]

    def get_num_cacheable_tokens(self, num_computed_tokens: int, kv_cache_group_id: int) -> int:
        return max(0, num_computed_tokens - self.num_reprefillable_tokens)

    def find_longest_cache_hit(self, block_hashes: list[Any], max_cache_hit_length: int) -> None:
        self.asked.append(max_cache_hit_length)

    find_longest_cache_hit_per_group = find_longest_cache_hit


def test_no_block_is_cached_before_it_has_a_key_and_none_is_looked_for_without_one() -> None:
    coordinator = CoordinatorSpy()
    look_ahead_in_prefix_cache(coordinator, 3)
    for computed in range(40):
        cacheable = coordinator.get_num_cacheable_tokens(computed, 0) // BLOCK
        assert cacheable == len(keys(list(range(computed)), 3))
    coordinator.find_longest_cache_hit([b""] * 5, 39)
    coordinator.find_longest_cache_hit_per_group([b""] * 5, 7)
    assert coordinator.asked == [5 * BLOCK, 7]


def test_every_group_keeps_what_the_same_prompt_can_resume_at() -> None:
    coordinator = CoordinatorSpy()
    look_ahead_in_prefix_cache(coordinator, 3)
    for manager in coordinator.single_type_managers:
        for length in (2, 9, 33):
            request = SimpleNamespace(num_prompt_tokens=length)
            manager.cache_blocks(request, length, retention_interval=0, replay_boundaries=(length - 1,))
        assert manager.boundaries == [[0, 1], [6, 8], [30, 32]]


@pytest.mark.parametrize("v2", [False, True], ids=["V1", "V2"])
def test_a_prompt_is_found_again_whatever_its_length(v2: bool) -> None:
    # The interpreter of V2's kernels is slow, so not every length is tried there.
    lengths = [96, 97, 98, 99, 127] if v2 else list(range(3 * scenarios.BLOCK, 4 * scenarios.BLOCK))
    engine = {**mtp(3), "max_model_len": 200, "max_num_seqs": 2}
    hits = run(scenarios.resent, engine, v2=v2, lengths=lengths).value["hits"]
    blocks = [(length - 3) // scenarios.BLOCK * scenarios.BLOCK for length in lengths]
    assert hits == blocks


def test_prompts_that_another_engine_computed_bring_their_draft_rows_and_keep_vllms_keys(tmp_path: Path) -> None:
    # A disaggregated prefill, by the connector of vLLM's that runs on a CPU.
    transfer = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }
    engine = mtp(3) | {"kv_transfer_config": transfer}
    run(scenarios.transferred, engine, max_tokens=1)
    decoding, alone = (
        run(scenarios.transferred, engine, max_tokens=24),
        run(scenarios.transferred, mtp(3), max_tokens=24),
    )
    assert decoding.value["metrics"]["external_prefix_cache_hits"] == 3 * 2 * scenarios.BLOCK
    assert decoding.value["tokens"] == alone.value["tokens"]
    accepted = "spec_decode_num_accepted_tokens_per_pos"
    assert decoding.value["metrics"][accepted] == alone.value["metrics"][accepted]
    assert "ExampleConnector may count on vLLM's keys. Every hit loses its last block" in decoding.log


def test_blocks_that_were_offloaded_come_back_with_their_draft_rows_and_keep_vllms_keys() -> None:
    # vLLM's own worker for it needs a GPU (tests/gpu/test_offloading.py).
    worker = {"spec_name": "HostOffloadingSpec", "spec_module_path": "tests.support.host_offloading"}
    done = run(scenarios.offloaded, mtp(3) | offloading(**worker))
    scenarios.assert_brought_back(done.value)
    assert "OffloadingConnector may count on vLLM's keys. Every hit loses its last block" in done.log


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model("llama", tmp_path_factory.mktemp("llama"))


def eagle_run(llama: str, folder: Path, method: str, v2: bool = False, **more: Any) -> Run:
    draft = {"method": method, "model": write_eagle(folder, method), "num_speculative_tokens": 2}
    engine = {"model": llama, "speculative_config": draft, "max_num_batched_tokens": 40, "skip_tokenizer_init": True}
    return run(scenarios.rows_after_hits, engine | more, v2=v2, vocab_size=SIZES["vocab_size"])


@pytest.mark.parametrize("v2", [False, True], ids=["V1", "V2"])
@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_rows_of_eagle_after_a_hit_are_those_of_a_run_from_scratch(
    llama: str, tmp_path: Path, method: str, v2: bool
) -> None:
    done = eagle_run(llama, tmp_path, method, v2)
    for name, blocks in {"parting": 1, "again": 3}.items():
        found = done.value[name]
        # The first block that follows is the other's: its last row was made of another token.
        assert found["hits"] == blocks * scenarios.BLOCK, name
        assert found["furthest"] < 1e-4, name
        assert found["tokens"], name
    assert "keys have the tokens after a block that the draft's rows depend on (1)" in done.log


def test_the_keys_can_be_turned_off_and_then_each_hit_loses_a_block(llama: str, tmp_path: Path) -> None:
    done = eagle_run(llama, tmp_path, "eagle", additional_config={"mtp_proposers": {"prefix_keys": False}})
    assert done.value["again"]["hits"] == 2 * scenarios.BLOCK
    # Nor are rows at the ends of chunks what they should be; that is vLLM's own.
    assert "keeps vLLM's keys" in done.log
    assert "additional_config turns them off. Every hit loses its last block" in done.log

"""Records collected while a drafter drafts: the same rows as plain extraction's, of verified tokens only."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from proposers.hidden_states.admission import REASONS, SAMPLING
from proposers.hidden_states.connector import MAX_POSTPONED_STEPS
from tests.support import live_scenarios
from tests.support.engine_arguments import mtp
from tests.support.forked_engine import run
from tests.support.live_scenarios import among_others, connector
from tests.support.record_scenarios import RING_BYTES, records_engine

# Of float32: a row is computed in other company, so its last bits may be others.
TOLERANCE = 2e-5

# Chunks of prompts, and too few blocks for all requests at once.
CROWDED = {"max_num_batched_tokens": 64, "num_gpu_blocks_override": 60}

NGRAMS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}

WAYS: dict[str, dict[str, Any]] = {
    "V1": {"engine": mtp(3) | CROWDED, "count": 40, "max_tokens": 60},
    "V1, overlapped": {"engine": mtp(6) | CROWDED | {"async_scheduling": True}, "count": 40, "max_tokens": 60},
    "TP 2": {"engine": mtp(3) | CROWDED | {"tensor_parallel_size": 2}, "count": 20, "max_tokens": 40},
    "vLLM's own": {"engine": {"speculative_config": NGRAMS} | CROWDED, "count": 40, "max_tokens": 60},
    "V2": {"engine": mtp(3) | CROWDED, "v2": True, "count": 8, "max_tokens": 10, "aborts": 1},
}


@pytest.fixture(scope="module")
def collected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What each way of drafting gave, with how far its rows are from plain extraction's."""
    roots = {name: tmp_path_factory.mktemp("records") for name in WAYS}
    found = {}
    for name, way in WAYS.items():
        scenario = live_scenarios.live_asynchronous if "overlapped" in name else live_scenarios.live
        arguments = {key: way[key] for key in ("v2", "count", "max_tokens", "aborts") if key in way}
        engine = way["engine"] | {"kv_transfer_config": connector(roots[name], record_drafts=True)}
        found[name] = run(scenario, engine, root=str(roots[name]), **arguments).value
    plain_root = tmp_path_factory.mktemp("plain")
    engine = records_engine(plain_root)
    worst = run(live_scenarios.plain, engine, root=str(plain_root), collected=[str(root) for root in roots.values()])
    for name, root in roots.items():
        found[name]["worst"] = worst.value["worst"][str(root)]
    return found


@pytest.mark.parametrize("way", WAYS)
def test_records_collected_while_drafting_are_those_of_plain_extraction(
    collected: dict[str, dict[str, Any]], way: str
) -> None:
    found = collected[way]
    assert found["records"] == found["finished"]
    assert len(found["aborted"]) > 0
    assert found["wrong"] == []
    assert found["answers"] == []
    assert found["worst"] < TOLERANCE
    assert found["stop_strings"] > 0 or way in ("V2", "TP 2")  # of whose few requests none may come to one
    counted = found["metrics"]
    assert counted["hidden_states_records_written"] == len(found["records"])
    assert counted["hidden_states_records_failed"] == 0
    assert found["skipped"] == {}
    assert 0 < counted["spec_decode_num_accepted_tokens"] < counted["spec_decode_num_draft_tokens"]
    assert counted["prefix_cache_hits"] > 0


@pytest.mark.parametrize("way", WAYS)
def test_a_record_has_the_drafts_of_each_step_and_how_many_were_accepted(
    collected: dict[str, dict[str, Any]], way: str
) -> None:
    total: Counter[str] = sum((Counter(facts) for facts in collected[way]["drafts"].values()), Counter())
    assert total["steps"] > (5 if way == "V2" else 100)
    assert 0 < total["accepted"] <= collected[way]["metrics"]["spec_decode_num_accepted_tokens"]
    assert [total[kind] for kind in ("other steps", "wrong", "others than scheduled", "right and rejected")] == [0] * 4
    assert total["unknown"] <= total["steps"] / 4  # of steps before a preemption


def test_the_ways_are_what_they_say(collected: dict[str, dict[str, Any]]) -> None:
    assert collected["V1"]["drafter"].startswith("proposers.")
    assert collected["V2"]["drafter"].startswith("proposers.")
    assert collected["vLLM's own"]["drafter"].startswith("vllm.")
    assert [found["async_scheduling"] for found in collected.values()][:2] == [False, True]
    assert ".gpu." in collected["V2"]["runner"] or ".cpu" in collected["V2"]["runner"]
    for way in ("V1", "V1, overlapped"):
        assert collected[way]["metrics"]["num_preemptions"] > 0


def test_beside_a_connector_that_loads_prompts_only_rows_that_were_computed_are_collected(tmp_path: Path) -> None:
    """What another connector loads has no hidden states beside it, for whoever finds it in the prefix cache, too."""
    engine = mtp(3) | {"kv_transfer_config": among_others(tmp_path)}
    found = run(live_scenarios.beside_a_loader, engine, root=str(tmp_path)).value
    assert found["written"] == {"computed": 2, "loaded": 0, "hit": 0, "hit of computed": 2}
    assert found["worst"] < 1e-3
    assert found["skipped"] == {"loaded": 4}
    assert found["metrics"]["hidden_states_records_written"] == 5
    # What a request asks of the other connector is not ours to check, and what it says is in the answer.
    assert found["asked"] == [{"claimed": "this"}, True]
    assert "window is [3]" in found["refused"]
    assert found["metrics"]["prefix_cache_hits"] >= 96 + 64
    assert found["metrics"]["spec_decode_num_accepted_tokens"] > 0


def test_a_disk_that_stands_still_holds_back_no_answer_and_no_step_and_skips_whole_records(tmp_path: Path) -> None:
    engine = mtp(3) | {"kv_transfer_config": connector(tmp_path, ring_bytes=RING_BYTES)}
    found = run(live_scenarios.serving_first, engine, root=str(tmp_path)).value
    for name, rows, skipped in (("short", [20 + 9], 3), ("long", [150 + 9], 1)):
        facts = found[name]
        assert facts["stood still"]
        assert set(facts["answers"]) == {10}
        assert set(facts["params"]) == {None}
        assert facts["new files meanwhile"] == 0
        assert facts["rows"] == rows
        assert facts["skipped"] == skipped
    assert found["after"] == [None, True]
    assert found["worst"] < 1e-3
    assert found["blocks in use"] == 0


def test_rows_are_taken_out_beside_decoding_where_there_is_room_to_wait_for_that(tmp_path: Path) -> None:
    engine = mtp(3) | {"kv_transfer_config": connector(tmp_path), "max_num_batched_tokens": 48}
    found = run(live_scenarios.beside_prompts, engine, root=str(tmp_path)).value
    assert found["found"]["alone"] == [False]
    few = found["found"]["beside a few chunks"]
    assert 1 < len(few) <= MAX_POSTPONED_STEPS
    assert few == [True] * (len(few) - 1) + [False]
    assert found["found"]["beside many chunks"] == [True] * (MAX_POSTPONED_STEPS + 1)
    assert found["found"]["without free blocks"] == [True]
    assert found["records"] == 4
    assert found["worst"] < 1e-3


@pytest.mark.parametrize(("transfer", "keys"), [(connector, False), (among_others, True)], ids=["alone", "not alone"])
def test_without_a_prefix_cache_blocks_have_keys_for_another_connector_alone(
    transfer: Any, keys: bool, tmp_path: Path
) -> None:
    engine = mtp(3) | {"kv_transfer_config": transfer(tmp_path), "enable_prefix_caching": False}
    found = run(live_scenarios.without_prefix_cache, engine, root=str(tmp_path)).value
    assert [count > 0 for count in found["keys"]] == [keys] * 2
    assert found["records"] == 2
    assert found["worst"] < 1e-3


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_has_finished_when_an_engine_is_shut_down_is_written(ranks: int, tmp_path: Path) -> None:
    """In the caller's process with one rank, in a process of its own with two."""
    engine = mtp(3) | {"kv_transfer_config": connector(tmp_path, sharded=True), "tensor_parallel_size": ranks}
    env = {"VLLM_ENABLE_V1_MULTIPROCESSING": str(ranks - 1)}
    found = run(live_scenarios.shut_down, engine, env=env, root=str(tmp_path)).value
    assert found == {"before": 0, "rows": [30, 50, 70]}


def test_an_answer_waits_for_its_record_beside_drafts_where_that_is_asked_for(tmp_path: Path) -> None:
    engine = mtp(3) | {"kv_transfer_config": connector(tmp_path, wait_for_records=True, sample_rate=1e-9)}
    done = run(live_scenarios.answers, engine, root=str(tmp_path)).value
    assert [facts["params"] for facts in done["sampled out"]] == [{"skipped": REASONS[SAMPLING]}]
    assert [facts["worst"] < TOLERANCE and facts["tokens equal"] for facts in done["asked for"]] == [True, True]
    assert done["skipped"] == {"sampling": 1}

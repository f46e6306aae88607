"""Records from a real engine: after a path was handed out, its file is there, whole and right."""

import json
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from vllm.utils.network_utils import get_open_port

from bench.servers import counter
from proposers.hidden_states import RecordDataset, load
from proposers.hidden_states.backends import Server
from proposers.hidden_states.collect import Collector
from proposers.hidden_states.conversations import Lines, Renderer
from tests.support import record_scenarios
from tests.support.children import TINY, ChildFailedError
from tests.support.engine_arguments import extract
from tests.support.forked_engine import Run, run
from tests.support.record_scenarios import LAYERS, RING_BYTES, records_engine
from tests.support.server import serving

# The host's arithmetic and the reference's differ in the last bits of float32.
TOLERANCE = 2e-5

SMALL = {"max_num_batched_tokens": 64, "max_num_seqs": 16}


@pytest.fixture(scope="module", params=["synchronous", "asynchronous"])
def many(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    root = tmp_path_factory.mktemp("records")
    scenario = {"synchronous": record_scenarios.many, "asynchronous": record_scenarios.many_asynchronous}[request.param]
    engine = records_engine(root) | SMALL | {"async_scheduling": request.param == "asynchronous"}
    done = run(scenario, engine, root=str(root))
    assert done.value["async_scheduling"] == (request.param == "asynchronous")
    return done


def right(facts: dict[str, Any]) -> bool:
    """Whether the record is the request's, and every row the reference's."""
    return facts["tokens equal"] and facts["shape"][0] == facts["rows"] and facts["worst"] < TOLERANCE


def outputs(many: Run) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, batch in many.value["batches"].items():
        for facts in batch:
            yield name, facts


def test_when_generate_returns_every_record_is_there_and_every_row_is_right(many: Run) -> None:
    with_record = [(name, facts) for name, facts in outputs(many) if name not in ("off", "same name")]
    assert len(with_record) == 27
    wrong = [(name, facts) for name, facts in with_record if "rows" not in facts or not right(facts)]
    assert wrong == []
    assert all(facts["layer_ids"] == LAYERS and facts["shape"][1:] == [3, 192] for _, facts in with_record)
    assert all(facts["finish_reason"] == facts["reason"] == "length" for _, facts in with_record)


def test_prompt_rows_or_all_rows_or_a_window_of_them_as_the_request_asks(many: Run) -> None:
    batches = many.value["batches"]
    rows = {name: [(f["first"], f["rows"] - f["prompt"]) for f in batches[name]] for name in ("alone", "one token")}
    assert rows == {"alone": [(0, 0)], "one token": [(0, 0)]}
    # The token that was sampled last has no row: it was not run.
    assert {(f["first"], f["rows"] - f["prompt"]) for f in batches["sixteen"]} == {(0, 19)}
    assert [(f["first"], f["rows"]) for f in batches["window"]] == [(10, 35)]
    assert [(f["first"], f["rows"]) for f in batches["window past the end"]] == [(50, 60 + 7 - 50)]
    assert [f["params"] for f in batches["off"]] == [None]


def test_a_request_that_a_stop_string_ends_leaves_its_record_up_to_there(many: Run) -> None:
    stopped = many.value["stopped"]
    assert [facts["reason"] in ("e", " ") and facts["finish_reason"] == "stop" for facts in stopped] == [True, True]
    assert [facts for facts in stopped if not right(facts)] == []
    assert [facts["rows"] for facts in stopped] == [facts["prompt"] + facts["output"] - 1 for facts in stopped]


def test_reused_prefixes_bring_their_rows(many: Run) -> None:
    assert many.value["metrics"]["prefix_cache_hits"] >= 3 * 96


def test_a_name_is_the_requests_to_choose_once(many: Run) -> None:
    (named,), (again,) = (many.value["batches"][name] for name in ("named", "same name"))
    assert named["params"]["hidden_states_path"].endswith("/set/one.safetensors")
    assert "the name is taken, give another: 'set/one.safetensors'" in again["params"]["error"]
    assert again["output"] == 8


def test_what_a_request_asks_wrongly_is_refused_before_any_work(many: Run) -> None:
    messages = {
        "../up": "leads out of the storage root",
        "/absolute": "leads out of the storage root",
        "half a surrogate pair": "has characters that can't be printed",
        "an empty window": "has none of the request's rows, which are [0, 60)",
        "a window past the last token": "has none of the request's rows, which are [0, 67)",
        "an unknown key": "kv_transfer_params has hidden_states_path; there are extract, include_output_tokens",
    }
    refused = many.value["refused"]
    assert refused.keys() == messages.keys()
    assert [name for name, message in messages.items() if message not in refused[name]] == []


def test_what_cannot_be_written_is_refused_in_the_response_and_leaves_nothing(many: Run) -> None:
    in_vain = many.value["in vain"]
    messages = {
        "outside/file": "symbolic link",
        "set/inside/file": "symbolic link",
        "a file for a folder": "no folder",
    }
    assert in_vain.keys() == messages.keys()
    for name, message in messages.items():
        assert message in in_vain[name]["params"]["error"]
        assert f"were not written: {in_vain[name]['params']['error']}" in many.log  # a streamed answer has no params
        assert in_vain[name]["params"].keys() == {"error"}
        assert in_vain[name]["output"] == 8  # the request has its text
    written, failed = 27 + len(many.value["stopped"]), 1 + len(messages)
    assert len(many.value["files"]) == many.value["dataset"] == written
    assert many.value["metrics"]["hidden_states_records_written"] == written
    assert many.value["metrics"]["hidden_states_records_failed"] == failed
    assert many.value["metrics"]["hidden_states_bytes_written"] > 0


def test_a_prompt_with_embeddings_in_it_has_no_record_and_the_response_says_so(tmp_path: Path) -> None:
    engine = records_engine(tmp_path) | {"enable_prompt_embeds": True}
    done = run(record_scenarios.embedded, engine, root=str(tmp_path)).value
    assert all("has embeddings in it" in response["error"] for response in done["responses"])
    assert done["files"] == []


def test_host_memory_is_bounded_by_the_ring(many: Run) -> None:
    assert RING_BYTES / 2 < many.value["peak_bytes"] <= RING_BYTES


@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
def test_preempted_requests_have_all_their_rows(asynchronous: bool, tmp_path: Path) -> None:
    scenario = record_scenarios.crowded_asynchronous if asynchronous else record_scenarios.crowded
    engine = records_engine(tmp_path) | {"num_gpu_blocks_override": 60, "async_scheduling": asynchronous}
    done = run(scenario, engine, root=str(tmp_path)).value
    assert done["async_scheduling"] == asynchronous
    assert done["metrics"]["num_preemptions"] > 0
    assert [facts for facts in done["outputs"] if not right(facts)] == []
    assert {facts["rows"] for facts in done["outputs"]} == {90 + 79}
    assert len(done["files"]) == 8


def test_shards_hold_what_single_files_do(tmp_path: Path) -> None:
    row = 3 * 192 * 4
    engine = records_engine(tmp_path, sharded=True, shard_bytes=200 * row)
    ran = run(record_scenarios.sharded, engine, root=str(tmp_path))
    done = ran.value
    records_of = done["outputs"]
    # Who expects a file per request finds none, rather than one that is others' too, to move or to delete.
    assert {tuple(facts["params"]) for facts in records_of} == {("hidden_states_shard", "hidden_states_name")}
    assert ran.log.count("clients that want a file per request") == 1
    assert [facts for facts in records_of if not right(facts)] == []
    assert all(name.endswith(".shard.safetensors") for name in done["files"])
    assert 4 <= len(done["files"]) < len(records_of) / 2
    # Two requests of one name come into shards of their own, since the response says which.
    assert len(done["names"]) == len(records_of) - 1
    assert done["rows"] == sum(facts["rows"] for facts in records_of)
    assert done["metrics"]["hidden_states_records_written"] == len(records_of)


def test_aborted_requests_leave_nothing(tmp_path: Path) -> None:
    engine = records_engine(tmp_path) | {"num_gpu_blocks_override": 40, "max_num_batched_tokens": 64}
    done = run(record_scenarios.aborted, engine, root=str(tmp_path)).value
    assert done["computed in prefill"] == 64
    assert done["status of the victim"] == "PREEMPTED"
    assert done["files"] == []
    assert right(done["after"][0])
    assert done["blocks in use"] == 0


@pytest.fixture(scope="module")
def failing(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("records")
    return run(record_scenarios.failing, records_engine(root, ring_bytes=1 << 20), root=str(root)).value


def test_a_full_disk_fails_the_records_that_do_not_fit_and_the_response_says_so(failing: dict[str, Any]) -> None:
    long, short, longer = failing["disk full"]
    for facts in (long, longer):
        assert facts["params"].keys() == {"error"}
        assert "File too large" in facts["params"]["error"]
        assert facts["output"] == 8
    assert right(short)


def test_after_a_failed_write_there_is_no_trace_of_it_and_others_go_on(failing: dict[str, Any]) -> None:
    (blocked,) = failing["a file in place of a folder"]
    assert "no folder" in blocked["params"]["error"]
    good = ["before", "after our folder was removed", "after"]
    assert all(right(failing[name][0]) for name in good)
    assert len(failing["files"]) == len(good) + 1 + 1  # what fitted onto the full disk, and the file in the way
    assert failing["metrics"]["hidden_states_records_failed"] == 3
    assert failing["metrics"]["hidden_states_records_written"] == len(good) + 1


def test_a_disk_that_stands_still_holds_back_only_who_waits_for_it(tmp_path: Path) -> None:
    done = run(record_scenarios.others_go_on, records_engine(tmp_path), root=str(tmp_path)).value
    assert done["20"]["files before"] == []
    assert len(done["150"]["files before"]) == 1  # of the one before
    for length, count in (("20", 1), ("150", 2)):
        facts = done[length]
        assert not facts["went on by itself"]
        assert facts["before"] == [f"other {length}"]
        assert facts["finished"] == [f"other {length}", f"stored {length}"]
        assert len(facts["files"]) == count
        assert right(facts["stored"])


def test_on_the_v2_runner_every_record_is_there_and_every_row_is_right(tmp_path: Path) -> None:
    engine = records_engine(tmp_path) | SMALL | {"max_num_seqs": 4}
    done = run(record_scenarios.few, engine, v2=True, root=str(tmp_path)).value
    found = [facts for batch in done["batches"].values() for facts in batch]
    assert done["runner"].startswith("vllm.v1.worker.cpu")
    assert len(found) == len(done["files"]) == 8
    assert [facts for facts in found if not right(facts)] == []
    assert done["metrics"]["prefix_cache_hits"] >= 2 * 96
    assert "leads out of the storage root" in done["refused"]
    assert done["metrics"].get("spec_decode_num_draft_tokens", 0) == 0


def test_slices_of_two_tensor_parallel_ranks_come_together_and_rows_wait_on_both(tmp_path: Path) -> None:
    engine = records_engine(tmp_path) | {"tensor_parallel_size": 2, "num_gpu_blocks_override": 40}
    done = run(record_scenarios.two_ranks, engine, env={"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}, root=str(tmp_path))
    assert [facts for facts in done.value["outputs"] if not right(facts)] == []
    assert len(done.value["files"]) == 6
    assert done.log.count("each keeps a slice of the hidden states, and rank 0 writes them") == 1


def test_a_connector_without_layer_ids_stops_the_engine_with_a_remedy(tmp_path: Path) -> None:
    engine = {key: value for key, value in records_engine(tmp_path).items() if key not in extract(LAYERS)}
    with pytest.raises(ChildFailedError, match=r"Name each wanted id once in kv_connector_extra_config\.layer_ids"):
        run(record_scenarios.two_ranks, engine, root=str(tmp_path))


def collect_from(url: str, folder: Path) -> RecordDataset:
    """What the collector makes of three lines on that server."""
    (folder / "data.jsonl").write_text(
        '{"text": "import os"}\n{"text": "%s"}\n{"prompt": "def f"}\n' % ("x = 1 " * 300)
    )
    (folder / "collected").mkdir()
    backend = Server(url, folder / "collected")
    report = Collector(Lines(folder / "data.jsonl"), Renderer(TINY), backend, folder / "collected", 5).collect()
    assert (report.records, report.failures.total()) == (2, 1)
    return RecordDataset(folder / "collected")


def test_the_server_answers_with_the_path_of_a_record_that_is_there(tmp_path: Path) -> None:
    arguments = records_engine(tmp_path / "records")
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", TINY, "--dtype", "float32"]
    command += ["--enforce-eager", "--max-model-len", "512"]
    for key, value in arguments.items():
        command += [f"--{key.replace('_', '-')}", json.dumps(value)]
    with serving(tmp_path / "server.log", command, get_open_port()) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)

        def complete(**kv_transfer_params: Any) -> Any:
            extra = {"kv_transfer_params": kv_transfer_params, "ignore_eos": True}
            return client.completions.create(
                model=TINY, prompt=[5, 6, 7, 8], max_tokens=9, temperature=0, extra_body=extra
            )

        answer = complete(include_output_tokens=True, name="from/http")
        record = load(answer.kv_transfer_params["hidden_states_path"])
        for params in ({"name": "../from/http"}, {"name": "a\ud800"}, {"window": [4, 9]}, {"paths": "x"}):
            body = {"model": TINY, "prompt": [5, 6, 7, 8], "max_tokens": 9, "kv_transfer_params": params}
            json_of = {"content": json.dumps(body), "headers": {"Content-Type": "application/json"}}
            refused = httpx.post(f"{server.url}/v1/completions", **json_of, timeout=60)
            assert (refused.status_code, "kv_transfer_params" in refused.text) == (400, True), refused.text
        with ThreadPoolExecutor(8) as pool:
            together = list(pool.map(lambda _: complete().kv_transfer_params["hidden_states_path"], range(16)))
        assert all(load(path).info.rows == 4 for path in together)
        metrics = server.get("/metrics")
        collected = collect_from(server.url, tmp_path)
        assert "Traceback" not in server.log.read_text()
        server.process.terminate()
        assert server.process.wait(timeout=60) == 0
    assert (record.info.rows, record.info.first_position) == (4 + 8, 0)
    assert record.token_ids[:4].tolist() == [5, 6, 7, 8]
    assert answer.kv_transfer_params["hidden_states_path"] == str(tmp_path / "records" / "from" / "http.safetensors")
    assert len(set(together)) == 16
    assert collected.names == ["000000/000000000", "000000/000000002"]  # moved here; the line between is too long
    assert [len(item.token_ids) for item in collected] == [
        item.info.num_prompt_tokens + more for item, more in zip(collected, (0, 4), strict=True)
    ]
    assert counter(metrics, "vllm:hidden_states_records_written") == 17
    assert counter(metrics, "vllm:hidden_states_records_failed") == 0
    assert len(record_scenarios.files(tmp_path / "records")) == 17
    # By default a server kills its engine at once; the process that writes ends by itself, a moment later.
    deadline = time.monotonic() + 30
    while unfinished := list((tmp_path / "records").glob(".writing-run-*")):
        assert time.monotonic() < deadline, unfinished
        time.sleep(0.01)

"""An engine that is configured for vLLM's own connector, as speculators and ModelOpt configure theirs."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import example_connector
from tests.support.forked_engine import Run, run
from tests.support.tiny_models import write_model

HOST = "vllm.v1.spec_decode.extract_hidden_states.ExtractHiddenStatesProposer"
OURS = "proposers.hidden_states.extractor.ExtractHiddenStatesProposer"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def without(model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What vLLM's own extraction leaves."""
    root = tmp_path_factory.mktemp("off")
    engine = example_connector.example_engine(model, root)
    value: dict[str, Any] = run(example_connector.kept, engine, mode="off", root=str(root)).value
    return value


def lines_of_ours(done: Run) -> list[str]:
    lines = [line for line in done.log.splitlines() if re.search(r"vllm-mtp-proposers", line)]
    return [line for line in lines if "ExampleHiddenStatesConnector" in line]


@pytest.mark.parametrize("lock_files", [True, False])
def test_it_is_served_by_ours_with_the_paths_and_locks_that_its_readers_expect(
    lock_files: bool, model: str, without: dict[str, Any], tmp_path: Path
) -> None:
    engine = example_connector.example_engine(model, tmp_path, use_synchronization_lock=lock_files)
    done = run(example_connector.served, engine, root=str(tmp_path), lock_files=lock_files)
    assert done.value["proposer"] == OURS
    assert len(lines_of_ours(done)) == 1
    assert len(done.value["records"]) == len(without["records"]) == 3
    for ours, host in zip(done.value["records"], without["records"], strict=True):
        assert ours["params"] == host["params"] == ["hidden_states_path"]
        assert ours["there"] == [True, lock_files]
        assert ours["in the root"]
        assert ours["tokens"] == host["tokens"]
        torch.testing.assert_close(torch.tensor(ours["hidden states"]), torch.tensor(host["hidden states"]))
    assert done.value["left"] == []  # its readers' own cleaning up leaves nothing


def test_where_clients_choose_paths_it_runs_as_without_the_plugin_and_one_line_says_so(
    model: str, without: dict[str, Any], tmp_path: Path
) -> None:
    assert without["proposer"] == HOST
    assert without["num_speculative_tokens"] == 1
    assert without["drafts"]["spec_decode_num_drafts"] > 0
    assert without["files"] == len(without["records"])
    for record in without["records"]:
        assert record["in the root"]
        assert record["of the request"]
        assert len(record["hidden states"]) == len(record["tokens"])
    engine = example_connector.example_engine(model, tmp_path, allow_custom_save_path=True)
    with_plugin = run(example_connector.kept, engine, mode="on", root=str(tmp_path))
    assert with_plugin.value == without
    (line,) = lines_of_ours(with_plugin)
    assert "name HiddenStatesConnector instead" in line
    assert "keeps the hidden states" not in with_plugin.log, "no proposer of ours was built"

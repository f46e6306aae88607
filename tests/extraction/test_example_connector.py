"""vLLM's own extraction, for whoever names vLLM's own connector: as if this plugin were not there."""

import re
from pathlib import Path

import pytest

from tests.support import example_connector
from tests.support.forked_engine import Run, run
from tests.support.tiny_models import write_model

HOST = "vllm.v1.spec_decode.extract_hidden_states.ExtractHiddenStatesProposer"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model("llama", tmp_path_factory.mktemp("llama"))


def kept(model: str, root: Path, mode: str) -> Run:
    return run(example_connector.kept, example_connector.example_engine(model, root), mode=mode, root=str(root))


def test_an_engine_with_vllms_connector_runs_as_without_the_plugin_and_one_line_says_so(
    model: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    without = kept(model, tmp_path_factory.mktemp("off"), "off").value
    assert without["proposer"] == HOST
    assert without["num_speculative_tokens"] == 1
    assert without["drafts"]["spec_decode_num_drafts"] > 0
    assert without["files"] == len(without["records"])
    for record in without["records"]:
        assert record["params"] == ["hidden_states_path"]
        assert record["in the root"]
        assert record["of the request"]
        assert len(record["hidden states"]) == len(record["tokens"])
    with_plugin = kept(model, tmp_path_factory.mktemp("on"), "on")
    assert with_plugin.value == without
    lines = [line for line in with_plugin.log.splitlines() if re.search(r"vllm-mtp-proposers|\bproposers\.", line)]
    said = [line for line in lines if "ExampleHiddenStatesConnector" in line]
    assert len(said) == 1, lines
    assert "keeps the hidden states" not in with_plugin.log, "no proposer of ours was built"

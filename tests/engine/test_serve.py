"""`bench serve` on real servers."""

import json
import sys
from pathlib import Path

from bench.serve import FIGURES, SCHEMA
from tests.support.children import TINY, run_command

ENGINE = '{"enforce_eager": true, "dtype": "float32"}'
SMALL = ["--concurrency", "2", "--prompt-tokens", "32", "--output-tokens", "16", "--requests", "1", "--turns", "1"]


def test_servers_are_driven_by_turns_and_every_request_is_counted(tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    modes = ["--modes", "none,ours", "--shared-prefix", "0.5"]
    words = ["serve", "--model", TINY, *SMALL, *modes, "--engine", ENGINE, "--json", str(record)]
    done = run_command([sys.executable, "-m", "bench", *words])
    assert done.returncode == 0, done.stderr[-8000:]
    result = json.loads(record.read_text())
    assert result["schema"] == SCHEMA
    assert result["turns_done"] == 1
    assert result["settings"]["vocab_size"] == 1024
    none, ours = result["modes"]["none"], result["modes"]["ours"]
    assert (none["proposer"], ours["proposer"]) == (None, "proposers.v1.MultiGroupProposer")
    for entry in (none, ours):
        for figure in FIGURES:
            assert entry["prompts"]["32"][figure]["2"]["median"] > 0
        assert [(run["concurrency"], run["requests"]) for run in entry["runs"]] == [(2, 8)]
        assert all(8 * 8 <= run["output_tokens"] <= 8 * 24 for run in entry["runs"])
        assert [run["looked_up_tokens"] for run in entry["runs"]] == [8 * 32]
    # Both modes had the same requests.
    assert [run["output_tokens"] for run in none["runs"]] == [run["output_tokens"] for run in ours["runs"]]
    assert "acceptance_length" not in none["prompts"]["32"]
    assert min(ours["prompts"]["32"]["acceptance_length"].values()) > 1.5
    lines = [line.split(":")[0] for line in done.stderr.splitlines() if "concurrency" in line]
    assert lines == ["none", "ours"] * 2  # one cell of each, in the warm-up and in the turn
    assert "| 32 | 2 |" in done.stdout
    assert "ours / none" in done.stdout

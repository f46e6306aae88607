"""The collector on an engine of its own, from data to an export; on a server it is in `test_connector.py`."""

import json
import re
import subprocess
import sys
from pathlib import Path

import datasets

from bench.processes import SMALL_ENGINE
from bench.reference.residual import residual_stream_of
from proposers.hidden_states import RecordDataset
from tests.support.chat_templates import WITHOUT_BLOCKS
from tests.support.children import ROOT, TINY, child_environment

PAGE = (ROOT / "docs" / "extraction.md").read_text()
LAYERS = [2, 3, 6]


def write_data(path: Path) -> None:
    talk = [{"role": "user", "content": "import os"}, {"role": "assistant", "content": "os.path.join(a, b)"}]
    lines = [
        {"messages": talk},
        {"messages": [*talk, {"role": "user", "content": "and then?"}]},
        {"prompt": "def f(x):\n"},
        {"text": "import sys\n"},
        {"text": "x = 1\n" * 200},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "proposers.hidden_states", *arguments],
        env=child_environment(**SMALL_ENGINE),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )


def test_it_collects_with_an_engine_of_its_own_and_exports_with_its_masks(tmp_path: Path) -> None:
    write_data(tmp_path / "data.jsonl")
    (tmp_path / "template.jinja").write_text(WITHOUT_BLOCKS)
    engine = {"dtype": "float32", "max_model_len": 256, "enforce_eager": True, "max_num_seqs": 4}
    out, exported = tmp_path / "out", tmp_path / "exported"
    (of_the_page,) = re.findall(r"^python -m proposers.hidden_states (collect .*)$", PAGE, re.MULTILINE)
    places = {"talks.jsonl": str(tmp_path / "data.jsonl"), "collected": str(out)}
    collect = [places.get(word, word) for word in of_the_page.split()]
    collect += ["--chat-template", str(tmp_path / "template.jinja"), "--max-tokens", "8"]
    done = command(*collect, "--engine-args", json.dumps(engine))
    assert done.returncode == 1, done.stderr  # the last line is too long
    assert done.stdout.splitlines()[-1] == "  1 times: the line and its answer may have more tokens than 256"
    dataset = RecordDataset(out)
    assert dataset.names == [f"000000/00000000{i}" for i in range(4)]
    total = sum(len(record.token_ids) for record in dataset)
    assert f"4 records, {total} tokens, 1 failures" in done.stdout
    assert "5 records of at most" in done.stderr
    reference = residual_stream_of(TINY)
    for record in dataset:
        expected = reference(record.token_ids.tolist())[:, LAYERS]
        assert record.info.layer_ids == tuple(LAYERS)
        assert (record.hidden_states - expected).abs().max() / expected.abs().max() < 2e-5
    done = command("export", "--to", "speculators", "--records", str(out), "--out", str(exported))
    assert done.returncode == 0, done.stderr
    assert "prompts alone" not in done.stderr
    masks = [mask.tolist() for mask in datasets.load_from_disk(exported)["loss_mask"]]
    assert [len(mask) for mask in masks] == [len(record.token_ids) for record in dataset]
    assert (masks[2][-7:], set(masks[2][:-7]), set(masks[3])) == ([1] * 7, {0}, {1})
    assert masks[1][-7:] == [1] * 7
    assert 0 in masks[0]
    assert 1 in masks[0]

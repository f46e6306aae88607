"""What every test process needs before vLLM is imported, and the state of the host between tests."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bench.interpreter import interpret_triton
from tests.support.engine import ENVIRONMENT

# These need a GPU and its machine's vLLM: `python -m pytest tests/gpu` there. The kernels' own also run on the CPU, by
# Triton's interpreter (`tests/unit/test_kernels.py`).
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    interpret_triton()
collect_ignore: list[str | Path] = []
if not torch.cuda.is_available():
    with_engines = [path for path in Path(__file__).parent.glob("gpu/test_*.py") if not path.stem.endswith("kernels")]
    collect_ignore = with_engines if INTERPRETED else ["gpu"]

# Also for tests in this process; whatever the developer's shell has set must not decide what is tested.
os.environ.update(ENVIRONMENT | {"MTP_PROPOSERS": "on"})


@pytest.fixture
def unpatched() -> Iterator[None]:
    """vLLM without our patches for one test; those that were installed come back after it."""
    import vllm

    from proposers.host import LEDGER
    from proposers.host import patching as compat

    was_installed = compat.installed_patches()
    compat.remove_patches()
    yield
    compat.remove_patches()
    compat.apply_patches([patch for patch in LEDGER if patch.target in was_installed], vllm.__version__)


@pytest.fixture
def vllm_log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What vLLM's loggers say; they hand nothing on to the root logger, which `caplog` listens to."""
    logging.getLogger("vllm").addHandler(caplog.handler)
    yield caplog
    logging.getLogger("vllm").removeHandler(caplog.handler)

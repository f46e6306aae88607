"""What every test process needs before vLLM is imported, and the state of the host between tests."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bench.interpreter import interpret_triton
from bench.processes import SMALL_ENGINE

pytest.register_assert_rewrite("tests.support")  # what fails there is explained as in a test

# The tests in tests/gpu need a GPU and a vLLM that uses it. Without one they are left out, but for those of the kernels
# alone where Triton's interpreter runs the kernels (`tests/engine/test_interpreted_kernels.py`). Their files are named
# and not the folder, which pytest would collect all the same: it is an argument of its own (`testpaths`).
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    interpret_triton()
collect_ignore: list[Path] = []
if not torch.cuda.is_available():
    on_gpu = Path(__file__).parent.glob("gpu/test_*.py")
    collect_ignore = [path for path in on_gpu if not (INTERPRETED and path.stem.endswith("kernels"))]

# Also for tests in this process; whatever the developer's shell has set must not decide what is tested.
os.environ.update(SMALL_ENGINE | {"MTP_PROPOSERS": "on"})


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

"""Step-3.5's modules in fewer launches, and when they stay as they are (what they compute: `test_engine.py`)."""

import functools
import logging

import pytest
from torch import nn

from proposers import step3p5
from proposers.step3p5 import fuse_modules


@pytest.fixture
def predictor() -> nn.Module:
    return nn.Module()


def test_the_installed_vllm_has_the_modules_that_are_known(predictor: nn.Module) -> None:
    assert fuse_modules(predictor)
    assert isinstance(predictor.forward, functools.partial)
    assert predictor.forward.args == (predictor,)


def test_other_modules_stay_as_they_are_and_a_line_says_so(
    predictor: nn.Module, monkeypatch: pytest.MonkeyPatch, vllm_log: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(step3p5, "forwards_of_the_host", lambda: "another")
    with vllm_log.at_level(logging.INFO, logger="vllm.proposers"):
        assert not fuse_modules(predictor)
    assert "run as they are" in vllm_log.text
    assert "forward" not in vars(predictor)


def test_batch_invariant_mode_keeps_the_hosts_modules(predictor: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.envs.VLLM_BATCH_INVARIANT", True)
    assert not fuse_modules(predictor)
    assert "forward" not in vars(predictor)

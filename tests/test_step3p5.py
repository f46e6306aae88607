"""Step-3.5's modules in fewer launches, and when they stay as they are (what they compute: `test_engine.py`)."""

import functools
import logging
from collections.abc import Callable

import pytest
from torch import nn
from vllm.model_executor.layers.layernorm import GemmaRMSNorm
from vllm.model_executor.models.step3p5 import Step3p5Attention, Step3p5DecoderLayer
from vllm.model_executor.models.step3p5_mtp import Step3p5AMultiTokenPredictor, Step3p5AMultiTokenPredictorLayer

from proposers import step3p5
from proposers.step3p5 import fuse_modules


class Another(nn.Module):
    pass


def bare(kind: type[nn.Module], **children: nn.Module) -> nn.Module:
    """A module of vLLM's without its weights, which nothing here looks at."""
    module = kind.__new__(kind)
    nn.Module.__init__(module)
    for name, child in children.items():
        setattr(module, name, child)
    return module


@pytest.fixture
def predictor() -> nn.Module:
    norms = lambda *names: {name: bare(GemmaRMSNorm) for name in names}  # noqa: E731
    attention = bare(Step3p5Attention, **norms("q_norm", "k_norm"))
    block = bare(Step3p5DecoderLayer, self_attn=attention, **norms("input_layernorm", "post_attention_layernorm"))
    module = bare(Step3p5AMultiTokenPredictorLayer, mtp_block=block, **norms("enorm", "hnorm"))
    return bare(Step3p5AMultiTokenPredictor, layers=nn.ModuleDict({"8": module}))


def test_the_installed_vllms_modules_are_known(predictor: nn.Module) -> None:
    assert fuse_modules(predictor)
    assert isinstance(predictor.forward, functools.partial)
    assert predictor.forward.args == (predictor,)


def of_a_subclass(predictor: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    predictor.__class__ = type("Another", (Step3p5AMultiTokenPredictor,), {})


def with_another_norm(predictor: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    next(iter(predictor.layers.values())).mtp_block.self_attn.k_norm = Another()


def with_another_attention(predictor: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    next(iter(predictor.layers.values())).mtp_block.self_attn = Another()


def of_another_release(predictor: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step3p5, "forwards_of_the_host", lambda: "another")


def wrapped_by_somebody(predictor: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Step3p5DecoderLayer.forward
    monkeypatch.setattr(Step3p5DecoderLayer, "forward", functools.wraps(original)(lambda *x: original(*x)))


@pytest.mark.parametrize(
    "made", [of_a_subclass, with_another_norm, with_another_attention, of_another_release, wrapped_by_somebody]
)
def test_other_modules_stay_as_they_are_and_a_line_says_so(
    made: Callable[..., None],
    predictor: nn.Module,
    monkeypatch: pytest.MonkeyPatch,
    vllm_log: pytest.LogCaptureFixture,
) -> None:
    made(predictor, monkeypatch)
    with vllm_log.at_level(logging.INFO, logger="vllm.proposers"):
        assert not fuse_modules(predictor)
    assert "run as they are" in vllm_log.text
    assert "forward" not in vars(predictor)


def test_batch_invariant_mode_keeps_the_hosts_modules(predictor: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.envs.VLLM_BATCH_INVARIANT", True)
    assert not fuse_modules(predictor)
    assert "forward" not in vars(predictor)

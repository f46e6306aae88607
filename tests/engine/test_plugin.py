"""What vLLM makes of the plugin: discovery, other methods, and the way to the V1 runner."""

import json
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
from vllm.v1.worker import gpu_model_runner

from mtp.plan import DraftDescriptor
from proposers import architecture
from proposers.architecture import Architecture
from proposers.host.drafting import build_speculator
from proposers.plugin import register
from proposers.v1 import MultiGroupProposer
from tests.support import scenarios
from tests.support.children import TINY, run_python
from tests.support.forked_engine import run
from tests.support.rig import CPU, greedy_sampling, make_config

NGRAM = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}}

DISCOVER = """
import json
from vllm.plugins import load_general_plugins
load_general_plugins()
from proposers.host.patching import installed_patches
first = installed_patches()
from proposers.plugin import register
register()
import vllm.v1.worker.gpu_model_runner as runner
print(json.dumps([first, installed_patches(), runner.Step3p5MTPProposer.__module__]))
"""


def last_line(output: str) -> Any:
    return json.loads(output.strip().splitlines()[-1])


def test_vllm_finds_the_plugin_itself_and_registering_again_changes_nothing() -> None:
    first, second, module = last_line(run_python(DISCOVER, MTP_PROPOSERS="on"))
    assert "vllm.v1.worker.gpu_model_runner:Step3p5MTPProposer" in first
    assert second == first
    assert module == "proposers.host.patching"


def test_with_the_plugin_off_vllm_is_as_it_was() -> None:
    first, second, module = last_line(run_python(DISCOVER, MTP_PROPOSERS="off"))
    assert first == second == []
    assert module == "vllm.v1.spec_decode.step3p5"


@pytest.mark.parametrize("engine", [{}, NGRAM], ids=["no speculation", "ngram"])
def test_other_methods_run_as_without_the_plugin(engine: dict[str, Any]) -> None:
    # Numba compiles the n-gram proposer in every process, which takes longer than a few drafts do without it.
    env, scenario = ({"NUMBA_DISABLE_JIT": "1"}, scenarios.few_greedy) if engine else ({}, scenarios.lossless)
    with_plugin, without = (run(scenario, engine, mode=mode, env=env).value for mode in ("on", "off"))
    assert with_plugin["tokens"] == without["tokens"]
    assert with_plugin.get("proposer") == without.get("proposer")
    counted = [{k: v for k, v in r["metrics"].items() if "spec_decode" in k} for r in (with_plugin, without)]
    assert counted[0] == counted[1]


@pytest.fixture
def registered() -> None:
    register()


@pytest.mark.usefixtures("registered")
def test_the_runner_builds_our_proposer_for_a_known_architecture_and_recognises_it() -> None:
    config = make_config()
    assert config.speculative_config.use_step3p5_mtp()
    proposer = gpu_model_runner.Step3p5MTPProposer(config, CPU, None)
    assert type(proposer) is MultiGroupProposer
    assert proposer.architecture.name == "Step3p5MTP"
    assert isinstance(proposer, gpu_model_runner.Step3p5MTPProposer)
    assert not isinstance(object(), gpu_model_runner.Step3p5MTPProposer)


@pytest.mark.usefixtures("registered")
def test_an_unknown_architecture_keeps_vllms_own_proposer_and_one_line_says_so(
    vllm_log: pytest.LogCaptureFixture,
) -> None:
    config = make_config()
    draft = config.speculative_config.draft_model_config.hf_config
    draft.architectures, draft.model_type = ["SomeOtherMTP"], "some_other_mtp"
    with vllm_log.at_level(logging.INFO, logger="vllm.proposers"):
        ours = config.speculative_config.use_step3p5_mtp()
    lines = [record.getMessage() for record in vllm_log.records if record.name == "vllm.proposers"]
    assert not ours
    assert len(lines) == 1
    assert lines[0].startswith("vLLM's own proposer drafts: vllm-mtp-proposers knows Step3p5MTP")
    assert lines[0].endswith("and not SomeOtherMTP.")


# The V2 runner, which is the default on CUDA.

REASON = "drafting by vllm-mtp-proposers"


def reasons(config: VllmConfig) -> list[str]:
    return [reason for reason in config._get_v2_model_runner_unsupported_features() if REASON in reason]


@pytest.fixture
def v2_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)


@pytest.mark.usefixtures("registered", "v2_unset")
def test_what_drafts_on_v2_leaves_the_choice_of_the_runner_to_vllm() -> None:
    assert reasons(make_config()) == []


@pytest.fixture
def v1_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry `SomeMTP` that leaves V2 to vLLM."""
    entry = Architecture(DraftDescriptor("SomeMTP"), speculator=None, why_not_on_v2="it is for tests")
    monkeypatch.setattr(architecture, "_registered", {"SomeMTP": entry})


@pytest.mark.usefixtures("registered", "v2_unset", "v1_only")
@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda config: _becomes_some_mtp(config), "it is for tests"),
        (lambda config: setattr(config.parallel_config, "data_parallel_size", 2), "no data parallelism"),
    ],
)
def test_what_drafts_on_v1_alone_is_a_reason_to_take_that_runner(
    change: Callable[[VllmConfig], None], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config()
    change(config)
    (reason,) = reasons(config)
    assert why in reason
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    assert reasons(config) == []


DATA_PARALLEL = {"parallel_config.data_parallel_size": 2}


@pytest.mark.usefixtures("registered", "v2_unset")
@pytest.mark.parametrize(
    "changes",
    [
        {"parallel_config.pipeline_parallel_size": 2},
        {"parallel_config.decode_context_parallel_size": 2},
        {"parallel_config.prefill_context_parallel_size": 2},
        {"speculative_config.enable_adaptive_verification": True},
        {"watermark_config": "any"},
        DATA_PARALLEL | {"watermark_config": "any"},
        DATA_PARALLEL | {"parallel_config.pipeline_parallel_size": 2},
        DATA_PARALLEL | {"parallel_config.enable_batch_sharded_sampling": True},
        DATA_PARALLEL | {"model_config.enable_trace_replay": True},
        DATA_PARALLEL | {"model_config.return_sampling_mask": True},
    ],
    ids=str,
)
def test_what_only_v2_takes_stays_there_and_is_drafted_for_by_vllm(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm.config.vllm.HAS_TRITON", True)
    config = make_config()
    for path, value in changes.items():
        owner, _, name = path.rpartition(".")
        setattr(getattr(config, owner) if owner else config, name, value)
    assert reasons(config) == []
    assert config.use_v2_model_runner
    config._validate_v2_model_runner()
    assert build_speculator.replace(lambda *args: "vLLM's own")(config, CPU, None) == "vLLM's own"


def _becomes_some_mtp(config: VllmConfig) -> None:
    config.speculative_config.draft_model_config.hf_config.architectures = ["SomeMTP"]


@pytest.mark.usefixtures("registered", "v1_only")
def test_what_an_entry_leaves_to_vllm_on_v2_is_drafted_for_by_vllm_and_a_line_says_so(
    vllm_log: pytest.LogCaptureFixture,
) -> None:
    config = make_config()
    _becomes_some_mtp(config)
    assert build_speculator.replace(lambda *args: "vLLM's own")(config, CPU, None) == "vLLM's own"
    assert "vLLM's own speculator drafts for SomeMTP on the V2 model runner: it is for tests." in vllm_log.text


@pytest.mark.usefixtures("registered")
def test_who_asks_for_the_v2_runner_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config()
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    assert reasons(config) == []
    assert config.use_v2_model_runner


@pytest.mark.usefixtures("registered", "v2_unset")
@pytest.mark.parametrize("engine", [{}, NGRAM], ids=["no speculation", "ngram"])
@pytest.mark.parametrize("v2", [None, "1", "0"])
def test_other_methods_are_routed_as_without_the_plugin(
    engine: dict[str, Any], v2: str | None, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    config = EngineArgs(
        model=TINY, dtype="float32", enforce_eager=True, max_model_len=256, **engine
    ).create_engine_config()
    if v2 is not None:
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", v2)
    with_plugin = config._get_v2_model_runner_unsupported_features(), config.use_v2_model_runner
    request.getfixturevalue("unpatched")
    assert (config._get_v2_model_runner_unsupported_features(), config.use_v2_model_runner) == with_plugin


# The CPU build's sampler, which verifies drafts at memory that it never set (vLLM issue 55005).


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(
    ("per_request", "expanded"),
    [
        (torch.tensor([1.5, 0, 2.5, 3.5]), [1.5, 1.5, 1, 3.5, 3.5, 3.5]),
        (torch.tensor([3, 0, 5, 7], dtype=torch.int32), [3, 3, 1, 7, 7, 7]),
    ],
    ids=["temperature", "top-k"],
)
def test_what_a_request_asks_for_reaches_every_one_of_its_drafts(
    per_request: torch.Tensor, expanded: list[float]
) -> None:
    gpu_model_runner.Step3p5MTPProposer(make_config(), CPU, None)  # the host's function is left alone until then
    ends = torch.tensor([2, 3, 3, 6], dtype=torch.int32)
    result = rejection_sampler.expand_batch_to_tokens(per_request, ends, 6, replace_from=0, replace_to=1)
    assert result.dtype == per_request.dtype
    assert result.tolist() == expanded


@pytest.mark.usefixtures("registered")
def test_a_step_in_which_nobody_has_drafts_is_sampled_and_not_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu_model_runner.Step3p5MTPProposer(make_config(), CPU, None)
    verified: list[list[int]] = []

    def rejection_sample(draft_token_ids: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        verified.append(draft_token_ids.tolist())
        return torch.zeros(2, 2, dtype=torch.int32)

    monkeypatch.setattr(rejection_sampler, "rejection_sample", rejection_sample)
    sampler = rejection_sampler.RejectionSampler(Sampler())
    logits = torch.tensor([[0.0, 2, 1], [3, 0, 1], [0, 1, 2]])
    nothing = SpecDecodeMetadata.make_dummy([[], [], []], CPU)
    assert sampler(nothing, None, logits, greedy_sampling()).sampled_token_ids.tolist() == [[1], [0], [2]]
    assert verified == []
    sampler(SpecDecodeMetadata.make_dummy([[5], []], CPU), None, logits, greedy_sampling())
    assert verified == [[5]]

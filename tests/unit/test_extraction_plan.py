"""What a configuration may ask of hidden-state extraction, said before a process is started."""

import pickle
from typing import Any

import pytest
from vllm.config import VllmConfig, replace
from vllm.engine.arg_utils import EngineArgs

from proposers.hidden_states.plan import ExtractionPlan, check_and_draft_nothing
from proposers.hidden_states.request import Settings
from proposers.plugin import register
from tests.support.children import TINY
from tests.support.engine_arguments import extract

LAYERS = 6  # of the tiny model


@pytest.fixture(autouse=True)
def registered() -> None:
    register()


def make_config(layer_ids: Any = (1, 3), *, engine: dict[str, Any] | None = None, **speculative: Any) -> VllmConfig:
    ids = list(layer_ids) if isinstance(layer_ids, tuple) else layer_ids
    more = {"dtype": "float32", "enforce_eager": True, "max_model_len": 256} | (engine or {})
    return EngineArgs(model=TINY, **more, **extract(ids, **speculative)).create_engine_config()


# Layer ids.


@pytest.mark.parametrize(
    ("layer_ids", "message"),
    [
        ((2, 99), r"\[2, 99\] has \[99\], which this model doesn't have.*from 0 .* to 6"),
        ((2, -1), r"has \[-1\]"),
        ((2, LAYERS + 1), r"has \[7\]"),
        ((2, True), r"has \[True\]"),
        (("2",), r"has \['2'\]"),
        ((4, 1, 4), r"\[4, 1, 4\] has \[4\] more than once"),
        ((), "there is no hidden state to extract"),
        (3, "is 3, so there is no hidden state to extract"),
        (None, "is None, so there is no hidden state to extract"),
    ],
)
def test_layer_ids_that_the_model_does_not_have_once_are_refused(layer_ids: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_config(layer_ids)


@pytest.mark.parametrize("layer_ids", [(0,), (LAYERS,), (4, 1), tuple(range(LAYERS, -1, -1))])
def test_layer_ids_are_kept_in_the_order_asked_for(layer_ids: tuple[int, ...]) -> None:
    assert ExtractionPlan.of(make_config(layer_ids)).layer_ids == layer_ids


@pytest.mark.usefixtures("unpatched")
@pytest.mark.parametrize("layer_ids", [(2, 99), (4, 4)])
def test_vllm_itself_takes_layer_ids_that_there_are_not(layer_ids: tuple[int, ...]) -> None:
    config = make_config(layer_ids).speculative_config.draft_model_config.hf_config
    assert tuple(config.eagle_aux_hidden_state_layer_ids) == layer_ids


# Nothing is drafted.


def test_a_decode_step_has_one_position(request: pytest.FixtureRequest) -> None:
    config = make_config()
    assert (config.num_speculative_tokens, config.num_lookahead_tokens, config.uniform_decode_query_len) == (0, 0, 1)
    request.getfixturevalue("unpatched")
    assert make_config().uniform_decode_query_len == 2


@pytest.mark.parametrize("num_speculative_tokens", [2, 5])
def test_drafts_are_refused(num_speculative_tokens: int) -> None:
    with pytest.raises(
        ValueError, match=f"num_speculative_tokens={num_speculative_tokens}.*drafts nothing.*set it to 1"
    ):
        make_config(num_speculative_tokens=num_speculative_tokens)


def test_a_copy_of_a_config_is_as_good_as_the_config() -> None:
    config = make_config()
    copy = replace(config)
    assert (config.num_speculative_tokens, copy.num_speculative_tokens) == (0, 0)


def test_a_config_that_reaches_another_process_is_as_good_there() -> None:
    config = pickle.loads(pickle.dumps(make_config()))
    config.__post_init__()  # as the engine core does
    assert config.num_speculative_tokens == 0


# What would be silently wrong.


@pytest.mark.parametrize(
    ("config_name", "name", "value"),
    [
        ("parallel_config", "pipeline_parallel_size", 2),
        ("parallel_config", "decode_context_parallel_size", 2),
        ("parallel_config", "prefill_context_parallel_size", 2),
        ("parallel_config", "enable_dbo", True),
        ("model_config", "runner_type", "pooling"),
        ("cache_config", "kv_sharing_fast_prefill", True),
    ],
)
def test_configurations_that_would_lose_rows_are_refused(config_name: str, name: str, value: Any) -> None:
    config = make_config()
    # Set afterwards, since for this model vLLM has other objections to some of them.
    config.speculative_config.num_speculative_tokens = 1
    setattr(getattr(config, config_name), name, value)
    with pytest.raises(ValueError, match=f"can't be served with {name}={value}"):
        check_and_draft_nothing(config)


# Beside vLLM's own.


def test_graphs_with_captures_are_not_mixed_up_with_vllms(request: pytest.FixtureRequest) -> None:
    ours, other = (make_config(ids).compute_hash() for ids in ((1, 3), (3, 1)))
    assert ours != other
    request.getfixturevalue("unpatched")
    assert make_config().compute_hash() != ours


def test_the_v1_runner_is_asked_for_and_the_user_may_insist_on_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config()

    def reasons() -> list[str]:
        return [r for r in config._get_v2_model_runner_unsupported_features() if "vllm-mtp-proposers" in r]

    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    assert len(reasons()) == 1
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    assert reasons() == []


# Configurations of other connectors.

EXAMPLE = {"kv_connector": "ExampleHiddenStatesConnector"}
FP8 = {
    "kv_connector": "FP8HiddenStatesConnector",
    "kv_connector_module_path": "hs_connectors.fp8_hidden_states_connector",
}


@pytest.mark.parametrize(
    ("connector", "extra", "settings"),
    [
        (EXAMPLE, {"shared_storage_path": "x"}, {"lock_files": True, "dtype": "model"}),
        (EXAMPLE, {"shared_storage_path": "x", "use_synchronization_lock": False}, {"lock_files": False}),
        (FP8, {"shared_storage_path": "x"}, {"lock_files": True, "dtype": "fp8"}),
    ],
    ids=["example", "without locks", "fp8 of speculators"],
)
def test_configurations_of_trainers_are_served_by_ours(
    connector: dict[str, Any], extra: dict[str, Any], settings: dict[str, Any]
) -> None:
    transfer = connector | {"kv_role": "kv_producer", "kv_connector_extra_config": extra}
    ours = make_config(engine={"kv_transfer_config": transfer}).kv_transfer_config
    assert (ours.kv_connector, ours.kv_connector_module_path) == ("HiddenStatesConnector", None)
    found = Settings.of(ours.kv_connector_extra_config)
    assert (found.storage_root, {key: getattr(found, key) for key in settings}) == ("x", settings)


@pytest.mark.parametrize("extra", [{"allow_custom_save_path": True}, {"something": 1}])
def test_what_ours_does_not_serve_is_left_as_it_is(extra: dict[str, Any]) -> None:
    transfer = EXAMPLE | {"kv_role": "kv_producer", "kv_connector_extra_config": extra}
    config = make_config(engine={"kv_transfer_config": transfer})
    assert config.kv_transfer_config.kv_connector == "ExampleHiddenStatesConnector"
    assert ExtractionPlan.of(config) is None

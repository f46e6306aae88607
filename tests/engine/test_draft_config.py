"""A draft's config is its target's: what a user overrides there holds for both."""

import pickle
from pathlib import Path
from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs

from proposers.plugin import register
from tests.support import limit_scenarios as limits
from tests.support.children import TINY
from tests.support.engine_arguments import mtp
from tests.support.forked_engine import run

NATIVE, LENGTHENED = 256, 512
LONGER = {"max_position_embeddings": LENGTHENED, "max_seq_len": LENGTHENED}


def draft_config(model: str = TINY, speculative: dict[str, Any] | None = None, **overrides: Any) -> Any:
    register()
    return (
        EngineArgs(
            model=model,
            hf_overrides=overrides,
            speculative_config={"method": "mtp", "num_speculative_tokens": 3} | (speculative or {}),
        )
        .create_engine_config()
        .speculative_config.draft_model_config
    )


def test_a_longer_context_holds_for_the_draft_too(tmp_path: Path) -> None:
    draft = draft_config(limits.write_shorter(tmp_path, NATIVE), **LONGER)
    assert draft.max_model_len == LENGTHENED
    assert draft.hf_config.max_position_embeddings == LENGTHENED


def test_so_does_another_rope() -> None:
    thetas = [3e4] * 9
    assert draft_config(rope_theta=thetas).hf_config.rope_theta == thetas


def test_vllms_own_override_sees_what_was_overridden() -> None:
    config = draft_config(num_nextn_predict_layers=1).hf_config
    assert (config.num_nextn_predict_layers, config.n_predict) == (1, 1)
    assert config.architectures == ["Step3p5MTP"]


def test_a_part_of_a_config_is_overridden_in_part() -> None:
    from transformers import PreTrainedConfig

    from proposers.host.draft_config import override_values

    config = PreTrainedConfig(a=1, b={"kept": 1, "c": 2})
    config.text_config = PreTrainedConfig(a=1, kept=2, rope={"factor": 1, "kept": 3})
    override_values(config, {"a": 5, "b": {"c": 3}, "text_config": {"a": 6, "rope": {"factor": 4}}})
    assert (config.a, config.b) == (5, {"c": 3})
    assert (config.text_config.a, config.text_config.kept) == (6, 2)
    assert config.text_config.rope == {"factor": 4, "kept": 3}


def test_another_model_keeps_its_own_config(tmp_path: Path) -> None:
    other = limits.write_shorter(tmp_path, NATIVE)
    draft = draft_config(speculative={"model": other}, **LONGER)
    assert draft.hf_config.max_position_embeddings == NATIVE


def test_the_override_goes_to_other_processes() -> None:
    draft = draft_config(rope_theta=[3e4] * 9)
    assert pickle.loads(pickle.dumps(draft)).hf_config.rope_theta == [3e4] * 9
    assert pickle.loads(pickle.dumps(draft.hf_overrides))(draft.hf_config) is not None


def test_requests_past_the_native_length_are_drafted_for(tmp_path: Path) -> None:
    engine = {**mtp(3), "model": limits.write_shorter(tmp_path, NATIVE), "hf_overrides": LONGER}
    engine["max_model_len"] = LENGTHENED
    ours = run(limits.beside_a_long_one, engine, long=NATIVE + 10).value
    host = run(limits.beside_a_long_one, engine, mode="upstream", long=NATIVE + 10).value
    assert ours["mixed"]["tokens"] == host["mixed"]["tokens"]
    assert ours["long"]["accepted"] > ours["long"]["steps"]
    assert ours["mixed"]["accepted"] == ours["short"]["accepted"] + ours["long"]["accepted"]
    # vLLM's drafts token 0 for all of them while one is past the draft's own length.
    assert host["long"]["accepted"] == 0
    assert host["mixed"]["accepted"] < 0.2 * host["short"]["accepted"]


@pytest.mark.parametrize("method", ["eagle", "ngram"])
def test_other_methods_keep_theirs(method: str) -> None:
    from vllm.config import SpeculativeConfig

    from proposers.host.draft_config import drafts_with_its_own_modules

    given = SpeculativeConfig.__new__(SpeculativeConfig)
    given.method, given.model = method, None
    assert not drafts_with_its_own_modules(given)

"""From an architecture to its proposer, and what importing the plugin costs."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import PretrainedConfig
from vllm.config import ParallelConfig, SpeculativeConfig
from vllm.engine.arg_utils import EngineArgs

from bench.large_shapes import SHAPES
from mtp.plan import DraftDescriptor
from proposers import architecture, models, plugin
from proposers.architecture import (
    Architecture,
    architecture_of,
    draft_architecture,
    known_architectures,
    why_left_to_the_host,
)
from proposers.models import qwen3_5
from proposers.plugin import Mode
from proposers.v1 import MultiGroupProposer
from proposers.v2 import MultiGroupSpeculator
from tests.support.children import ChildFailedError, run_python
from tests.support.engine_arguments import mtp


@pytest.mark.parametrize("word", ["on", "upstream", "off"])
def test_every_word_is_a_mode(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MTP_PROPOSERS", word)
    assert Mode.from_env() == word


def test_without_the_variable_the_package_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MTP_PROPOSERS")
    assert Mode.from_env() is Mode.ON


@pytest.mark.parametrize("word", ["", "1", "On", "none"])
def test_an_unknown_word_is_refused_with_the_words_there_are(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MTP_PROPOSERS", word)
    with pytest.raises(ValueError, match=f"MTP_PROPOSERS='{word}' is not a mode: set it to one of on, upstream, off"):
        Mode.from_env()


def test_an_unknown_word_stops_the_process_that_loads_the_plugin() -> None:
    # vLLM swallows a plugin that fails to import, and must not swallow this.
    with pytest.raises(ChildFailedError, match="MTP_PROPOSERS='maybe' is not a mode"):
        run_python("from vllm.plugins import load_general_plugins as load; load()", MTP_PROPOSERS="maybe")


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_that_are_measured_are_of_models_that_are_drafted_for(name: str, tmp_path: Path) -> None:
    shape = SHAPES[name]
    config = shape.make_config(8, shape.vocab_size)
    (tmp_path / "config.json").write_text(json.dumps(config))
    engine = EngineArgs(str(tmp_path), skip_tokenizer_init=True, speculative_config=mtp(1)["speculative_config"])
    assert architecture_of(engine.create_engine_config().speculative_config) is not None
    # A module has rows of its own.
    assert shape.kv_bytes(config, 1024) > shape.kv_bytes(config, 1024, with_modules=False)


@pytest.mark.parametrize("name", known_architectures())
def test_every_known_architecture_has_drafters_for_it_or_a_reason_why_not(name: str) -> None:
    entry = known_architectures()[name]
    assert entry.descriptor.architecture == name
    assert issubclass(entry.load_proposer(), MultiGroupProposer)
    assert (entry.speculator is None) == bool(entry.why_not_on_v2)
    if entry.speculator is not None:
        assert issubclass(entry.load_speculator(), MultiGroupSpeculator)


@pytest.mark.parametrize("entry", [{"speculator": None}, {"why_not_on_v2": "it is too new"}])
def test_an_entry_without_a_speculator_has_to_say_why(entry: dict[str, str | None]) -> None:
    with pytest.raises(ValueError, match=r"The entry of SomeMTP has speculator=.* and why_not_on_v2=.*the reason why"):
        Architecture(DraftDescriptor("SomeMTP"), **entry)


def config(method: str, *architectures: str) -> SimpleNamespace:
    """As much of a SpeculativeConfig as the registry asks for."""
    draft = SimpleNamespace(hf_config=SimpleNamespace(architectures=list(architectures) or None))
    return SimpleNamespace(method=method, draft_model_config=draft, target_parallel_config=ParallelConfig())


def test_only_the_mtp_method_of_a_known_architecture_is_ours() -> None:
    assert architecture_of(config("mtp", "Step3p5MTP"))
    assert not architecture_of(config("mtp", "SomeOtherMTP"))
    assert not architecture_of(config("eagle", "Step3p5MTP"))
    assert not architecture_of(config("mtp"))
    assert not architecture_of(SimpleNamespace(method="ngram", draft_model_config=None))
    assert not architecture_of(None)
    assert draft_architecture(config("mtp", "SomeOtherMTP")) == "SomeOtherMTP"


@pytest.mark.parametrize(
    ("size", "what"), [("pipeline_parallel_size", "pipeline"), ("decode_context_parallel_size", "context")]
)
def test_how_a_model_is_parallel_can_leave_it_to_the_host(size: str, what: str) -> None:
    left = config("mtp", "Step3p5MTP")
    setattr(left.target_parallel_config, size, 2)
    assert not architecture_of(left)
    assert f"no {what} parallelism" in (why_left_to_the_host(left) or "")
    assert why_left_to_the_host(config("mtp", "Step3p5MTP")) is why_left_to_the_host(config("eagle")) is None


def test_a_config_that_an_entry_does_not_know_is_left_to_the_host() -> None:
    dense, sparse = config("mtp", "DeepSeekMTPModel"), config("mtp", "DeepSeekMTPModel")
    sparse.draft_model_config.hf_config.index_topk = 2048
    assert architecture_of(dense)
    assert not architecture_of(sparse)
    assert why_left_to_the_host(sparse) == "doesn't know sparse attention (index_topk)"


def test_importing_the_plugin_imports_neither_torch_nor_vllm() -> None:
    code = (
        "import sys, json, proposers.plugin, proposers.architecture, proposers.models, proposers.host; "
        "print(json.dumps(sorted({m.split('.')[0] for m in sys.modules} & {'torch', 'vllm', 'transformers'})))"
    )
    assert json.loads(run_python(code)) == []


def test_a_plugin_that_is_off_imports_no_runner() -> None:
    code = (
        "import sys; from proposers.plugin import register; register(); "
        "assert not any(m.startswith('vllm') for m in sys.modules), 'vllm was imported'; print('off')"
    )
    assert run_python(code, MTP_PROPOSERS="off").strip() == "off"


def test_a_registered_entry_replaces_one_that_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(architecture, "_registered", {})
    other = Architecture(DraftDescriptor("Glm4MoeMTPModel"))
    assert architecture_of(config("mtp", "Glm4MoeMTPModel")) is not other
    architecture.register(other)
    assert architecture_of(config("mtp", "Glm4MoeMTPModel")) is other


def test_a_registered_architecture_is_ours_and_may_say_more_of_its_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(architecture, "_registered", {})

    def name_modules(hf_config: Any) -> None:
        hf_config.num_modules = 2

    added = Architecture(DraftDescriptor("SomeOtherMTP", modules_key="num_modules"), override_config=name_modules)
    architecture.register(added)
    assert architecture_of(config("mtp", "SomeOtherMTP")) is added
    assert known_architectures().keys() == {*(entry.name for entry in models.ALL), "SomeOtherMTP"}
    plugin.register()
    ours, others = (PretrainedConfig(architectures=[name]) for name in ("SomeOtherMTP", "Any"))
    ours.model_type = others.model_type = "some_other_mtp"  # vLLM's own override knows some by their type
    assert SpeculativeConfig.hf_config_override(ours).num_modules == 2
    assert not hasattr(SpeculativeConfig.hf_config_override(others), "num_modules")


@pytest.mark.parametrize("nested", [False, True], ids=["text alone", "with images"])
def test_qwens_modules_are_counted_where_its_config_has_them(nested: bool) -> None:
    text = PretrainedConfig(mtp_num_hidden_layers=2)
    found = PretrainedConfig(text_config=text) if nested else text
    qwen3_5.ARCHITECTURE.override_config(found)
    assert qwen3_5.ARCHITECTURE.descriptor.count_modules(found) == 2

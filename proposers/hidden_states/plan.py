"""What a configuration asks to extract, and whether that can be done. Import-light: the front end asks it too."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig

from proposers.hidden_states.layout import RowBytes, dtype_name

METHOD = "extract_hidden_states"

LAYER_IDS_KEY = "eagle_aux_hidden_state_layer_ids"

CONNECTOR = "HiddenStatesConnector"

# vLLM's own connector of hidden states, which reads what vLLM's own proposer keeps.
CONNECTOR_OF_THE_HOST = "ExampleHiddenStatesConnector"


def connector_config(settings: dict[str, Any], name: str = CONNECTOR) -> dict[str, Any]:
    """An engine's `kv_transfer_config` for a connector of hidden states with these settings."""
    return {"kv_connector": name, "kv_role": "kv_producer", "kv_connector_extra_config": settings}


@dataclass(frozen=True, slots=True)
class ExtractionPlan:
    """Which hidden states of which model.

    Attributes:
        layer_ids: in the order asked for; i is the residual stream as it enters layer i, `num_layers` what leaves the
            last one, before the final norm.
        num_layers: decoder layers of the target.
        hidden_size, dtype: of the target.
        num_drafts: drafts of a step that are kept beside the row that they follow; 0: none are kept.
        num_slices: tensor-parallel ranks that each keep an equal slice of the hidden dimension. They all have the
            stream whole, so where its size can't be divided the first one keeps all of it.
    """

    layer_ids: tuple[int, ...]
    num_layers: int
    hidden_size: int
    dtype: "torch.dtype"
    num_drafts: int = 0
    num_slices: int = 1

    @classmethod
    def of(cls, vllm_config: "VllmConfig") -> "ExtractionPlan | None":
        """What this package extracts in an engine of that configuration; None where it extracts nothing.

        Layer ids are named by the method `extract_hidden_states`, or, beside any other and beside none, by
        `HiddenStatesConnector`. A configuration that names vLLM's own connector of hidden states is one that works
        without this package, so it is left to vLLM.

        Raises:
            ValueError: layer ids that the model doesn't have, that come twice, or that there are none of.
        """
        config, settings = vllm_config.speculative_config, settings_of_connector(vllm_config)
        layer_ids = None if settings is None else settings.get("layer_ids")
        if asks_for_hidden_states(config):
            if is_left_to_the_host(vllm_config):
                return None
            where = f"speculative_config.draft_model_config.hf_config.{LAYER_IDS_KEY}"
            of_method = getattr(config.draft_model_config.hf_config, LAYER_IDS_KEY, None)
            if layer_ids is not None and layer_ids != of_method:
                raise ValueError(
                    f"{CONNECTOR} has layer_ids={layer_ids}, and the method {METHOD} has {of_method}. Name them once: "
                    f"layer_ids are for other methods than {METHOD}."
                )
            layer_ids = of_method
        elif settings is None:
            return None
        else:
            where = "kv_connector_extra_config.layer_ids"
        # A draft's config is a copy of the engine's with the draft's model in it.
        model_config = vllm_config.model_config if config is None else config.target_model_config
        num_layers = model_config.get_total_num_hidden_layers()
        ids = _check_layer_ids(layer_ids, num_layers, where)
        num_drafts = 0
        if settings is not None and settings.get("record_drafts") and config is not None:
            num_drafts = config.num_speculative_tokens
        hidden_size, ranks = model_config.get_hidden_size(), vllm_config.parallel_config.tensor_parallel_size
        num_slices = 1 if hidden_size % ranks else ranks
        return cls(ids, num_layers, hidden_size, model_config.dtype, num_drafts, num_slices)

    def record_bytes(self, encoding: str) -> RowBytes:
        """What a token's rows take in a record."""
        return RowBytes.of(encoding, len(self.layer_ids), self.hidden_size, self.dtype_name)

    @property
    def dtype_name(self) -> str:
        """As a record states it."""
        return dtype_name(self.dtype)

    @property
    def row_bytes(self) -> int:
        """Bytes that one token's rows take in the model's dtype."""
        return len(self.layer_ids) * self.hidden_size * self.dtype.itemsize

    @property
    def slice_size(self) -> int:
        """Elements of the hidden dimension that a rank keeps."""
        return self.hidden_size // self.num_slices

    @property
    def stored_bytes(self) -> int:
        """Bytes that a token takes in a rank's store: its slice, and the drafts that follow it, as int32."""
        return self.row_bytes // self.num_slices + 4 * self.num_drafts


def _check_layer_ids(layer_ids: Any, num_layers: int, where: str) -> tuple[int, ...]:
    remedy = (
        f"Name each wanted id once in {where}, from 0 (the embeddings' output) to {num_layers} (the last layer's "
        "output, before the final norm)."
    )
    key = where.rsplit(".", 1)[-1]
    if not isinstance(layer_ids, list | tuple) or not layer_ids:
        raise ValueError(f"{key} is {layer_ids!r}, so there is no hidden state to extract. {remedy}")
    if wrong := [i for i in layer_ids if type(i) is not int or not 0 <= i <= num_layers]:
        raise ValueError(f"{key}={list(layer_ids)} has {wrong}, which this model doesn't have. {remedy}")
    if twice := sorted({i for i in layer_ids if layer_ids.count(i) > 1}):
        raise ValueError(f"{key}={list(layer_ids)} has {twice} more than once. {remedy}")
    return tuple(layer_ids)


def asks_for_hidden_states(config: Any) -> bool:
    """Whether the method of a speculative config is extraction."""
    return config is not None and config.method == METHOD


def connectors_of(vllm_config: "VllmConfig") -> dict[str, dict[str, Any]]:
    """The KV connectors that are named, by themselves or within vLLM's `MultiConnector`, with their settings."""
    transfer = vllm_config.kv_transfer_config
    if transfer is None or transfer.kv_connector is None:
        return {}
    among = transfer.kv_connector_extra_config.get("connectors") or []
    named = {str(one.get("kv_connector")): one.get("kv_connector_extra_config") or {} for one in among}
    return {transfer.kv_connector: transfer.kv_connector_extra_config, **named}


def is_the_only_connector(vllm_config: "VllmConfig") -> bool:
    """Whether `HiddenStatesConnector` is the engine's KV connector, and none among others within `MultiConnector`."""
    return list(connectors_of(vllm_config)) == [CONNECTOR]


def settings_of_connector(vllm_config: "VllmConfig") -> dict[str, Any] | None:
    """`kv_connector_extra_config` of `HiddenStatesConnector`; None where it isn't named."""
    return connectors_of(vllm_config).get(CONNECTOR)


def connector_of_records(connector: Any) -> Any:
    """The `HiddenStatesConnector` that a connector is, or has within it as a `MultiConnector`; None without one."""
    among = [connector, *getattr(connector, "sub_connectors", ())]
    return next((one for one in among if hasattr(one, "bind_store")), None)


def is_left_to_the_host(vllm_config: "VllmConfig") -> bool:
    """Whether vLLM's own connector of hidden states is named."""
    return CONNECTOR_OF_THE_HOST in connectors_of(vllm_config)


def check_configuration(vllm_config: "VllmConfig") -> None:
    """Checks a configuration with a plan, and where extraction is its method sets its number of drafts to 0.

    vLLM wants a number above 0 and then schedules that many drafts a step; there are none to verify here.

    Raises:
        ValueError: it can't be served.
    """
    config = vllm_config.speculative_config
    extracts = asks_for_hidden_states(config)
    if extracts and config.num_speculative_tokens == 0:
        return  # the engine core has a checked config go through its post-init again, in its own process
    if extracts and config.num_speculative_tokens != 1:
        raise ValueError(
            f"num_speculative_tokens={config.num_speculative_tokens}, and {METHOD} drafts nothing: "
            "set it to 1, as vLLM's own extraction wants it."
        )
    model_config = vllm_config.model_config if config is None else config.target_model_config
    parallel = vllm_config.parallel_config
    unsupported = {
        "pipeline_parallel_size": (parallel.pipeline_parallel_size, 1),
        "decode_context_parallel_size": (parallel.decode_context_parallel_size, 1),
        "prefill_context_parallel_size": (parallel.prefill_context_parallel_size, 1),
        "runner_type": (model_config.runner_type, "generate"),
        "enable_dbo": (parallel.enable_dbo, False),
        "kv_sharing_fast_prefill": (vllm_config.cache_config.kv_sharing_fast_prefill, False),
    }
    if wrong := [f"{name}={value} (supported: {good})" for name, (value, good) in unsupported.items() if value != good]:
        raise ValueError(
            f"{METHOD if extracts else CONNECTOR} can't be served with {', '.join(wrong)}: rows would be missing or in "
            "wrong places. Use the supported values; tensor and data parallelism are supported."
        )
    if extracts:
        config.num_speculative_tokens = 0

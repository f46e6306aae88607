"""A KV connector that loads a prompt's first blocks, as an offloading connector does, for tests on a CPU.

vLLM's own offloading wants a GPU. Nothing is brought in here: what the blocks hold is as wrong as the hidden states
beside keys that were loaded, which is what is looked at.
"""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA

LOADED_TOKEN = 1001  # of prompts that begin with it
LOADED_TOKENS = 64


class ClaimingConnector(KVConnectorBase_V1, SupportsHMA):
    """Claims to have loaded the first tokens of every prompt that begins with `LOADED_TOKEN`.

    Answers say what a request has asked of it.
    """

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        claims = request.prompt_token_ids[0] == LOADED_TOKEN and request.num_prompt_tokens > LOADED_TOKENS
        return (max(0, LOADED_TOKENS - num_computed_tokens) if claims else 0), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        pass

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        asked = (request.kv_transfer_params or {}).get("claim")
        return False, None if asked is None else {"claimed": asked}

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

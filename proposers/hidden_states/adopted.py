"""Configurations that name others' connectors of hidden states, served by ours.

Trainers start their servers with vLLM's `ExampleHiddenStatesConnector`: speculators for its `file` transfer, ModelOpt
for its dumps; and speculators with one of its own for its `fp8` transfer. Their readers want the path of a safetensors
file in `hidden_states_path` and, unless told otherwise, a `.lock` beside it that they take before they read, and remove
afterwards. Here the file is whole when its path is answered, so the lock is free from the start.
"""

import copy
import logging
from typing import TYPE_CHECKING, Any

from proposers.hidden_states.plan import CONNECTOR_OF_THE_HOST, asks_for_hidden_states
from proposers.plugin import CONNECTOR

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger("vllm.proposers")

# The connectors, by name and module, and the dtype that they write in.
_DTYPES = {
    (CONNECTOR_OF_THE_HOST, None): "model",
    ("FP8HiddenStatesConnector", "hs_connectors.fp8_hidden_states_connector"): "fp8",
}


def adopt(vllm_config: "VllmConfig") -> None:
    """Puts ours in the place of another connector, where that writes hidden states and asks for nothing else."""
    transfer = vllm_config.kv_transfer_config
    if transfer is None or not asks_for_hidden_states(vllm_config.speculative_config):
        return
    dtype = _DTYPES.get((transfer.kv_connector, transfer.kv_connector_module_path))
    settings = None if dtype is None else _settings(transfer.kv_connector_extra_config)
    if settings is None:
        return
    logger.info(
        "The configuration of %s is served by %s of vllm-mtp-proposers: the same answers, and files that are whole "
        "when they are answered for (MTP_PROPOSERS=upstream: vLLM's own extraction).",
        transfer.kv_connector,
        CONNECTOR,
    )
    ours = copy.copy(transfer)
    ours.kv_connector, ours.kv_connector_module_path = CONNECTOR, None
    ours.kv_connector_extra_config = settings | {"dtype": dtype}
    vllm_config.kv_transfer_config = ours


def _settings(extra: dict[str, Any]) -> dict[str, Any] | None:
    """Ours that do what theirs say; None where ours can't: clients that choose paths anywhere, settings not known."""
    theirs = dict(extra)
    settings = {
        "storage_root": theirs.pop("shared_storage_path", "/tmp"),
        "lock_files": theirs.pop("use_synchronization_lock", True),
        "writer_threads": theirs.pop("num_writer_threads", 8),
    }
    chooses_paths = theirs.pop("allow_custom_save_path", False)
    return None if chooses_paths or theirs else settings

"""The vLLM plugin's entry point. What it changes in vLLM is listed in `proposers/host`.

vLLM calls `register` in every process, sometimes twice. It imports nothing heavy until it has to, changes nothing
until everything that it is going to change has been checked, and raises where it finds another host than it knows.
"""

import importlib
import os
from enum import StrEnum

from proposers.hidden_states.plan import CONNECTOR


class Mode(StrEnum):
    """What `MTP_PROPOSERS` asks for."""

    ON = "on"
    """Known architectures are drafted for by this package, and hidden states are extracted by it."""
    UPSTREAM = "upstream"
    """vLLM's own proposers, with the start-up fixes only."""
    OFF = "off"
    """Nothing is installed."""

    @classmethod
    def from_env(cls) -> "Mode":
        """Raises `ValueError` for a word that it doesn't know."""
        word = os.environ.get("MTP_PROPOSERS", cls.ON)
        if word not in list(cls):
            raise ValueError(f"MTP_PROPOSERS={word!r} is not a mode: set it to one of {', '.join(cls)}, or unset it.")
        return cls(word)


def register() -> None:
    """Entry point in the group `vllm.general_plugins`.

    Raises:
        proposers.host.patching.HostMismatchError: this vLLM is not supported.
        ValueError: `MTP_PROPOSERS` holds an unknown word.
    """
    mode = Mode.from_env()
    if mode is Mode.OFF:
        return
    import vllm

    from proposers import host
    from proposers.host.patching import apply_patches, check_patches, check_vllm_version

    check_vllm_version(vllm.__version__)
    _import_cpu_worker()
    if mode is Mode.UPSTREAM:
        apply_patches(host.START_UP, vllm.__version__)
        return
    check_patches(host.LEDGER, vllm.__version__)
    apply_patches(host.START_UP + host.ON, vllm.__version__)
    _register_models()
    _register_connector()


def _import_cpu_worker() -> None:
    """Has vLLM's CPU worker replace functions of vLLM's before patches import the modules that take them by name.

    Such a module would go on with the functions for a GPU, as without this package it doesn't.
    """
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        importlib.import_module("vllm.v1.worker.cpu_worker")


def _register_models() -> None:
    from proposers.architecture import known_architectures, register_model_class

    for architecture in known_architectures().values():
        register_model_class(architecture)


def _register_connector() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if CONNECTOR not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR, "proposers.hidden_states.connector", CONNECTOR)

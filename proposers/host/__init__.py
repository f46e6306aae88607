"""The ledger of host patches: what is changed in vLLM, file by file of this folder, each patch beside its reason."""

from proposers.host import (
    adaptive,
    draft_config,
    drafting,
    extraction,
    loading,
    metrics,
    prefix_cache,
    rejection_sampling,
    requests,
    routing,
    shutdown,
    start_up,
    step_outputs,
)
from proposers.host.patching import Patch

START_UP: tuple[Patch, ...] = start_up.PATCHES + loading.START_UP
"""Also in the mode `upstream`."""

ON: tuple[Patch, ...] = (
    draft_config.PATCHES
    + loading.PATCHES
    + drafting.PATCHES
    + adaptive.PATCHES
    + metrics.PATCHES
    + prefix_cache.PATCHES
    + routing.PATCHES
    + extraction.PATCHES
    + requests.PATCHES
    + step_outputs.PATCHES
    + shutdown.PATCHES
)
"""In the mode `on` only."""

WHILE_DRAFTING: tuple[Patch, ...] = rejection_sampling.PATCHES
"""Of code that other methods run too, installed when the first proposer of ours is built in a process."""

LEDGER = START_UP + ON + WHILE_DRAFTING

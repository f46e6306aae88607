"""MiMo: one module, which every step runs again."""

from mtp.plan import DraftDescriptor
from proposers.architecture import Architecture

ARCHITECTURE = Architecture(
    DraftDescriptor("MiMoMTPModel"),
    speculator=None,
    why_not_on_v2="of MiMo's one module it makes the same drafts there",
    module_weights="model.mtp_layers.{module}.",
)

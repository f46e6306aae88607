"""DeepSeek-V3: one module with latent attention. Not in `ALL`: its reference waits for a run of the oracle on a GPU."""

from mtp.plan import DraftDescriptor
from proposers.architecture import Architecture

ARCHITECTURE = Architecture(DraftDescriptor("DeepSeekMTPModel"), module_weights="model.layers.{layer}.")

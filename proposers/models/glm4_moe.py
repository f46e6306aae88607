"""GLM-4.5: one module with experts, which takes the target's head."""

from mtp.plan import DraftDescriptor
from proposers.architecture import Architecture

ARCHITECTURE = Architecture(DraftDescriptor("Glm4MoeMTPModel"), module_weights="model.layers.{layer}.")

"""MiMo: one module, which every step runs again."""

from mtp.plan import DraftDescriptor
from proposers.architecture import Architecture

ARCHITECTURE = Architecture(DraftDescriptor("MiMoMTPModel"), module_weights="model.mtp_layers.{module}.")

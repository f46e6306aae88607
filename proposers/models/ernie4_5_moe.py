"""ERNIE 4.5 with experts: one dense module. vLLM loads the first only, whatever the config counts."""

from mtp.plan import DraftDescriptor
from proposers.architecture import Architecture

ARCHITECTURE = Architecture(DraftDescriptor("ErnieMTPModel"), module_weights="model.mtp_block.{module}.")

"""MiMo: one module, which every step runs again."""

from mtp.plan import DraftDescriptor
from proposers.architecture import Architecture

ARCHITECTURE = Architecture(DraftDescriptor("MiMoMTPModel"))

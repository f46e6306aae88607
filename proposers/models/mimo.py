"""Models with one MTP module, which every step runs again."""

from typing import ClassVar

from mtp.plan import DraftDescriptor
from proposers.v1 import MultiGroupProposer


class MiMoProposer(MultiGroupProposer):
    descriptor: ClassVar = DraftDescriptor("MiMoMTPModel")

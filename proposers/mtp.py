"""Models with one MTP module, which every step runs again."""

from typing import ClassVar

from mtp.proposer import MultiGroupProposer
from mtp.steps import DraftDescriptor


class MiMoProposer(MultiGroupProposer):
    descriptor: ClassVar = DraftDescriptor("MiMoMTPModel")

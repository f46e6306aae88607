"""`tests/oracle/unchained.py` on vLLM's V2 model runner."""

from typing import ClassVar

from proposers.speculator import Step3p5Speculator
from tests.oracle.unchained import UnchainedProposer


class UnchainedSpeculator(Step3p5Speculator):
    descriptor: ClassVar = UnchainedProposer.descriptor

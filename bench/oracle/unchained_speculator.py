"""`bench/oracle/unchained.py` on vLLM's V2 model runner."""

from typing import ClassVar

from bench.oracle.unchained import UnchainedProposer
from proposers.v2 import Step3p5Speculator


class UnchainedSpeculator(Step3p5Speculator):
    descriptor: ClassVar = UnchainedProposer.descriptor

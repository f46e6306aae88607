"""A drafter of which every module takes the target's hidden states, as MiMo-V2's do.

vLLM 0.32 has no such model that runs on the CPU, so it is Step-3.5's modules under another descriptor, and nothing
else: drafts are worse than the trained chain's, and have to be what these modules make of the target's hidden states.
"""

from dataclasses import replace
from typing import ClassVar

from proposers.models.step3p5 import Step3p5Proposer


class UnchainedProposer(Step3p5Proposer):
    descriptor: ClassVar = replace(Step3p5Proposer.descriptor, hidden_states_flow=False)

"""What the adapters of both model runners have in common: an architecture's entry in use."""

import torch
from vllm.config import VllmConfig

from mtp.fusion.gemms import pack_on_cpu
from mtp.fusion.layers import fuse_layers, leave_uncompiled
from mtp.kernels.decoder import argmax
from mtp.passes import DraftPasses
from proposers.architecture import Architecture, architecture_of
from proposers.cheap import CheapDrafts


class ArchitecturePasses(DraftPasses):
    """Drafting passes of one architecture.

    Attributes:
        architecture: its entry.
        cheap: what makes its drafts read less, if anything does.
    """

    architecture: Architecture
    cheap: CheapDrafts

    def init_architecture(self, architecture: Architecture | None, vllm_config: VllmConfig, max_num_reqs: int) -> None:
        """To be called by the adapter's constructor, after that of the runner's base class.

        Args:
            architecture: None: the one that the configuration names.

        Raises:
            ValueError: it is not known, or the model can't make the number of drafts asked for.
        """
        found = architecture or architecture_of(vllm_config.speculative_config)
        if found is None:
            raise ValueError(
                "The configuration names no draft architecture that this package drafts for "
                "(proposers.architecture.why_left_to_the_host says why): register its entry first."
            )
        self.architecture = found
        self.cheap = CheapDrafts(vllm_config, self.device)
        self.init_passes(found.descriptor, vllm_config, max_num_reqs)

    def prepare_model(self) -> None:
        """To be called once the draft model is loaded: has it run in fewer launches where that is known how."""
        if self.plan.num_modules > 1 or self.cheap.fp8:
            leave_uncompiled(self.model)
        fuse_layers(self.model, self.vllm_config)
        if self.architecture.fuse is not None:
            self.takes_wanted = self.architecture.fuse(self.model)
        self.cheap.after_load(self.model)
        self._pack()

    def refresh_weights(self) -> None:
        """To be called when weights of the target or the draft may have changed: makes copies of them again."""
        self.cheap.refresh()
        self._pack()

    def _pack(self) -> None:
        """A single module may be compiled by the host, and stays as it is."""
        if self.device.type == "cpu" and self.plan.num_modules > 1:
            pack_on_cpu(self.model)

    def logits(self, hidden: torch.Tensor, module: int) -> torch.Tensor:
        """Logits `[num_reqs, size]` by the module's head, of the tokens that can be drafted."""
        logits: torch.Tensor = self.model.compute_logits(hidden, **self._selection(module))
        return logits

    def likeliest(self, hidden: torch.Tensor, module: int) -> torch.Tensor:
        """Greedy tokens `[num_reqs]` by the module's head."""
        return self.cheap.to_token_ids(argmax(self.logits(hidden, module)))

    def top_tokens(self, hidden: torch.Tensor, module: int) -> torch.Tensor:
        return self.cheap.to_token_ids(self.architecture.top_tokens(self.model, hidden, module))

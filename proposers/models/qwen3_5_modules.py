"""vLLM's Qwen3.5 draft, which is told what module to run."""

import torch
from vllm.model_executor.models.qwen3_5_mtp import Qwen3_5MTP
from vllm.sequence import IntermediateTensors


class ChainedQwen3_5MTP(Qwen3_5MTP):
    """vLLM's takes the number of the module in with `**kwargs`, and always runs the first (vllm-project/vllm#52688)."""

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
        spec_step_idx: int = 0,
        **kwargs: object,
    ) -> torch.Tensor:
        """`[num_rows, hidden_size]`, from as many rows' tokens, positions and hidden states."""
        return self.model(input_ids, positions, hidden_states, intermediate_tensors, inputs_embeds, spec_step_idx)

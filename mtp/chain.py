"""The chain of a pass as one compiled function, where the host compiles its target on a CPU.

There a pass of few rows is mostly Python and small operators. The host's own support compiles it, with its settings,
its cache and its way of dropping guards: once, for any number of rows and requests. The eager chain (`mtp/passes.py`)
stays its reference, and runs under `enforce_eager` and for whatever isn't greedy.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from vllm.compilation.backends import set_model_tag
from vllm.compilation.decorators import support_torch_compile
from vllm.config import CompilationMode, VllmConfig, set_current_vllm_config

from mtp.kernels.window import shift_rows_by_ops

COMPILED_MODES = CompilationMode.DYNAMO_TRACE_ONCE, CompilationMode.VLLM_COMPILE


@support_torch_compile
class CompiledChain(nn.Module):
    """All modules over the window, and the greedy drafts of their heads. Weights are read at each call."""

    def __init__(
        self,
        *,
        vllm_config: VllmConfig,
        run_module: Callable[..., Any],
        likeliest: Callable[[torch.Tensor, int], torch.Tensor],
        num_modules: int,
        hidden_states_flow: bool,
        takes_wanted: bool,
    ) -> None:
        """
        Args:
            run_module: the draft model's forward.
            likeliest: greedy tokens `[num_reqs]` of hidden states `[num_reqs, hidden_size]` by a module's head.
            num_modules: that run.
            hidden_states_flow, takes_wanted: as `mtp.passes.DraftPasses` has them.
        """
        super().__init__()
        self.run_module, self.likeliest = run_module, likeliest
        self.num_modules, self.hidden_states_flow, self.takes_wanted = num_modules, hidden_states_flow, takes_wanted

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        last_rows: torch.Tensor,
        next_token_ids: torch.Tensor,
        known_token_ids: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """
        Args:
            token_ids, positions: `[num_rows]` int64, of the window.
            hidden_states: `[num_rows, hidden_size]`, the target's.
            last_rows: `[num_reqs]` int64.
            next_token_ids: `[num_reqs]` int64, the tokens after the last valid rows.
            known_token_ids: `[num_reqs, num_modules]` int64, the tokens after a chunk that ends before its prompt; -1
                for other requests.

        Returns:
            module 0's hidden states at the last valid rows, `[num_reqs, hidden_size]`, and each module's draft,
            `[num_reqs]` int64.
        """
        hidden, drafts, follows = hidden_states, [], next_token_ids
        first = hidden_states
        for module in range(self.num_modules):
            known = known_token_ids[:, module]
            token_ids = shift_rows_by_ops(token_ids, last_rows, torch.where(known >= 0, known, follows))
            feeds_next = self.hidden_states_flow and module + 1 < self.num_modules
            ends_early = self.takes_wanted and not feeds_next
            more = {"wanted": last_rows} if ends_early else {}
            output = self.run_module(
                input_ids=token_ids, positions=positions, hidden_states=hidden, spec_step_idx=module, **more
            )
            for_head, for_next = output if isinstance(output, tuple) else (output, output)
            if feeds_next:
                hidden = for_next
            if module == 0:
                first = for_next if ends_early else for_next[last_rows]
            follows = self.likeliest(for_head if ends_early else for_head[last_rows], module)
            drafts.append(follows)
        return first, *drafts


def compile_chain(vllm_config: VllmConfig, **arguments: Any) -> CompiledChain | None:
    """The chain, which is compiled when it first runs; None where the host compiles nothing.

    Args:
        arguments: as `CompiledChain` has them.
    """
    eager = vllm_config.speculative_config.enforce_eager
    if eager or vllm_config.compilation_config.mode not in COMPILED_MODES:
        return None
    with set_current_vllm_config(vllm_config), set_model_tag("mtp_chain"):
        return CompiledChain(vllm_config=vllm_config, **arguments)

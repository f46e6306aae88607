"""Verification of drafts on the CPU, which every method runs: installed when the first proposer of ours is built."""

from typing import Any

from proposers.host.patching import patch


@patch(
    "vllm.v1.sample.rejection_sampler:expand_batch_to_tokens",
    ("x", "cu_num_tokens", "num_tokens", "replace_from", "replace_to"),
    why="on the CPU the host writes the result to a temporary and returns memory that it never set, so drafts are "
    "verified at a random temperature, top-k and top-p.",
    upstream="vllm-project/vllm#55005",
    until="vllm-project/vllm#55006 or its like is in every supported release",
)
def expand_on_cpu(original: Any) -> Any:
    def expand_batch_to_tokens(
        x: Any, cu_num_tokens: Any, num_tokens: int, replace_from: int = 0, replace_to: int = 0
    ) -> Any:
        if x.device.type != "cpu":
            return original(x, cu_num_tokens, num_tokens, replace_from, replace_to)
        counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
        return x.masked_fill(x == replace_from, replace_to).repeat_interleave(counts, output_size=num_tokens)

    return expand_batch_to_tokens


@patch(
    "vllm.v1.sample.rejection_sampler:apply_sampling_constraints",
    ("logits", "cu_num_draft_tokens", "sampling_metadata"),
    why="on the CPU a step without drafts in which every request has a top-k takes the maximum of nothing, and the "
    "engine dies.",
    upstream="none yet",
    until="apply_top_k_only in vLLM's CPU path takes an empty batch",
)
def constrain_nothing(original: Any) -> Any:
    def apply_sampling_constraints(logits: Any, cu_num_draft_tokens: Any, sampling_metadata: Any) -> Any:
        if logits.shape[0] == 0:
            return logits
        return original(logits, cu_num_draft_tokens, sampling_metadata)

    return apply_sampling_constraints


PATCHES = (expand_on_cpu, constrain_nothing)

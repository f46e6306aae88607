"""Verification of drafts on V1, which every method runs: installed when the first proposer of ours is built."""

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
    "vllm.v1.sample.rejection_sampler:RejectionSampler.forward",
    ("self", "metadata", "draft_probs", "logits", "sampling_metadata"),
    why="V1 verifies what nobody drafted, too: a step of prompts alone takes several times as long to sample as "
    "without speculation, and on the CPU, where every request has a top-k, the maximum of nothing ends the engine.",
    upstream="none yet: the V2 runner takes the plain sampler there",
    until="the V1 runner does so, too",
)
def verify_nothing(original: Any) -> Any:
    def forward(self: Any, metadata: Any, draft_probs: Any, logits: Any, sampling_metadata: Any) -> Any:
        if metadata.max_spec_len > 0:
            return original(self, metadata, draft_probs, logits, sampling_metadata)
        return self.sampler(logits=logits, sampling_metadata=sampling_metadata, predict_bonus_token=True)

    return forward


PATCHES = (expand_on_cpu, verify_nothing)

"""Where either of vLLM's model runners keeps what the oracle looks at."""

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class RequestPass:
    """One request's part in a pass; `last` is L, `rows` the tokens of the rows from `first` on, rejected ones too.

    Attributes:
        drafted: how many of the rows were drafts.
    """

    request_id: str
    index: int
    first: int
    last: int
    rows: list[int]
    next_token: int
    drafted: int


@dataclass(frozen=True, slots=True)
class Pass:
    """What the host asks of a pass, read before the drafter may change it.

    Attributes:
        hidden: `[num_tokens, hidden_size]` float32, the target's, on the CPU.
        k: drafts wanted.
    """

    requests: list[RequestPass]
    hidden: Tensor
    k: int


class RunnerView(Protocol):
    """A runner as the oracle sees it.

    Attributes:
        runner: the runner itself.
        drafter: its proposer or speculator.
        layer_names: of the draft's attention layers.
    """

    runner: Any

    @property
    def drafter(self) -> Any: ...

    @property
    def layer_names(self) -> set[str]: ...

    def read_pass(self, *args: Any, **kwargs: Any) -> Pass:
        """From the arguments of `propose`."""

    def known_tokens(self, request_id: str) -> tuple[list[int], list[int]]:
        """The prompt, and the prompt with the output so far."""

    def temperature(self, request_id: str) -> float: ...

    def block_table(self, group: int, index: int) -> Any:
        """The blocks of one request of the running pass."""


class V1Runner:
    """`vllm.v1.worker.gpu_model_runner`.

    Attributes:
        scheduled: the scheduler's output of the running step.
    """

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.scheduled: Any = None

    @property
    def drafter(self) -> Any:
        return self.runner.drafter

    @property
    def layer_names(self) -> set[str]:
        return set(self.drafter._draft_attn_layer_names)

    def read_pass(self, **kwargs: Any) -> Pass:
        metadata = kwargs["common_attn_metadata"]
        rejected = kwargs["num_rejected_tokens_gpu"]
        starts = metadata.query_start_loc.tolist()
        ends = metadata.seq_lens.tolist()
        rejected = [0] * len(ends) if rejected is None else rejected.tolist()
        tokens, positions = kwargs["target_token_ids"].tolist(), kwargs["target_positions"].tolist()
        next_tokens = kwargs["next_token_ids"].tolist()
        requests = [
            RequestPass(
                request_id,
                index,
                first=positions[starts[index]],
                last=ends[index] - 1 - rejected[index],
                rows=tokens[starts[index] : starts[index + 1]],
                next_token=next_tokens[index],
                # Not the rows that are left over: a drafter without padding is given none of the rejected ones.
                drafted=len(self.scheduled.scheduled_spec_decode_tokens.get(request_id, ())),
            )
            for index, request_id in enumerate(self.runner.input_batch.req_ids)
        ]
        return Pass(requests, kwargs["target_hidden_states"].float().clone().cpu(), kwargs["num_speculative_tokens"])

    def known_tokens(self, request_id: str) -> tuple[list[int], list[int]]:
        state = self.runner.requests[request_id]
        return list(state.prompt_token_ids), [*state.prompt_token_ids, *state.output_token_ids]

    def temperature(self, request_id: str) -> float:
        return float(self.runner.requests[request_id].sampling_params.temperature)

    def block_table(self, group: int, index: int) -> Any:
        return self.runner.input_batch.block_table.block_tables[group].block_table.np[index]


class V2Runner:
    """`vllm.v1.worker.gpu.model_runner`."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner

    @property
    def drafter(self) -> Any:
        return self.runner.speculator

    @property
    def layer_names(self) -> set[str]:
        return set(self.drafter.draft_attn_layer_names)

    def read_pass(
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: Tensor,
        aux_hidden_states: Any,
        num_sampled: Tensor,
        num_rejected: Tensor,
        last_sampled: Tensor,
        next_prefill_tokens: Tensor,
        *args: Any,
        num_speculative_tokens: int,
        **kwargs: Any,
    ) -> Pass:
        batch = input_batch
        starts, ends = batch.query_start_loc.tolist(), batch.seq_lens.tolist()
        sampled, rejected = num_sampled.tolist(), num_rejected.tolist()
        tokens, positions = batch.input_ids.tolist(), batch.positions.tolist()
        rows = batch.idx_mapping.tolist()
        sampled_tokens, prompt_tokens = last_sampled[:, 0].tolist(), next_prefill_tokens[0].tolist()
        drafted = batch.num_draft_tokens_per_req
        requests = [
            RequestPass(
                request_id,
                index,
                first=positions[starts[index]],
                last=ends[index] - 1 - rejected[index],
                rows=tokens[starts[index] : starts[index + 1]],
                next_token=(sampled_tokens if sampled[index] else prompt_tokens)[rows[index]],
                drafted=0 if drafted is None else int(drafted[index]),
            )
            for index, request_id in enumerate(batch.req_ids)
        ]
        return Pass(requests, last_hidden_states[: batch.num_tokens].float().clone().cpu(), num_speculative_tokens)

    def known_tokens(self, request_id: str) -> tuple[list[int], list[int]]:
        states = self.runner.req_states
        row = states.req_id_to_index[request_id]
        tokens = states.all_token_ids.gpu[row, : int(states.total_len.gpu[row])].tolist()
        return tokens[: int(states.prompt_len.np[row])], tokens

    def temperature(self, request_id: str) -> float:
        row = self.runner.req_states.req_id_to_index[request_id]
        return float(self.runner.sampler.sampling_states.temperature.np[row])

    def block_table(self, group: int, index: int) -> Any:
        return self.runner.block_tables.input_block_tables[group][index].cpu()


def view_of(runner: Any) -> RunnerView:
    return V2Runner(runner) if hasattr(runner, "speculator") else V1Runner(runner)

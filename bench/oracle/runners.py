"""Where either of vLLM's model runners keeps what the oracle looks at."""

from collections.abc import Sequence
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
        has_all_rows: of the step; a drafter without padding is not given those that were rejected.
    """

    requests: list[RequestPass]
    hidden: Tensor
    k: int
    has_all_rows: bool = True


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
        """Reads a pass from the arguments of `propose`."""

    def known_tokens(self, request_id: str) -> tuple[list[int], list[int]]:
        """The prompt, and the prompt with the output so far."""

    def temperature(self, request_id: str) -> float: ...

    def block_table(self, group: int, index: int) -> Any:
        """The blocks `[num_blocks]` in one KV cache group of the request at an index of the running pass."""


def _read_requests(
    request_ids: Sequence[str],
    *,
    starts: list[int],
    ends: list[int],
    rejected: list[int],
    tokens: list[int],
    positions: list[int],
    next_tokens: list[int],
    drafted: list[int],
) -> list[RequestPass]:
    """Each request's part in a pass.

    Args:
        starts: of each request, its first row among those of all, and in the end their number.
        ends: of each request, the sequence position after its last row.
        rejected, next_tokens, drafted: one for each request.
        tokens, positions: one for each row.
    """
    return [
        RequestPass(
            request_id,
            index,
            first=positions[starts[index]],
            last=ends[index] - 1 - rejected[index],
            rows=tokens[starts[index] : starts[index + 1]],
            next_token=next_tokens[index],
            drafted=drafted[index],
        )
        for index, request_id in enumerate(request_ids)
    ]


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
        request_ids = self.runner.input_batch.req_ids
        requests = _read_requests(
            request_ids,
            starts=metadata.query_start_loc.tolist(),
            ends=metadata.seq_lens.tolist(),
            rejected=[0] * len(request_ids) if rejected is None else rejected.tolist(),
            tokens=kwargs["target_token_ids"].tolist(),
            positions=kwargs["target_positions"].tolist(),
            next_tokens=kwargs["next_token_ids"].tolist(),
            # Not the rows that are left over: a drafter without padding is given none of the rejected ones.
            drafted=[len(self.scheduled.scheduled_spec_decode_tokens.get(name, ())) for name in request_ids],
        )
        hidden = kwargs["target_hidden_states"].float().clone().cpu()
        has_all_rows = sum(len(request.rows) for request in requests) == self.scheduled.total_num_scheduled_tokens
        return Pass(requests, hidden, kwargs["num_speculative_tokens"], has_all_rows)

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
        sampled_tokens, prompt_tokens = last_sampled[:, 0].tolist(), next_prefill_tokens[0].tolist()
        drafted = batch.num_draft_tokens_per_req
        requests = _read_requests(
            batch.req_ids,
            starts=batch.query_start_loc.tolist(),
            ends=batch.seq_lens.tolist(),
            rejected=num_rejected.tolist(),
            tokens=batch.input_ids.tolist(),
            positions=batch.positions.tolist(),
            next_tokens=[
                (sampled_tokens if sampled else prompt_tokens)[row]
                for sampled, row in zip(num_sampled.tolist(), batch.idx_mapping.tolist(), strict=False)
            ],
            drafted=[0] * len(batch.req_ids) if drafted is None else [int(count) for count in drafted],
        )
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

"""`HiddenStatesConnector`: takes the rows of finished requests out of the store and has them written.

The host's own protocol of connectors, and what happens when:

1. A request finishes in the scheduler (`request_finished_all_groups`). Its record is admitted, or skipped whole
   (`admission.py`). Its blocks are kept.
2. The next step's metadata tells the worker, which gathers the rows of all of them at once when it has launched the
   model, and reports the blocks free as soon as they have been read (`get_finished`). Where the ring has no room they
   are read in later steps. Where no answer waits it is the next step that has time for it (`_postpones`).
3. A process of its own writes (`writer_process.py`). What became of a record comes back with a step's output
   (`build_connector_worker_meta`).

Where an answer waits for its record, the finished output is held back (`hold_back`, by the patch of
`Scheduler.update_from_output` in the ledger), because the path in it must be that of a file that exists. It leaves with
the path, or the reason why there is none. Beside a drafting method nothing waits: then records are admitted only while
the ring has room for them, so that no step waits for the disk either.

Rows `[0, num_tokens - 1)` of a finished request are verified, however many drafts were run beyond them, and a row that
a rejected draft has written is written again when its position is run again.

While anything is under way, `has_pending_push_work` keeps the engine stepping, with empty steps if need be; those wait
for the writers a little, so that nobody spins.
"""

import logging
import weakref
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.request import RequestStatus

from mtp.groups import choose_anchor
from mtp.store import RowStore
from proposers.hidden_states.admission import LOADED, REASONS, SAMPLING, Admission
from proposers.hidden_states.drafts import Step, StepLog, drafts_of_steps, slots_of_steps
from proposers.hidden_states.layout import RecordInfo
from proposers.hidden_states.loaded import LoadedBlocks
from proposers.hidden_states.plan import METHOD, ExtractionPlan, asks_for_hidden_states
from proposers.hidden_states.request import RecordRequest, Settings, generated_name
from proposers.hidden_states.ring import Ring
from proposers.hidden_states.slices import Slices
from proposers.hidden_states.stats import HiddenStatesPromMetrics, HiddenStatesStats, skipped
from proposers.hidden_states.stop_strings import StopStrings
from proposers.hidden_states.transfer import RowTransfer
from proposers.hidden_states.writer import Job, Recipient, Written
from proposers.hidden_states.writer_process import WriterProcess, log_failure

logger = logging.getLogger("vllm.proposers.hidden_states")

# How long a step without tokens waits for the writers: long enough not to spin, short enough for a new request.
IDLE_WAIT_S, IDLE_WAIT_WHILE_SERVING_S = 0.02, 0.005

# A server that always has a prompt to run still has to take records out.
MAX_POSTPONED_STEPS = 4

# In place of blocks that a sliding window has left behind.
NULL_BLOCK = 0

_COMPLETE = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_REPETITION)


@dataclass(slots=True)
class Take:
    """Rows to take out of the store.

    Attributes:
        block_ids: the request's, in the store's group.
        kept_blocks: its blocks in all groups, which are kept until the rows have been read.
        name: under the storage root; None leaves it to the worker.
        token_ids: of the rows; an array, which crosses to other processes as its bytes.
        num_bytes: of the rows.
        steps, preemptions: of the request, where drafts are recorded.
    """

    info: RecordInfo
    block_ids: list[int]
    kept_blocks: int
    name: str | None
    number: int
    token_ids: "array[int]"
    num_bytes: int
    steps: list[Step] | None
    preemptions: int


@dataclass
class HiddenStatesMetadata(KVConnectorMetadata):
    """To the worker.

    Attributes:
        idle: the step runs no tokens.
    """

    takes: list[Take] = field(default_factory=list)
    idle: bool = False


@dataclass
class HiddenStatesWorkerMetadata(KVConnectorWorkerMetadata):
    """From the worker.

    Attributes:
        written: what became of records.
        drained_bytes: how many bytes of all takes so far have left the store and the ring.
    """

    written: list[Written]
    drained_bytes: int

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, HiddenStatesWorkerMetadata)
        return HiddenStatesWorkerMetadata([*self.written, *other.written], max(self.drained_bytes, other.drained_bytes))


class HiddenStatesConnector(KVConnectorBase_V1, SupportsHMA):
    """One instance in the scheduler, one in each worker.

    Raises:
        ValueError: at construction, for settings that don't fit.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.settings = Settings.of(self._kv_transfer_config.kv_connector_extra_config)
        plan = ExtractionPlan.of(vllm_config)
        if plan is None:
            raise ValueError(
                f"vLLM's own proposer of the method {METHOD} keeps the hidden states here, and HiddenStatesConnector "
                f"doesn't read what it keeps. Name one of the two connectors, not both."
            )
        self._plan, self.stats = plan, HiddenStatesStats()
        waits = self.settings.wait_for_records
        self._waits = asks_for_hidden_states(vllm_config.speculative_config) if waits is None else waits
        if role is KVConnectorRole.SCHEDULER:
            groups = kv_cache_config.kv_cache_groups
            self._anchor = choose_anchor(groups)
            self._block_size = groups[self._anchor].kv_cache_spec.block_size
            self._takes: list[Take] = []
            self._postponed = 0
            self._number = 0
            self._warn_of_sessions = True
            self._admission = Admission(self.settings, self._waits)
            self._loaded = LoadedBlocks(self._anchor, self._block_size)
            self._stop_strings = StopStrings(vllm_config.model_config)
            self.step_log = StepLog() if plan.num_drafts else None
            self._standing: dict[str, int] = {}
            # Requests whose record is on its way: the output to be sent then, once the request's step has made one.
            self._held: dict[str, tuple[int, EngineCoreOutput] | None] = {}
            self._results: dict[str, dict[str, Any]] = {}
        else:
            self._transfer: RowTransfer | None = None
            self._writers: WriterProcess | None = None  # on the first rank alone
            self._close: Callable[[], Any]
            self._reading: dict[str, Callable[[], bool]] = {}
            self._written: list[Written] = []
            self._rows: dict[str, int] = {}
            self._submitted_bytes = self._reported_bytes = 0

    @property
    def requires_kv_delivery(self) -> bool:
        """A request that is preempted while its last step runs is computed again: its rows are gone."""
        return True

    # The scheduler's side.

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        self._loaded.note_hit(request.request_id, num_computed_tokens)
        return 0, False

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._block_pool = gpu_block_pool
        self._loaded.bind(gpu_block_pool)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Nothing is loaded."""

    def on_new_request(self, request: Any) -> None:
        if self._warn_of_sessions and getattr(request, "resumable", False):
            self._warn_of_sessions = False
            logger.warning(
                "A request whose prompt is streamed may leave no record: closed after an answer it is as one that was "
                "aborted. Give the whole prompt at once."
            )

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        steps = None if self.step_log is None else self.step_log.pop(request.request_id)
        was_loaded = self._loaded.is_in(request.request_id, block_ids[self._anchor])
        if request.status not in _COMPLETE and not self._stop_strings.may_have_ended(request):
            return False, None
        try:
            # Keys that aren't known were refused by the front end, unless they are other connectors'.
            params, includes_outputs = request.kv_transfer_params, self.settings.include_output_tokens
            wanted = RecordRequest.of(params, includes_outputs, has_others=True)
            if not wanted.extract:
                return False, None
            if not wanted.asked_for and not self._admission.is_sampled(request.request_id):
                return self._skip(SAMPLING)
            take = self._plan_take(request, block_ids, wanted, steps)
        except ValueError as error:
            self.stats.count(records_failed=1)
            log_failure(request.request_id, str(error))  # a streamed answer doesn't carry it
            return False, {"error": str(error)}
        if take is None:
            return False, None
        if reason := LOADED if was_loaded else self._admission.admit(request.request_id, take.num_bytes):
            return self._skip(reason)
        self._takes.append(take)
        if self._waits and request.status in _COMPLETE:
            self._held[request.request_id] = None
        return True, None

    def _skip(self, reason: str) -> tuple[bool, dict[str, Any] | None]:
        self.stats.count(**{skipped(reason): 1})
        return False, {"skipped": REASONS[reason]} if self._waits else None

    def _plan_take(
        self, request: Any, block_ids: tuple[list[int], ...], wanted: RecordRequest, steps: list[Step] | None
    ) -> Take | None:
        """What to take out of the store; None for a request that was broken off."""
        reason, num_tokens = RequestStatus.get_finished_reason(request.status), request.num_tokens
        if (num_output_tokens := self._stop_strings.tokens_up_to(request)) is not None:
            reason, num_tokens = FinishReason.STOP, request.num_prompt_tokens + num_output_tokens
        if reason is FinishReason.ABORT:
            return None
        if request.prompt_token_ids is None or request.prompt_embeds is not None:
            raise ValueError("The prompt has embeddings in it, and a record is of token ids. Give token ids alone.")
        start, stop = wanted.rows(request.num_prompt_tokens, num_tokens)
        blocks = list(block_ids[self._anchor])
        if (computed := min(len(blocks) * self._block_size, request.num_computed_tokens)) < stop:
            raise ValueError(f"Rows [{start}, {stop}) were asked for and the request has {computed} left.")
        info = RecordInfo(
            layer_ids=self._plan.layer_ids,
            num_layers=self._plan.num_layers,
            dtype=self._plan.dtype_name,
            model=self._vllm_config.model_config.model,
            rows=stop - start,
            first_position=start,
            num_prompt_tokens=request.num_prompt_tokens,
            finish_reason=str(reason),
            request_id=request.request_id,
            encoding=self.settings.encoding,
        )
        self._number += 1
        return Take(
            info=info,
            block_ids=blocks,
            kept_blocks=sum(block_id != NULL_BLOCK for of_group in block_ids for block_id in of_group),
            name=wanted.name,
            number=self._number,
            token_ids=array("q", request.all_token_ids[start:stop]),
            num_bytes=info.rows * sum(self._plan.record_bytes(self.settings.encoding)),
            steps=None if steps is None else [step for step in steps if start <= step.row < stop],
            preemptions=request.num_preemptions,
        )

    def build_connector_meta(self, scheduler_output: Any) -> HiddenStatesMetadata:
        self._loaded.note_step(scheduler_output)
        takes: list[Take] = []
        if self._takes and not self._postpones(scheduler_output):
            takes, self._takes, self._postponed = self._takes, [], 0
        return HiddenStatesMetadata(takes, idle=scheduler_output.total_num_scheduled_tokens == 0)

    def _postpones(self, scheduler_output: Any) -> bool:
        """Whether what is to be taken out is left to a later step, where nobody waits for it.

        A step with a prompt in it is launched kernel by kernel, and the engine's thread has no time left; decoding is
        replayed as a graph, and has it wait for the device. Not while the KV cache is short of the blocks.
        """
        if self._waits or self._postponed == MAX_POSTPONED_STEPS or not self._runs_prompts(scheduler_output):
            return False
        if self._block_pool.get_num_free_blocks() < sum(take.kept_blocks for take in self._takes):
            return False
        self._postponed += 1
        return True

    def _runs_prompts(self, scheduler_output: Any) -> bool:
        longest: int = max(scheduler_output.num_scheduled_tokens.values(), default=0)
        return longest > 1 + self._vllm_config.num_speculative_tokens

    def update_connector_output(self, connector_output: Any) -> None:
        meta = connector_output.kv_connector_worker_meta
        if meta is None:
            return
        self._admission.drained(meta.drained_bytes)
        for record in meta.written:
            self._admission.settle(record.request_id, record.num_bytes)
            if record.request_id in self._held:
                self._results[record.request_id] = _response(record)

    def has_pending_push_work(self) -> bool:
        if self.settings.sharded and not self._waits:  # nobody waits for a shard to be closed
            return self._admission.backlog_bytes > 0
        return self._admission.num_in_flight > 0

    def hold_back(self, outputs: dict[int, EngineCoreOutputs]) -> dict[int, EngineCoreOutputs]:
        """Keeps finished outputs until their records are in place, and adds those whose records now are.

        Args:
            outputs: of one step, by client; changed in place.
        """
        if not self._held:
            return outputs
        for client, of_client in outputs.items():
            for output in of_client.outputs:
                if output.finish_reason is not None and output.request_id in self._held:
                    self._held[output.request_id] = (client, output)
            of_client.outputs = [o for o in of_client.outputs if not self._holds(o)]
        for request_id in list(self._results):
            held = self._held.pop(request_id)
            assert held is not None  # the step in which a request ends makes its output
            client, output = held
            # Within `MultiConnector` the others' parameters are there already.
            output.kv_transfer_params = (output.kv_transfer_params or {}) | self._results.pop(request_id)
            outputs.setdefault(client, EngineCoreOutputs()).outputs.append(output)
        return outputs

    def _holds(self, output: EngineCoreOutput) -> bool:
        held = self._held.get(output.request_id)
        return held is not None and held[1] is output

    # The worker's side.

    def bind_store(self, store: RowStore) -> None:
        """On a rank that has rows, and again when the store was allocated anew; the first one starts its writers."""
        if self._transfer is not None:
            self._transfer.bind(store)
            return
        slices, ring_bytes = Slices(self._plan.num_slices, store.rows.device), self.settings.ring_bytes
        encoding = self.settings.encoding
        if not slices.is_first:
            ring = Ring(ring_bytes, pinned=False, has_memory=False)
            self._transfer = RowTransfer(store, ring, self._waits, slices, encoding)
            self._close = weakref.finalize(self, self._transfer.finish)
            return
        self._ring = Ring(ring_bytes, pinned=store.rows.is_cuda)
        self._transfer = RowTransfer(store, self._ring, self._waits, slices, encoding)
        self._writers = WriterProcess(self.settings, self._ring)
        self._close = weakref.finalize(self, _close, self._transfer, self._writers)
        if self.settings.sharded:
            logger.warning(
                "sharded=true: answers name a hidden_states_shard and a hidden_states_name in it, and no "
                "hidden_states_path, so clients that want a file per request (speculators, ModelOpt) stop with an "
                "error. Leave sharded out for them."
            )
        if (ranks := self._vllm_config.parallel_config.tensor_parallel_size) > 1:
            logger.info(
                "Of %d tensor-parallel ranks %s, and rank 0 writes them.",
                ranks,
                "each keeps a slice of the hidden states"
                if slices.count > 1
                else f"the first keeps the hidden states, whose size {self._plan.hidden_size} can't be divided",
            )

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, HiddenStatesMetadata)
        if self._transfer is not None and (connector_metadata.takes or self._transfer.waiting):
            self._transfer.begin_step()

    def _read_rows(self, transfer: RowTransfer, meta: HiddenStatesMetadata) -> None:
        """When the model has been launched, so that it doesn't wait for this."""
        if meta.takes:
            self._take_out(transfer, meta.takes)
        else:
            transfer.advance()
        # Answers that wait want their shards closed; otherwise shards are closed by their age and size.
        closes = meta.idle and self._waits and self.settings.sharded and not transfer.waiting
        if closes and self._writers is not None:
            self._writers.flush()

    def _take_out(self, transfer: RowTransfer, takes: list[Take]) -> None:
        batch = []
        for take in takes:
            recipient: Recipient = (job := self._job_of(take))
            if self._writers is not None:
                recipient = self._writers.submit(job)
                self._rows[take.info.request_id] = take.info.rows
                self._submitted_bytes += job.row_bytes
            batch.append((recipient, take.block_ids, take.kept_blocks))
        try:
            were_read = transfer.submit(batch)
        except BaseException:
            for recipient, *_ in batch:  # or the writers would wait for their rows forever
                recipient.put(None)
            raise
        self._reading |= zip((take.info.request_id for take in takes), were_read, strict=True)

    def _job_of(self, take: Take) -> Job:
        row_shape = (len(self._plan.layer_ids), self._plan.hidden_size)
        if self._writers is None:  # the first rank's job has the name, and gets the rows
            return Job("", False, take.info, take.token_ids, row_shape)
        name = take.name or generated_name(self._writers.run, take.number, take.info.request_id)
        return Job(name, take.name is None, take.info, take.token_ids, row_shape, *self._extras_of(take))

    def _extras_of(self, take: Take) -> tuple[Any, ...]:
        steps = take.steps
        if steps is None:
            return ()
        assert self._transfer is not None
        found = self._transfer.copy_drafts(slots_of_steps(steps, take.block_ids, self._transfer.block_size))
        shapes = (
            ("draft_rows", (len(steps),)),
            ("draft_counts", (len(steps), 2)),
            ("draft_tokens", tuple(found.shape)),
        )

        def read() -> Mapping[str, bytes]:
            tensors = drafts_of_steps(steps, found, take.token_ids, take.info.first_position, take.preemptions)
            return {name: tensor.contiguous().numpy().tobytes() for name, tensor in tensors.items()}

        return shapes, read

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        meta = self._get_connector_metadata()
        assert isinstance(meta, HiddenStatesMetadata)
        if self._transfer is None:  # every rank reports, and this one has no rows to read
            return {take.info.request_id for take in meta.takes} or None, None
        self._read_rows(self._transfer, meta)
        if self._writers is not None:
            self._note_written(self._writers, meta.idle)
        read = {request_id for request_id, was_read in self._reading.items() if was_read()}
        for request_id in read:
            del self._reading[request_id]
        return read or None, None

    def _note_written(self, writers: WriterProcess, idle: bool) -> None:
        idle_wait = IDLE_WAIT_S if self._waits else IDLE_WAIT_WHILE_SERVING_S
        self._written = writers.take_results(idle_wait if idle else 0.0)
        for record in self._written:
            written, rows = record.error is None, self._rows.pop(record.request_id)
            self.stats.count(
                records_written=written,
                records_failed=not written,
                rows_written=rows * written,
                bytes_written=record.num_bytes,
            )

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        if self._transfer is None or self._writers is None:
            return None
        written, self._written = self._written, []
        drained = self._submitted_bytes - self._transfer.waiting_bytes - self._ring.used_bytes
        if not written and drained == self._reported_bytes:
            return None
        self._reported_bytes = drained
        return HiddenStatesWorkerMetadata(written, drained)

    @property
    def peak_host_bytes(self) -> int:
        """The most that waited for the writers at one time."""
        return self._ring.peak_bytes

    def has_connector_metadata(self) -> bool:
        """False: there is none for attention layers, which would call here before and after each, for nothing."""
        return False

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing is loaded."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Rows are in the store when a request has finished, all layers at once."""

    def wait_for_save(self) -> None:
        """Blocks are kept until they were read."""

    def shutdown(self) -> None:
        """Writes what was taken out, and removes what is not whole."""
        if self.role is KVConnectorRole.WORKER and self._transfer is not None:
            self._transfer = None
            self._close()

    # Counters.

    def get_kv_connector_stats(self) -> HiddenStatesStats | None:
        if self.role is KVConnectorRole.SCHEDULER:
            standing = {
                "records_in_flight": self._admission.num_in_flight,
                "backlog_bytes": self._admission.backlog_bytes,
                "quota_reached": int(self._admission.quota_reached),
            }
            if standing != self._standing:
                self._standing = standing
                self.stats.data |= standing
        if self.stats.is_empty():
            return None
        stats, self.stats = self.stats, HiddenStatesStats()
        return stats

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> HiddenStatesStats:
        return HiddenStatesStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> HiddenStatesPromMetrics:
        return HiddenStatesPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def _close(transfer: RowTransfer, writers: WriterProcess) -> None:
    try:
        transfer.finish()
    finally:
        writers.close()


def _response(record: Written) -> dict[str, Any]:
    """A request's `kv_transfer_params`, for a record that is in place or that failed."""
    if record.error is not None:
        return {"error": record.error}
    if record.name is None:
        return {"hidden_states_path": record.path}
    # Not as a path: clients that want a file per request move or delete theirs, and with a shard others' records.
    return {"hidden_states_shard": record.path, "hidden_states_name": record.name}

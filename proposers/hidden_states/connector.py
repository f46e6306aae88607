"""`HiddenStatesConnector`: takes the rows of finished requests out of the store and has them written.

The host's own protocol of connectors, and what happens when:

1. A request finishes in the scheduler. Its blocks are kept (`request_finished_all_groups` returns True) and its
   finished output is held back (`hold_back`, by the patch of `Scheduler.update_from_output` in the ledger), because
   the path in it must be that of a file that exists.
2. The next step's metadata tells the worker, which gathers the rows of all of them at once before it runs the model
   (`bind_connector_metadata`), and reports the blocks free as soon as they have been read (`get_finished`). Where the
   ring has no room they are read in later steps.
3. Writer threads write. What became of a record comes back with a step's output (`build_connector_worker_meta`); then
   the held output leaves, with the path or the reason why there is none.

While anything is held, `has_pending_push_work` keeps the engine stepping, with empty steps if need be; those wait for
the writers a little, so that nobody spins.
"""

import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_world_size
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.request import RequestStatus

from mtp.groups import choose_anchor
from mtp.store import RowStore
from proposers.hidden_states.plan import METHOD, ExtractionPlan
from proposers.hidden_states.record import RecordInfo
from proposers.hidden_states.request import RecordRequest, Settings, generated_name
from proposers.hidden_states.stats import HiddenStatesPromMetrics, HiddenStatesStats
from proposers.hidden_states.storage import Storage
from proposers.hidden_states.transfer import RowTransfer
from proposers.hidden_states.writer import FileSink, Job, Ring, ShardSink, Sink, Writers, Written, log_failure

logger = logging.getLogger("vllm.proposers.hidden_states")

# How long a step without tokens waits for the writers: long enough not to spin, short enough for a new request.
IDLE_WAIT_S = 0.02

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
        token_ids: of the rows.
    """

    info: RecordInfo
    block_ids: list[int]
    kept_blocks: int
    name: str | None
    number: int
    token_ids: list[int]


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
    """From the worker."""

    written: list[Written]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        return HiddenStatesWorkerMetadata([*self.written, *other.written])


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
                f"HiddenStatesConnector writes what the method {METHOD} extracts, and this engine doesn't. Give a "
                "speculative_config with that method, or no HiddenStatesConnector."
            )
        self.stats = HiddenStatesStats()
        if role is KVConnectorRole.SCHEDULER:
            groups = kv_cache_config.kv_cache_groups
            self._anchor = choose_anchor(groups)
            self._block_size = groups[self._anchor].kv_cache_spec.block_size
            self._plan = plan
            self._takes: list[Take] = []
            self._number = 0
            self._warn_of_stop_strings = self._warn_of_sessions = True
            # Requests whose record is on its way: the output to be sent then, once the request's step has made one.
            self._held: dict[str, tuple[int, EngineCoreOutput] | None] = {}
            self._results: dict[str, dict[str, Any]] = {}
        else:
            self._transfer: RowTransfer | None = None
            self._reading: dict[str, Callable[[], bool]] = {}
            self._written: list[Written] = []

    @property
    def requires_kv_delivery(self) -> bool:
        """A request that is preempted while its last step runs is computed again: its rows are gone."""
        return True

    # The scheduler's side.

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Nothing is loaded."""

    def on_new_request(self, request: Any) -> None:
        if self._warn_of_stop_strings and getattr(request.sampling_params, "stop", None):
            self._warn_of_stop_strings = False
            logger.warning(
                "A request that ends by a stop string leaves no record: the front end ends it, which the engine can't "
                "tell from an abort. Use stop_token_ids."
            )
        if self._warn_of_sessions and getattr(request, "resumable", False):
            self._warn_of_sessions = False
            logger.warning(
                "A request whose prompt is streamed may leave no record: closed after an answer it is as one that was "
                "aborted. Give the whole prompt at once."
            )

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        if request.status not in _COMPLETE:
            return False, None
        try:
            take = self._plan_take(request, block_ids)
        except ValueError as error:
            self.stats.count(records_failed=1)
            log_failure(request.request_id, str(error))  # a streamed answer doesn't carry it
            return False, {"error": str(error)}
        if take is None:
            return False, None
        self._takes.append(take)
        self._held[request.request_id] = None
        return True, None

    def _plan_take(self, request: Any, block_ids: tuple[list[int], ...]) -> Take | None:
        wanted = RecordRequest.of(request.kv_transfer_params, self.settings.include_output_tokens)
        if not wanted.extract:
            return None
        if request.prompt_token_ids is None or request.prompt_embeds is not None:
            raise ValueError("The prompt has embeddings in it, and a record is of token ids. Give token ids alone.")
        start, stop = wanted.rows(request.num_prompt_tokens, request.num_tokens)
        blocks = list(block_ids[self._anchor])
        if len(blocks) * self._block_size < stop:
            raise ValueError(f"Rows [{start}, {stop}) were asked for and the request has {len(blocks)} blocks left.")
        reason = RequestStatus.get_finished_reason(request.status)
        info = RecordInfo(
            layer_ids=self._plan.layer_ids,
            num_layers=self._plan.num_layers,
            dtype=str(self._plan.dtype).removeprefix("torch."),
            model=self._vllm_config.model_config.model,
            rows=stop - start,
            first_position=start,
            num_prompt_tokens=request.num_prompt_tokens,
            finish_reason=str(reason),
            request_id=request.request_id,
            encoding=self.settings.encoding,
        )
        self._number += 1
        token_ids = list(request.all_token_ids[start:stop])
        kept_blocks = sum(block_id != NULL_BLOCK for of_group in block_ids for block_id in of_group)
        return Take(info, blocks, kept_blocks, wanted.name, self._number, token_ids)

    def build_connector_meta(self, scheduler_output: Any) -> HiddenStatesMetadata:
        takes, self._takes = self._takes, []
        return HiddenStatesMetadata(takes, idle=scheduler_output.total_num_scheduled_tokens == 0)

    def update_connector_output(self, connector_output: Any) -> None:
        meta = connector_output.kv_connector_worker_meta
        for record in meta.written if meta is not None else ():
            self._results[record.request_id] = _response(record)

    def has_pending_push_work(self) -> bool:
        return bool(self._held)

    def hold_back(self, outputs: dict[int, EngineCoreOutputs]) -> dict[int, EngineCoreOutputs]:
        """Keeps finished outputs until their records are in place, and adds those whose records now are.

        Args:
            outputs: of one step, by client; changed in place.
        """
        for client, of_client in outputs.items():
            for output in of_client.outputs:
                if output.finish_reason is not None and output.request_id in self._held:
                    self._held[output.request_id] = (client, output)
            of_client.outputs = [o for o in of_client.outputs if not self._holds(o)]
        for request_id in list(self._results):
            held = self._held.pop(request_id, None)
            params = self._results.pop(request_id)
            if held is not None:
                client, output = held
                output.kv_transfer_params = params
                outputs.setdefault(client, EngineCoreOutputs()).outputs.append(output)
        return outputs

    def _holds(self, output: EngineCoreOutput) -> bool:
        held = self._held.get(output.request_id)
        return held is not None and held[1] is output

    # The worker's side.

    def bind_store(self, store: RowStore) -> None:
        """Starts the writers, on the rank that has rows; again when the store was allocated anew."""
        if self._transfer is not None:
            self._transfer.bind(store)
            return
        self._storage = Storage(self.settings.storage_root)
        self._ring = Ring(self.settings.ring_bytes, pinned=store.rows.is_cuda)
        self._transfer = RowTransfer(store, self._ring)
        self._writers = Writers(self._make_sinks(), self.settings.shard_seconds)
        self._close = weakref.finalize(self, _close, self._transfer, self._writers, self._storage)
        if (size := get_tensor_model_parallel_world_size()) > 1:
            logger.info("Hidden states are the same on all %d tensor-parallel ranks: rank 0 writes them.", size)

    def _make_sinks(self) -> list[Sink]:
        if self.settings.sharded:  # one thread: more would each have a shard of their own
            logger.warning(
                "sharded=true: answers name a hidden_states_shard and a hidden_states_name in it, and no "
                "hidden_states_path, so clients that want a file per request (speculators, ModelOpt) stop with an "
                "error. Leave sharded out for them."
            )
            return [ShardSink(self._storage, self.settings.shard_bytes)]
        return [FileSink(self._storage, self.settings.lock_files) for _ in range(self.settings.writer_threads)]

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if self._transfer is None:
            return
        assert isinstance(connector_metadata, HiddenStatesMetadata)
        if takes := connector_metadata.takes:
            self._take_out(takes)
        else:
            self._transfer.advance()
        if connector_metadata.idle and self.settings.sharded and not self._transfer.waiting:
            self._writers.flush()

    def _take_out(self, takes: list[Take]) -> None:
        assert self._transfer is not None
        row_shape = (len(takes[0].info.layer_ids), self._vllm_config.model_config.get_hidden_size())
        batch = []
        for take in takes:
            name = take.name or generated_name(self._storage.run, take.number, take.info.request_id)
            job = Job(name, take.name is None, take.info, take.token_ids, row_shape)
            batch.append((job, take.block_ids, take.kept_blocks))
            self._writers.submit(job)
        try:
            were_read = self._transfer.submit(batch)
        except BaseException:
            for job, *_ in batch:  # or the writers would wait for their rows forever
                job.parts.put(None)
            raise
        self._reading |= zip((take.info.request_id for take in takes), were_read, strict=True)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        if self._transfer is None:
            return None, None
        meta = self._get_connector_metadata()
        assert isinstance(meta, HiddenStatesMetadata)
        self._written = self._writers.take_results(IDLE_WAIT_S if meta.idle else 0.0)
        for record in self._written:
            self.stats.count(
                records_written=record.error is None,
                records_failed=record.error is not None,
                bytes_written=record.num_bytes,
            )
        read = {request_id for request_id, was_read in self._reading.items() if was_read()}
        for request_id in read:
            del self._reading[request_id]
        return read or None, None

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        written, self._written = self._written, []
        return HiddenStatesWorkerMetadata(written) if written else None

    @property
    def peak_host_bytes(self) -> int:
        """The most that waited for the writers at one time."""
        return self._ring.peak_bytes

    def get_finished_count(self) -> int:
        """One rank reports each request."""
        return 1

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


def _close(transfer: RowTransfer, writers: Writers, storage: Storage) -> None:
    try:
        transfer.finish()
    finally:
        writers.close()
        storage.close()


def _response(record: Written) -> dict[str, Any]:
    """A request's `kv_transfer_params`, for a record that is in place or that failed."""
    if record.error is not None:
        return {"error": record.error}
    if record.name is None:
        return {"hidden_states_path": record.path}
    # Not as a path: clients that want a file per request move or delete theirs, and with a shard others' records.
    return {"hidden_states_shard": record.path, "hidden_states_name": record.name}

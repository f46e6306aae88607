"""vLLM's offloading connector without a GPU: its own spec, keys and schedule, and a worker that copies at once."""

from typing import Any

import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class HostWorker(OffloadingWorker):
    """For chunks of one block."""

    def __init__(self, caches: CanonicalKVCaches, num_chunks: int) -> None:
        self._caches = [cache.tensor for cache in caches.tensors]
        self._chunks = [cache.new_zeros(num_chunks, cache.shape[1]) for cache in self._caches]
        self._tensors_of_groups = [{ref.tensor_idx for ref in refs} for refs in caches.group_data_refs]
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for tensor, blocks, chunks in self._pairs(src_spec, dst_spec):
            self._chunks[tensor][chunks] = self._caches[tensor][blocks]
        self._finished.append(TransferResult(job_id, success=True))
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for tensor, blocks, chunks in self._pairs(dst_spec, src_spec):
            self._caches[tensor][blocks] = self._chunks[tensor][chunks]
        self._finished.append(TransferResult(job_id, success=True))
        return True

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        pass

    def _pairs(self, blocks: Any, chunks: Any) -> Any:
        """Of every tensor of every group, the blocks and the chunks that are theirs."""
        start = 0
        for tensors, size in zip(self._tensors_of_groups, blocks.group_sizes, strict=True):
            ids = [torch.from_numpy(spec.block_ids[start : start + size]).long() for spec in (blocks, chunks)]
            for tensor in tensors:
                yield tensor, *ids
            start += size


class HostOffloadingSpec(CPUOffloadingSpec):
    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        return HostWorker(kv_caches, self.num_chunks)

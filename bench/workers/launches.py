"""The kernels of profiled steps: the device's time by family, and waits of ranks for each other."""

from collections import defaultdict
from typing import Any

from bench.spread import quartiles
from bench.workers.engine import busy

Launch = tuple[float, float, str]
"""A kernel's beginning and end, in microseconds, and its name."""

COLLECTIVES = "collectives"
FAMILIES = {  # by parts of kernel names, the first that matches
    COLLECTIVES: ("cross_device_reduce", "allreduce", "nccl"),  # before "reduce"
    "norm": ("norm",),  # before the GEMMs: "gemma" has "gemm" in it
    "attention": ("flash", "attention", "fmha"),
    "matrix product": ("gemm", "nvjet", "cutlass", "splitk", "gemv", "cublas", "xmma", "fp8_linear"),
    "experts": ("moe", "topk"),
    "slots and window": ("slot", "window"),
    "KV write": ("reshape_and_cache",),
    "argmax": ("reduce", "argmax"),
}


def summarise_launches(ranks: list[list[Launch]], num_steps: int) -> dict[str, Any]:
    """The figures of a step, in ms; of several ranks, the first's.

    Args:
        ranks: what each rank launched in that many steps.
    """
    launches = ranks[0]
    families: dict[str, float] = defaultdict(float)
    by_name: dict[str, list[float]] = defaultdict(list)
    for start, end, name in launches:
        families[family_of(name)] += (end - start) / 1e3 / num_steps
        by_name[name[:80]].append((end - start) / 1e3)
    longest = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:40]
    waiting = waiting_us(ranks)
    return {
        "gpu_busy_ms": round(busy((start, end) for start, end, _ in launches) / 1e3 / num_steps, 4),
        "gpu_waiting_ms": None if waiting is None else round(waiting / 1e3 / num_steps, 4),
        "kernels_per_step": round(len(launches) / num_steps, 1),
        "gpu_ms_by_family": {name: round(ms, 4) for name, ms in sorted(families.items(), key=lambda item: -item[1])},
        "top_kernels": {
            name: {"ms": round(sum(times) / num_steps, 4), "launches": round(len(times) / num_steps, 1)}
            for name, times in longest
        },
    }


def middle_profile(profiles: list[dict[str, Any]]) -> dict[str, Any]:
    """Of several profiles of the same steps the one of median time, and how far all of them differ.

    `gpu_working_ms`, the device's time in a step less its waits for another rank, has quartiles over the profiles.
    """
    working = [profile["gpu_busy_ms"] - (profile["gpu_waiting_ms"] or 0.0) for profile in profiles]
    middle = sorted(range(len(profiles)), key=working.__getitem__)[len(profiles) // 2]
    return profiles[middle] | {"gpu_working_ms": quartiles(working, 4)}


def family_of(kernel: str) -> str:
    name = kernel.lower()
    return next((family for family, parts in FAMILIES.items() if any(part in name for part in parts)), "other")


def waiting_us(ranks: list[list[Launch]]) -> float | None:
    """How long the first rank was busy with nothing but waiting for another in its collectives, in microseconds.

    A collective's kernel spins until all ranks have come, so the last to come shows how long the transfer itself takes.
    None where ranks have launched different collectives, so that nobody can say which belong together.
    """
    lengths = [[end - start for start, end, name in sorted(rank) if family_of(name) == COLLECTIVES] for rank in ranks]
    if len(set(map(len, lengths))) > 1:
        return None
    return sum(own - min(own, *others) for own, *others in zip(*lengths, strict=True) if others)

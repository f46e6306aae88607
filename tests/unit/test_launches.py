"""The kernels of profiled steps: whose time is whose, and what is a wait for another rank."""

from bench.workers.launches import Launch, middle_profile, summarise_launches

REDUCE, GATHER, GEMM = "void vllm::cross_device_reduce_1stage<bf16, 2>", "ncclDevKernel_AllGather_RING_LL", "nvjet_tst"

# The second rank comes late to the first collective, and the first rank to the second.
FIRST: list[Launch] = [(0, 100, GEMM), (100, 180, REDUCE), (180, 300, GEMM), (300, 320, GATHER)]
SECOND: list[Launch] = [(50, 150, GEMM), (150, 180, REDUCE), (180, 250, GEMM), (250, 320, GATHER)]


def test_a_wait_for_another_rank_is_told_from_a_collectives_own_time() -> None:
    found = summarise_launches([FIRST, SECOND], num_steps=2)
    assert found["gpu_busy_ms"] == 0.16
    assert found["gpu_waiting_ms"] == (80 - 30) / 2 / 1e3
    assert summarise_launches([SECOND, FIRST], num_steps=2)["gpu_waiting_ms"] == (70 - 20) / 2 / 1e3
    assert found["gpu_ms_by_family"] == {"matrix product": 0.11, "collectives": 0.05}


def test_a_single_rank_waits_for_nobody() -> None:
    assert summarise_launches([FIRST], num_steps=1)["gpu_waiting_ms"] == 0


def test_of_several_profiles_the_middle_one_is_shown_and_the_spread_of_all() -> None:
    profiles = [summarise_launches([rank], num_steps=1) for rank in (FIRST, FIRST[:2], FIRST[1:])]
    found = middle_profile(profiles)
    assert found["gpu_busy_ms"] == profiles[2]["gpu_busy_ms"] == 0.22
    assert found["gpu_working_ms"] == {"median": 0.22, "q1": 0.2, "q3": 0.27}


def test_nothing_is_said_of_waits_where_ranks_have_launched_different_collectives() -> None:
    assert summarise_launches([FIRST, SECOND[:3]], num_steps=1)["gpu_waiting_ms"] is None

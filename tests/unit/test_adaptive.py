"""The controller of the number of drafts, on simulated steps: what they take and what is accepted is given."""

import inspect
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import CUDAGraphMode
from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

from proposers.adaptive import ENOUGH, Acceptance, Cell, Controller, Estimate, StepTimes
from proposers.host import adaptive

Times = Callable[[int, int], float]
"""Seconds of a step by the drafts that it verifies, and those that it makes."""


@dataclass
class Server:
    """An engine whose steps take no time but that of a clock of its own.

    Attributes:
        times: of a step without a prompt.
        rates: by position, the chance that a draft is accepted if those before it are.
        prompt_every: every so many steps one carries a prompt of up to 1,000 rows, which takes `prompt_seconds`; 0:
            none does.
    """

    times: Times
    rates: Sequence[float]
    num_requests: int = 8
    prompt_every: int = 0
    prompt_seconds: float = 0.0
    noise: float = 0.05
    seed: int = 0
    now: float = 0.0
    tokens: int = 0
    controller: Controller = field(init=False)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.controller = Controller(len(self.rates), clock=lambda: self.now)
        self._verified = 0
        self._step = 0

    def run(self, steps: int) -> float:
        """Tokens per second over that many steps."""
        tokens, began = self.tokens, self.now
        for _ in range(steps):
            self._run_step()
        return (self.tokens - tokens) / (self.now - began)

    def _run_step(self) -> None:
        ids = [f"request {i}" for i in range(self.num_requests)]
        k = self.controller[len(ids)]
        self._step += 1
        has_prompt = self.prompt_every > 0 and self._step % self.prompt_every == 0
        prompt_rows = self.rng.randint(1, 1000) if has_prompt else 0
        seconds = self.times(self._verified, k) + self.prompt_seconds * prompt_rows / 1000
        self.now += seconds * self.rng.uniform(1 - self.noise, 1 + self.noise)
        self.controller.end_step()
        for request_id in ids:
            accepted = 0
            while accepted < self._verified and self.rng.random() < self.rates[accepted]:
                accepted += 1
            self.tokens += 1 + accepted
            if self._verified:
                self.controller.acceptance.observe(request_id, self._verified, accepted)
        self.controller.learn(k, ids, prompt_rows)
        self._verified = k


def best_of_all(times: Times, rates: Sequence[float]) -> float:
    """Tokens per second and request of the best fixed number of drafts."""
    speeds, chance, tokens = [1 / times(0, 0)], 1.0, 1.0
    for k, rate in enumerate(rates, 1):
        chance *= rate
        tokens += chance
        speeds.append(tokens / times(k, k))
    return max(speeds)


def cheap(verified: int, made: int) -> float:
    return 0.010 + 0.0003 * (verified + made)


def dear(verified: int, made: int) -> float:
    return 0.010 + 0.004 * (verified + made)


def only_all(verified: int, made: int) -> float:
    """Drafting at all costs a lot, and another draft nothing."""
    return 0.010 + 0.004 * ((verified > 0) + (made > 0))


@pytest.mark.parametrize(
    ("times", "rates", "best"),
    [
        (cheap, [0.9, 0.8, 0.7], 3),
        (cheap, [0.9, 0.8, 0.01], 2),
        (dear, [0.3, 0.2, 0.1], 0),
        (dear, [0.95, 0.1, 0.1], 1),
        (only_all, [0.9, 0.9, 0.9], 3),
        (cheap, [0.02] * 6, 0),
    ],
)
@pytest.mark.parametrize("num_requests", [1, 32])
def test_it_finds_the_number_that_gives_the_most_tokens_per_second(
    times: Times, rates: list[float], best: int, num_requests: int
) -> None:
    server = Server(times, rates, num_requests)
    server.run(3000)
    shares = []
    for _ in range(100):
        server.run(20)
        shares.append(server.controller.in_force)
    assert shares.count(best) >= 90


@pytest.mark.parametrize("times", [cheap, dear, only_all])
@pytest.mark.parametrize("rates", [[0.9, 0.8, 0.7], [0.5, 0.5, 0.5], [0.1, 0.1, 0.1]])
@pytest.mark.parametrize("seed", range(3))
def test_what_it_tries_costs_a_few_percent_at_most(times: Times, rates: list[float], seed: int) -> None:
    server = Server(times, rates, seed=seed)
    server.run(1500)
    assert server.run(4000) > 0.97 * 8 * best_of_all(times, rates)


def test_from_the_start_it_costs_little_more() -> None:
    for times, rates in [(cheap, [0.9, 0.8, 0.7]), (dear, [0.3, 0.2, 0.1])]:
        assert Server(times, rates).run(1500) > 0.85 * 8 * best_of_all(times, rates)


def test_it_follows_conditions_that_change_both_ways() -> None:
    server = Server(cheap, [0.9, 0.8, 0.7])
    server.run(2000)
    assert server.controller.in_force == 3
    server.rates = [0.02, 0.02, 0.02]
    server.run(1000)
    assert server.controller.in_force == 0
    server.rates = [0.9, 0.8, 0.7]
    server.run(6000)
    assert server.controller.in_force == 3
    server.times = lambda verified, made: 0.010 + 0.02 * (verified + made)
    server.run(2000)
    assert server.controller.in_force == 0


def test_another_batch_size_has_times_of_its_own() -> None:
    server = Server(lambda verified, made: cheap(verified, made), [0.8, 0.6, 0.4], num_requests=1)
    server.run(1000)
    assert server.controller.in_force == 3
    server.num_requests, server.times = 64, dear
    server.run(1000)
    assert server.controller.in_force == 0
    server.num_requests, server.times = 1, cheap
    server.run(1000)
    assert server.controller.in_force == 3


@pytest.mark.parametrize(("times", "best"), [(cheap, 3), (dear, 0)])
def test_steps_with_a_prompt_are_told_apart(times: Times, best: int) -> None:
    # Every third step takes many times as long as another, by a prompt that has nothing to do with K.
    server = Server(times, [0.6, 0.5, 0.4], prompt_every=3, prompt_seconds=0.100)
    server.run(3000)
    found = []
    for _ in range(100):
        server.run(20)
        found.append(server.controller.in_force)
    assert found.count(best) >= 90


def test_the_work_on_a_prompt_does_not_make_drafts_look_cheap() -> None:
    # Held against the long steps that carry prompts, no draft would seem to cost anything.
    times = StepTimes(1)
    decode, prompt = Cell.of(4, 0), Cell.of(4, 500)
    for _ in range(32):
        for cell, extra in ((decode, 0.0), (prompt, 1.0)):
            times.see(cell)
            times.add(cell, 0, 0.010 + extra, in_force=0)
            times.add(cell, 1, 0.020 + extra, in_force=0)
    assert times.step_time(0, in_force=0) == pytest.approx(0.010)
    assert times.step_time(1, in_force=0) == pytest.approx(0.020)


def test_if_every_step_carries_a_prompt_those_are_held_against_each_other() -> None:
    server = Server(dear, [0.1, 0.1, 0.1], prompt_every=1, prompt_seconds=0.010)
    server.run(6000)
    assert server.controller.in_force == 0


def test_a_time_counts_for_the_number_that_it_both_verified_and_made() -> None:
    # As it drafts 3 the step that still verifies 0 is fast, and the other way round slow.
    controller = Controller(3, clock=lambda: 0.0)
    for k, seconds in [(3, 1.0), (0, 9.0), (0, 2.0), (3, 7.0), (3, 1.0)] * ENOUGH:
        controller._seconds = seconds
        controller._running = -1  # nothing is decided
        controller.learn(k, ["a"], 0)
    estimates = controller._times._estimates[Cell.of(1, 0)]
    assert estimates[0].seconds == pytest.approx(2.0)
    assert estimates[3].seconds == pytest.approx(1.0)


def test_waiting_for_requests_is_no_part_of_a_step() -> None:
    now = 0.0
    controller = Controller(1, clock=lambda: now)
    for _ in range(20):
        _ = controller[1]
        now += 1.0
        controller.end_step()
        controller.learn(1, ["a"], 0)
        controller.pause()
        now += 100.0
    assert controller.step_times()[1] == pytest.approx(1.0)


def test_steps_that_are_scheduled_ahead_take_from_output_to_output() -> None:
    now = 0.0
    controller = Controller(1, clock=lambda: now)
    _ = controller[1]
    for _ in range(20):
        _ = controller[1]
        now += 1.0
        controller.end_step()
        controller.learn(1, ["a"], 0)
    assert controller.step_times()[1] == pytest.approx(1.0)


def test_a_slow_step_hardly_moves_a_time_and_the_first_ones_may_be_slow() -> None:
    estimate = Estimate()
    for seconds in [30.0, 8.0] + [0.010] * 60:
        estimate.add(seconds)
    assert estimate.seconds == pytest.approx(0.010)
    estimate.add(100.0)
    assert estimate.seconds < 0.0105


def test_what_slows_all_steps_makes_no_number_look_better() -> None:
    now_slower = 1.0
    server = Server(lambda verified, made: now_slower * cheap(verified, made), [0.9, 0.8, 0.7])
    server.run(2000)
    before = server.controller.step_times()
    now_slower = 1.5
    server.run(300)
    after = server.controller.step_times()
    assert [b / a for a, b in zip(before, after, strict=True) if a and b] == pytest.approx([1.5] * 4, rel=0.1)


def test_acceptance_is_by_request_and_position_and_new_requests_begin_with_that_of_all() -> None:
    acceptance = Acceptance(2)
    for _ in range(400):
        acceptance.observe("good", 2, 2)
        acceptance.observe("bad", 2, 0)
    # After a draft that was rejected nothing is known of the next.
    assert acceptance.overall == pytest.approx([0.5, 1.0], abs=0.05)
    assert acceptance.tokens(["good"]) == pytest.approx([1, 2, 3], abs=0.01)
    assert acceptance.tokens(["bad"])[1] == pytest.approx(1, abs=0.01)
    assert acceptance.tokens(["new"]) == pytest.approx([1, 1.5, 2], abs=0.1)
    assert acceptance.tokens(["good", "bad"])[1] == pytest.approx(3, abs=0.02)
    acceptance.forget(["good", "unknown"])
    assert acceptance.tokens(["good"]) == acceptance.tokens(["new"])


def test_a_position_that_is_not_drafted_keeps_its_acceptance() -> None:
    acceptance = Acceptance(3)
    for _ in range(100):
        acceptance.observe("a", 3, 3)
    kept = acceptance.overall[1:]
    for _ in range(100):
        acceptance.observe("a", 1, 0)
    assert acceptance.overall[1:] == kept
    assert acceptance.overall[0] < 0.5


def test_its_report_says_what_was_chosen_since_the_last(caplog: pytest.LogCaptureFixture) -> None:
    server = Server(cheap, [0.9, 0.8, 0.7])
    with caplog.at_level("INFO", logger="vllm.proposers"):
        server.run(20)
        server.controller.report(every=1e6)
        server.controller.report()
        server.controller.report()
        server.run(20)
        server.controller.report()
    first, second = caplog.messages
    assert "3 in 100% of 20 steps; now 3. A step takes" in first
    assert "2 in 25%, 3 in 75% of 20 steps" in second


# In vLLM's configuration.


@pytest.mark.parametrize("max_drafts", [1, 3, 6])
@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 4, 7, 8, 256])
def test_every_number_of_drafts_is_in_the_table_if_there_are_as_many_requests(
    max_drafts: int, max_num_seqs: int
) -> None:
    table = adaptive.every_number(max_drafts, max_num_seqs)
    lookup = build_dynamic_sd_schedule_lookup(table, max_num_seqs, max_drafts)[1:]
    assert len(set(lookup)) == min(max_drafts + 1, max_num_seqs)
    assert max_drafts in lookup
    assert max_num_seqs == 1 or 0 in lookup
    # Graphs of a number are captured up to its largest batch.
    largest = [max(n for n, k in enumerate(lookup, 1) if k == wanted) for wanted in set(lookup)]
    assert min(largest) >= max_num_seqs - max_drafts


def test_every_number_of_drafts_has_a_graph_for_every_batch_that_is_no_larger_than_its_graphs() -> None:
    k, requests = 3, 64
    speculative = SimpleNamespace(
        uses_dynamic_speculative_decoding=lambda: True,
        num_speculative_tokens_per_batch_size=adaptive.every_number(k, requests),
    )
    manager = SimpleNamespace(
        compilation_config=SimpleNamespace(
            cudagraph_capture_sizes=sorted({n * (1 + i) for n in (1, 2, 4, *range(8, 65, 8)) for i in range(1 + k)}),
            max_cudagraph_capture_size=256,
        ),
        cudagraph_mode=CUDAGraphMode.FULL_DECODE_ONLY,
        max_num_reqs=requests,
        decode_query_len=1 + k,
        vllm_config=SimpleNamespace(
            speculative_config=speculative,
            num_speculative_tokens=k,
            additional_config={"mtp_proposers": {"adapt_drafts": True}},
        ),
        varlen_decode=False,
        lora_capture_cases=[0],
        _maybe_ubatch_twin=lambda desc: None,
        _candidates={},
        _capture_descs={},
        _graphs_captured=True,
        _resolve_effective_loras=lambda num_loras: num_loras,
    )

    def without_a_graph() -> set[tuple[int, int]]:
        steps = {(drafts, n) for drafts in range(1 + k) for n in range(1, 1 + requests)}
        dispatch = CudaGraphManager.dispatch
        modes = {step: dispatch(manager, step[1], step[1] * (1 + step[0]), 1 + step[0], 0).cg_mode for step in steps}
        return {step for step, mode in modes.items() if mode is CUDAGraphMode.NONE}

    init_candidates = inspect.unwrap(CudaGraphManager._init_candidates)
    init_candidates(manager)
    assert without_a_graph()  # else the patch can go
    manager._candidates.clear()
    adaptive.find_graphs_of_every_number.replace(init_candidates)(manager)
    assert without_a_graph() == set()
    # A step is padded no further than it has to be.
    assert CudaGraphManager.dispatch(manager, 5, 15, 3, 0).num_reqs <= 8


def config(**more: Any) -> Any:
    """As much of a configuration as is asked."""
    hf_config = SimpleNamespace(architectures=["Step3p5MTP"])
    target = SimpleNamespace(pipeline_parallel_size=1)
    speculative = SimpleNamespace(
        method="mtp",
        draft_model_config=SimpleNamespace(hf_config=hf_config),
        target_parallel_config=target,
        num_speculative_tokens=3,
        num_speculative_tokens_per_batch_size=None,
        enable_adaptive_verification=False,
    )
    parallel = SimpleNamespace(data_parallel_size=1, world_size=1, distributed_executor_backend="uni")
    whole = SimpleNamespace(
        speculative_config=speculative,
        parallel_config=parallel,
        scheduler_config=SimpleNamespace(max_num_seqs=16),
        use_v2_model_runner=True,
        additional_config={"mtp_proposers": {"adapt_drafts": True}},
    )
    for path, value in more.items():
        owner: Any = whole
        *owners, name = path.split("__")
        for part in owners:
            owner = getattr(owner, part)
        setattr(owner, name, value)
    return whole


def settle(vllm_config: Any) -> Any:
    adaptive.capture_every_number.replace(lambda self: None)(vllm_config)
    return vllm_config.speculative_config.num_speculative_tokens_per_batch_size


def test_with_the_option_there_is_a_table_with_every_number() -> None:
    table = [(1, 13, 3), (14, 14, 2), (15, 15, 1), (16, 16, 0)]
    chosen = config()
    assert settle(chosen) == table
    assert settle(chosen) == table  # as of a copy
    assert settle(config(additional_config={})) is None


def test_a_table_of_ones_own_is_refused_beside_the_option() -> None:
    given = config(speculative_config__num_speculative_tokens_per_batch_size=[(1, 16, 2)])
    with pytest.raises(ValueError, match=r"\[\(1, 16, 2\)\] says how many drafts a step has.*leave one of them out"):
        settle(given)
    given.additional_config = {}
    assert settle(given) == [(1, 16, 2)]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"speculative_config__method": "ngram"}, "nothing is drafted by vllm-mtp-proposers"),
        ({"speculative_config": None}, "nothing is drafted by vllm-mtp-proposers"),
        ({"speculative_config__enable_adaptive_verification": True}, "vLLM's own speculator drafts"),
        ({"parallel_config__data_parallel_size": 2, "use_v2_model_runner": False}, "would choose differently"),
        (
            {"parallel_config__distributed_executor_backend": "external_launcher", "parallel_config__world_size": 2},
            "a scheduler and a clock of its own",
        ),
    ],
)
def test_where_it_can_not_choose_a_line_says_why(
    change: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    given = config(**change)
    with caplog.at_level("WARNING", logger="vllm.proposers"):
        adaptive.capture_every_number.replace(lambda self: None)(given)
    assert getattr(given.speculative_config, "num_speculative_tokens_per_batch_size", None) is None
    (message,) = caplog.messages
    assert message.startswith("adapt_drafts has no effect: ")
    assert reason in message

"""A controller that chooses the number of drafts of each step, K, by measured step times and acceptance.

vLLM's scheduler asks a table of K by batch size, once for each step that has something scheduled. A `Controller` stands
in that table's place. All that it knows the scheduler has on the host anyway: when the output of a step came, which
requests were in it, and how many of their drafts were accepted. Nothing is synchronised.

One K is in force for steps with a prompt and without. What is drafted in a step is verified in the next, so if K went
with the kind of step, hardly any step would draft as many as it verifies, and none could be held against another.
Times are kept apart: by whether a step carries a prompt, and of how many rows, and by the size of the batch.
"""

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

logger = logging.getLogger("vllm.proposers")

# In steps.
PROBE_STEPS = 5
PROBE_EVERY = 32
DECIDE_EVERY = 4
WINDOW = 32
TIME_HORIZON = 32

# In drafts at a position.
REQUEST_HORIZON = 32
OVERALL_HORIZON = 128

# Samples from which a time counts. The rows of prompts differ within a cell, too, so those of a few steps say nothing.
ENOUGH, ENOUGH_WITH_PROMPT = 4, 16

MARGIN = 0.03
"""How much more tokens per second another K has to promise: less is noise, and would go back and forth."""


class Cell(NamedTuple):
    """Steps that take about as long under the same K.

    Attributes:
        requests, prompt_rows: powers of two: n is for numbers from 2^(n-1) to 2^n - 1, 0 for none.
    """

    requests: int
    prompt_rows: int

    @classmethod
    def of(cls, num_requests: int, num_prompt_rows: int) -> "Cell":
        return cls(num_requests.bit_length(), max(0, num_prompt_rows).bit_length())


@dataclass(slots=True)
class Estimate:
    """A moving average of step times, in seconds, that one slow step doesn't move far."""

    seconds: float = 0.0
    count: int = 0

    def add(self, seconds: float) -> None:
        if self.count < ENOUGH and seconds < self.seconds / 2:
            self.count = 0  # the steps before compiled something
        if self.count:
            seconds = min(max(seconds, self.seconds / 2), self.seconds * 2)
        self.count += 1
        self.seconds += (seconds - self.seconds) / min(self.count, TIME_HORIZON)


class StepTimes:
    """How long steps take, by cell and K, where the last `WINDOW` steps say how often there is which cell."""

    def __init__(self, max_drafts: int) -> None:
        self._max_drafts = max_drafts
        self._estimates: dict[Cell, list[Estimate]] = {}
        self._recent: deque[Cell] = deque()
        self._shares: Counter[Cell] = Counter()

    def see(self, cell: Cell) -> None:
        """Counts a step, whether its time is known or not."""
        self._recent.append(cell)
        self._shares[cell] += 1
        if len(self._recent) > WINDOW:
            oldest = self._recent.popleft()
            self._shares[oldest] -= 1
            if not self._shares[oldest]:
                del self._shares[oldest]

    def add(self, cell: Cell, k: int, seconds: float, in_force: int) -> None:
        """Takes the time of a step that verified and made k drafts a request.

        What slows the K that is in force, such as longer contexts, slows the others as much, which are seldom seen.
        """
        estimates = self._estimates.setdefault(cell, [Estimate() for _ in range(self._max_drafts + 1)])
        settled = estimates[k].count >= TIME_HORIZON
        before = estimates[k].seconds
        estimates[k].add(seconds)
        if k == in_force and settled and before > 0:
            for other in range(self._max_drafts + 1):
                if other != k:
                    estimates[other].seconds *= estimates[k].seconds / before

    def fade(self, k: int) -> None:
        """k is going to be probed: what was seen of it long ago counts less than what is seen now."""
        for cell, estimates in self._estimates.items():
            estimates[k].count = min(estimates[k].count, _enough(cell) - 1)

    def step_time(self, k: int, in_force: int) -> float | None:
        """Seconds of a step under k as steps are now; None: not known.

        The work on a prompt has to be done whatever K is, and more of it comes as requests end sooner. So it is left
        out: of steps that carry one only the difference counts that k makes in them.
        """
        here = [(cell, share) for cell, share in self._shares.items() if self._known(cell, in_force)]
        base = _mean([(self._seconds(cell, in_force), share) for cell, share in here if not cell.prompt_rows])
        if base is None:
            base = _mean([(self._seconds(cell, in_force), share) for cell, share in here])
        differences = [
            (self._seconds(cell, k) - self._seconds(cell, in_force), share)
            for cell, share in here
            if self._known(cell, k)
        ]
        difference = _mean(differences)
        if base is None or difference is None:
            return None
        return max(base + difference, base / 100)

    def _known(self, cell: Cell, k: int) -> bool:
        return cell in self._estimates and self._estimates[cell][k].count >= _enough(cell)

    def _seconds(self, cell: Cell, k: int) -> float:
        return self._estimates[cell][k].seconds


def _enough(cell: Cell) -> int:
    return ENOUGH_WITH_PROMPT if cell.prompt_rows else ENOUGH


def _mean(weighted: Sequence[tuple[float, int]]) -> float | None:
    total = sum(weight for _, weight in weighted)
    return sum(value * weight for value, weight in weighted) / total if total else None


class Acceptance:
    """How often a draft is accepted if those before it are, by request and position.

    A request begins with what all requests have shown. A position that isn't drafted keeps what it had.

    Attributes:
        overall: by position, of all requests.
    """

    def __init__(self, max_drafts: int) -> None:
        self.overall = [0.5] * max_drafts
        self._seen = [1] * max_drafts
        self._by_request: dict[str, list[float]] = {}

    def observe(self, request_id: str, num_drafts: int, num_accepted: int) -> None:
        rates = self._by_request.setdefault(request_id, self.overall.copy())
        for position in range(min(num_drafts, num_accepted + 1, len(rates))):
            accepted = position < num_accepted
            rates[position] += (accepted - rates[position]) / REQUEST_HORIZON
            self._seen[position] = min(self._seen[position] + 1, OVERALL_HORIZON)
            self.overall[position] += (accepted - self.overall[position]) / self._seen[position]

    def forget(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._by_request.pop(request_id, None)

    def tokens(self, request_ids: Iterable[str]) -> list[float]:
        """Tokens that a step is expected to give these requests together, for 0 drafts, 1, and so on."""
        expected = [0.0] * (1 + len(self.overall))
        for request_id in request_ids:
            chance = total = 1.0
            expected[0] += total
            for position, rate in enumerate(self._by_request.get(request_id, self.overall)):
                chance *= rate
                total += chance
                expected[1 + position] += total
        return expected


class Controller:
    """Chooses K: the one that promises the most tokens per second, and now and then, for a few steps, another.

    What another K would take only steps under it show, and with no drafts nothing is learnt of acceptance. So a
    neighbour is probed first, then any other, the longest unseen first. Probes that change nothing become rarer.

    Args:
        max_drafts: the configured number, which it begins with.
        clock: in seconds.
        probe_every: steps before the first probe, and after a change.

    Attributes:
        in_force: the K that is chosen, but for probes.
        chosen: steps by K, probes included.
        acceptance: what it has learnt of drafts.
    """

    def __init__(
        self, max_drafts: int, clock: Callable[[], float] = time.perf_counter, probe_every: int = PROBE_EVERY
    ) -> None:
        self.max_drafts = self.in_force = self._running = max_drafts
        self.chosen: Counter[int] = Counter()
        self.acceptance = Acceptance(max_drafts)
        self._times = StepTimes(max_drafts)
        self._clock = clock
        self._first_probe = self._probe_every = self._countdown = probe_every
        self._num_steps = 0
        self._last_seen = [0] * (max_drafts + 1)
        self._last_k: int | None = None
        self._since: float | None = None
        self._seconds: float | None = None
        self._reported, self._reported_at = Counter[int](), clock()

    # What the scheduler calls.

    def __getitem__(self, num_requests: int) -> int:
        """K of the step that is being scheduled, in place of a table by its number of requests."""
        if self._since is None:
            self._since = self._clock()
        self._countdown -= 1
        if self._countdown <= 0:
            self._turn()
        self.chosen[self._running] += 1
        return self._running

    def end_step(self) -> None:
        """The output of a step is there. It took since the one before it, or since it was scheduled after a pause."""
        now = self._clock()
        self._seconds = None if self._since is None else now - self._since
        self._since = now

    def learn(self, k: int, request_ids: Sequence[str], num_prompt_rows: int) -> None:
        """Takes in the step that has ended.

        Args:
            k: drafts that were made in it for each request.
            request_ids: that were in it.
            num_prompt_rows: rows of it that were neither a token just sampled nor its drafts.
        """
        cell = Cell.of(len(request_ids), num_prompt_rows)
        self._times.see(cell)
        # A step that verifies another number than it drafts belongs to neither.
        if self._seconds is not None and k == self._last_k:
            self._times.add(cell, k, self._seconds, self.in_force)
        self._last_k = k
        self._num_steps += 1
        self._last_seen[k] = self._num_steps
        if self._num_steps % DECIDE_EVERY == 0 and self._running == self.in_force:
            self._decide(request_ids)

    def pause(self) -> None:
        """Nothing is there to do: until the next step is scheduled, time counts for none."""
        self._since = None

    # How it chooses.

    def _decide(self, request_ids: Sequence[str]) -> None:
        tokens, times = self.acceptance.tokens(request_ids), self.step_times()
        speeds = [0.0 if took is None else expected / took for expected, took in zip(tokens, times, strict=True)]
        best = max(range(len(speeds)), key=speeds.__getitem__)
        if times[self.in_force] is not None and speeds[best] > (1 + MARGIN) * speeds[self.in_force]:
            self.in_force = self._running = best
            self._probe_every = self._countdown = self._first_probe

    def _turn(self) -> None:
        """Begins a probe, or ends it."""
        if self._running != self.in_force:
            self._running = self.in_force
            rarest = 2 if self._unknown() else 16
            self._probe_every = min(2 * self._probe_every, rarest * self._first_probe)
            self._countdown = self._probe_every
            return
        others = [k for k in range(self.max_drafts + 1) if k != self.in_force]
        self._running = min(self._unknown() or others, key=lambda k: (self._last_seen[k], abs(k - self.in_force), k))
        self._times.fade(self._running)
        self._countdown = PROBE_STEPS

    def _unknown(self) -> list[int]:
        return [k for k, seconds in enumerate(self.step_times()) if seconds is None and k != self.in_force]

    def step_times(self) -> list[float | None]:
        """Seconds of a step, for 0 drafts, 1, and so on; None: not known."""
        return [self._times.step_time(k, self.in_force) for k in range(self.max_drafts + 1)]

    # What it says.

    def report(self, every: float = 0.0) -> None:
        """Logs which K's were chosen since the last report, unless that is less than `every` seconds ago."""
        now, steps = self._clock(), self.chosen - self._reported
        if now - self._reported_at < every or not steps:
            return
        self._reported, self._reported_at = self.chosen.copy(), now
        shares = ", ".join(f"{k} in {count / steps.total():.0%}" for k, count in sorted(steps.items()))
        times = ", ".join("-" if took is None else f"{1000 * took:.2f}" for took in self.step_times())
        rates = ", ".join(f"{rate:.2f}" for rate in self.acceptance.overall)
        logger.info(
            "Adaptive drafts: %s of %d steps; now %d. A step takes %s ms with 0 drafts, 1 and so on; "
            "by position, %s of them are accepted where those before are.",
            shares,
            steps.total(),
            self.in_force,
            times,
            rates,
        )

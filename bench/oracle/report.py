"""What a run of the oracle found, in a form that programs read."""

from dataclasses import asdict, dataclass, field, fields
from typing import Any

TOLERANCES = {"float32": 2e-4, "bfloat16": 0.1}
"""How far an element may lie from the reference's, relative to the larger of one and its size; also how close the
reference's two best logits must be for either to do as the draft. Two float32 runs of the same sums differ by 1e-5; in
bfloat16 a module's keys and values are some 0.05 off, and those of a wrong token or another row by as much as they are
large."""

TOLERANCE = TOLERANCES["float32"]

ROUTING_TOLERANCES = {"float32": 2e-6, "bfloat16": 2e-2}
"""Two experts this close in the reference may be taken for each other: a big difference that means nothing."""

MAX_MISMATCHES = 20


@dataclass
class Events:
    """What the schedules made happen.

    Attributes:
        rejections: requests' passes, by the number of rejected drafts.
        partings: prefix hits of requests that were planned to have one, by how they part from the requests before them
            (`bench.oracle.prefixes`).
    """

    chunk_boundaries: int = 0
    rejections: dict[int, int] = field(default_factory=dict)
    partings: dict[str, int] = field(default_factory=dict)
    resets: int = 0
    grammar_cuts: int = 0
    preemptions: int = 0
    prefix_hits: int = 0
    prefix_hits_diverging: int = 0
    k_changes: int = 0
    k_zero: int = 0
    joins: int = 0
    leaves: int = 0
    aborts: int = 0
    stops: int = 0
    short_prompts: int = 0
    at_max_model_len: int = 0
    skipped_passes: int = 0
    replays: int = 0
    replays_uneven: int = 0


@dataclass
class Report:
    """Counts of one run.

    Attributes:
        rows_checked: one per module, row and pass.
        rows_mismatched: of those, the ones further off than `tolerance`, by module in `mismatched_by_module`.
        rows_open: rows that wait for a draft which the pass was not asked for; nothing says what they hold.
        rows_freed: rows outside a sliding window, whose blocks are no longer the request's.
        rows_unread: rows of prompts that no draft depends on, and that may have been left out.
        rows_unwritten: rows of requests whose hidden states the host kept from the drafter in an earlier step, or that
            reuse such a request's blocks: not checked.
        rows_excused: mismatches of requests where the engine took another of two equal experts (`ROUTING_TOLERANCES`).
        slots_checked: one per KV cache group of the proposer and row of the target (`bench/oracle/slots.py`).
        hits_mismatched: prefix hits of requests that may share nothing, since their salt is their own.
        drafts_unchecked: sampled drafts, and those beyond the last module without a reference for them.
        max_abs_error: over the rows of requests without a mismatch.
        max_target_error: over the target's hidden states, which the modules start from.
        mismatches: in words, the first of each schedule.
    """

    schedules: int = 0
    steps: int = 0
    passes: int = 0
    rows_checked: int = 0
    rows_mismatched: int = 0
    mismatched_by_module: dict[int, int] = field(default_factory=dict)
    rows_open: int = 0
    rows_freed: int = 0
    rows_unread: int = 0
    rows_unwritten: int = 0
    rows_excused: int = 0
    slots_checked: int = 0
    slots_mismatched: int = 0
    drafts_checked: int = 0
    drafts_mismatched: int = 0
    hits_mismatched: int = 0
    draft_ties: int = 0
    drafts_unchecked: int = 0
    max_abs_error: float = 0.0
    max_target_error: float = 0.0
    dtype: str = "float32"
    mismatches: list[str] = field(default_factory=list)
    events: Events = field(default_factory=Events)
    _described: bool = False

    @property
    def tolerance(self) -> float:
        return TOLERANCES[self.dtype]

    @property
    def clean(self) -> bool:
        wrong = (self.rows_mismatched, self.drafts_mismatched, self.slots_mismatched, self.hits_mismatched)
        return wrong == (0, 0, 0, 0)

    def note_slots(self, compared: int, wrong: int) -> None:
        """Counts slots of the target's rows that were compared with the host's, and those that differ."""
        self.slots_checked += compared
        self.slots_mismatched += wrong
        if wrong:
            self.note_mismatch(f"{wrong} of the {compared} slots of the target's rows in a step are not the host's.")

    def note_rejected(self, count: int, passes: int = 1) -> None:
        self.events.rejections[count] = self.events.rejections.get(count, 0) + passes

    def note_parting(self, kind: str, hits: int = 1) -> None:
        self.events.partings[kind] = self.events.partings.get(kind, 0) + hits

    def note_wrong_rows(self, module: int, count: int) -> None:
        self.rows_mismatched += count
        self.mismatched_by_module[module] = self.mismatched_by_module.get(module, 0) + count

    @property
    def first_mismatch(self) -> str | None:
        return self.mismatches[0] if self.mismatches else None

    def start_schedule(self) -> None:
        self._described = len(self.mismatches) == MAX_MISMATCHES

    @property
    def wants_words(self) -> bool:
        """Whether a mismatch would be put into words: the first of each schedule is, up to `MAX_MISMATCHES` of them."""
        return not self._described

    def note_mismatch(self, words: str) -> None:
        if self.wants_words:
            self.mismatches.append(words)
            self._described = True

    def add(self, other: dict[str, Any], words: str = "") -> None:
        """Adds another report, as `to_json` gives it; its mismatches begin with `words`."""
        for name in COUNTS:
            setattr(self, name, getattr(self, name) + other[name])
        for name in ("max_abs_error", "max_target_error"):
            setattr(self, name, max(getattr(self, name), other[name]))
        for name, count in other["events"].items():
            if name == "rejections":
                for rejected, passes in count.items():
                    self.note_rejected(int(rejected), passes)
            elif name == "partings":
                for kind, hits in count.items():
                    self.note_parting(kind, hits)
            else:
                setattr(self.events, name, getattr(self.events, name) + count)
        for module, count in other["mismatched_by_module"].items():
            self.mismatched_by_module[int(module)] = self.mismatched_by_module.get(int(module), 0) + count
        self.mismatches += [words + mismatch for mismatch in other["mismatches"]]
        del self.mismatches[MAX_MISMATCHES:]

    def to_json(self) -> dict[str, Any]:
        plain = asdict(self)
        del plain["_described"]
        plain["tolerance"] = self.tolerance
        plain["first_mismatch"] = self.first_mismatch
        plain["mismatched_by_module"] = dict(sorted(self.mismatched_by_module.items()))
        for name in ("rejections", "partings"):
            plain["events"][name] = dict(sorted(getattr(self.events, name).items()))
        return plain


COUNTS = tuple(item.name for item in fields(Report) if item.type is int)

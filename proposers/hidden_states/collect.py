"""Collects records of a data set: prompts and conversations, with a loss mask on what the assistant says.

Every line of the data has a record of its own number, and a line in `masks.jsonl` once its record is in place, so that
a collector that was broken off goes on where it stopped. What it was asked for stands in `collect.json`.
"""

import hashlib
import json
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tqdm import tqdm

from proposers.hidden_states.backends import Backend, Outcome, Request
from proposers.hidden_states.conversations import Lines, Renderer
from proposers.hidden_states.layout import SUFFIX
from proposers.hidden_states.masks import FILE as MASKS

PLAN, FAILURES = "collect.json", "failures.jsonl"
RECORDS_PER_FOLDER = 1000
# Lines that are looked at for an estimate.
SAMPLE = 2000
# What a token takes besides its rows: its id in the record, and its place in the mask.
TOKEN_BYTES = 10


@dataclass
class Report:
    """What came of it.

    Attributes:
        records, tokens: that are in place now, those of earlier runs among them.
        failures: how many of this run's lines have no record, by reason.
    """

    records: int = 0
    tokens: int = 0
    failures: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        lines = [f"{self.records} records, {self.tokens} tokens, {self.failures.total()} failures"]
        lines += [f"  {count} times: {reason}" for reason, count in self.failures.most_common(10)]
        return "\n".join(lines)


@dataclass(frozen=True)
class Task:
    """What is asked for, which a later run into the same folder has to ask for too.

    Attributes:
        data: the file's digest.
        layer_ids: None where the server, or the collector, chooses them.
        chat_template: its digest.
        max_tokens: of an answer, where one is wanted.
        fp8: records in eight bits.
    """

    model: str
    data: str
    layer_ids: Sequence[int] | None
    chat_template: str
    max_tokens: int
    fp8: bool = False

    def check(self, out: Path) -> None:
        """Raises `ValueError` where another task's records lie in the folder; writes it down where none do."""
        path, asked = out / PLAN, asdict(self)
        if path.is_file():
            before = json.loads(path.read_text())
            if other := [f"{key}={before.get(key)!r}" for key, value in asked.items() if before.get(key) != value]:
                raise ValueError(f"{out} has records of another task ({', '.join(other)}). Name another folder.")
        elif any(out.iterdir()):
            raise ValueError(f"{out} has something in it that no collector has written. Name another folder.")
        else:
            path.write_text(json.dumps(asked, indent=1) + "\n")


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def digest_of_file(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def name_of(number: int) -> str:
    """Of a line's record."""
    return f"{number // RECORDS_PER_FOLDER:06d}/{number:09d}"


class Collection:
    """The folder: what is in place, and what is still to come."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.report = Report()
        self.done: set[str] = set()
        whole = 0
        if (out / MASKS).is_file():
            with open(out / MASKS, "rb") as lines:
                for line in lines:
                    if not line.endswith(b"\n"):
                        break  # the run before was killed while it wrote it
                    whole += len(line)
                    entry = json.loads(line)
                    if entry["name"] not in self.done and (out / f"{entry['name']}{SUFFIX}").is_file():
                        self._count(entry["name"], entry["rows"])
        self._masks = open(out / MASKS, "ab")  # noqa: SIM115 (closed by close)
        self._masks.truncate(whole)
        self._failures = open(out / FAILURES, "w")  # noqa: SIM115

    def _count(self, name: str, rows: int) -> None:
        self.done.add(name)
        self.report.records += 1
        self.report.tokens += rows

    def add(self, outcome: Outcome) -> None:
        """Writes down that a record is in place."""
        request, answered = outcome.request, outcome.num_output_tokens
        mask = request.mask + [1] * answered if request.max_tokens > 1 else request.mask
        rows = len(request.token_ids) + (answered - 1 if request.max_tokens > 1 else 0)
        entry = {"name": request.name, "rows": rows, "loss_mask": mask}
        self._masks.write(json.dumps(entry, separators=(",", ":")).encode() + b"\n")
        self._masks.flush()
        self._count(request.name, rows)

    def fail(self, number: int, reason: str) -> None:
        self.report.failures[reason] += 1
        self._failures.write(json.dumps({"line": number, "reason": reason}) + "\n")
        self._failures.flush()

    def close(self) -> None:
        self._masks.close()
        self._failures.close()


class Collector:
    """Runs what is missing.

    Args:
        max_tokens: of an answer, where one is wanted.
    """

    def __init__(self, lines: Lines, renderer: Renderer, backend: Backend, out: Path, max_tokens: int) -> None:
        self._lines, self._renderer, self._backend, self._max_tokens = lines, renderer, backend, max_tokens
        self._collection = Collection(out)
        self._todo = [n for n in range(len(lines)) if name_of(n) not in self._collection.done]
        for number in self._todo:  # a record whose mask was not written any more
            (out / f"{name_of(number)}{SUFFIX}").unlink(missing_ok=True)

    def collect(self, check_space: bool = True) -> Report:
        """Collects, and returns what came of it.

        Raises:
            ValueError: the records won't fit on the disk, or a server's first answer has none.
        """
        collection = self._collection
        requests = self._requests()
        try:
            with tqdm(total=len(self._lines), initial=len(collection.done), unit="record") as self._bar:
                # A server says with its first record how large the others will be.
                while self._backend.row_bytes() is None and (first := next(requests, None)) is not None:
                    (outcome,) = self._backend.run(iter([first]))
                    if outcome.error is not None:
                        raise ValueError(f"Nothing is collected: {outcome.error}.")
                    self._settle(outcome)
                self._measure(check_space)
                for outcome in self._backend.run(requests):
                    self._settle(outcome)
        finally:
            collection.close()
        return collection.report

    def _requests(self) -> Iterator[Request]:
        for number, line in self._lines.read(self._todo):
            try:
                yield self._request(number, line)
            except ValueError as error:
                self._fail(number, str(error))

    def _request(self, number: int, line: bytes) -> Request:
        """Raises `ValueError` for a line that can't be run."""
        rendered = self._renderer.render(line)
        max_tokens = self._max_tokens if rendered.wants_answer else 1
        if len(rendered.token_ids) + max_tokens > self._backend.max_length:
            raise ValueError(f"the line and its answer may have more tokens than {self._backend.max_length}")
        return Request(number, name_of(number), rendered.token_ids, rendered.mask, max_tokens)

    def _settle(self, outcome: Outcome) -> None:
        if outcome.error is not None:
            self._fail(outcome.request.number, outcome.error)
            return
        self._collection.add(outcome)
        self._advance()

    def _fail(self, number: int, reason: str) -> None:
        self._collection.fail(number, reason)
        self._advance()

    def _advance(self) -> None:
        report = self._collection.report
        self._bar.update()
        self._bar.set_postfix(tokens=report.tokens, failures=report.failures.total())

    def _measure(self, check_space: bool) -> None:
        """Says how much the records will take, by lines of all parts of the data, and whether there is room for it."""
        todo = [number for number in self._todo if name_of(number) not in self._collection.done]
        row_bytes = self._backend.row_bytes()
        if row_bytes is None or not todo:
            return
        sample = todo[:: max(1, len(todo) // SAMPLE)]
        tokens = 0
        for number, line in self._lines.read(sample):
            with suppress(ValueError):
                request = self._request(number, line)
                tokens += len(request.token_ids) + request.max_tokens - 1
        tokens = tokens * len(todo) // len(sample)
        needed, free = tokens * (row_bytes + TOKEN_BYTES), shutil.disk_usage(self._collection.out).free
        tqdm.write(
            f"{len(todo)} records of at most {tokens} tokens, {row_bytes} bytes each: {needed / 1e9:.2f} GB of "
            f"{free / 1e9:.2f} GB that are free",
            file=sys.stderr,
        )
        if check_space and needed > free:
            raise ValueError(
                f"The records may take {needed / 1e9:.2f} GB and {self._collection.out} has {free / 1e9:.2f} GB: "
                "name a folder on another disk, take fewer layers, less data or --fp8, or collect --anyway."
            )

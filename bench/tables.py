"""Tables as text."""

from collections.abc import Sequence


def table(rows: Sequence[Sequence[str]]) -> str:
    """A table for a terminal: columns as wide as they need to be, and a rule below the first row."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "-" * len(max(lines, key=len)), *lines[1:]])


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown, whose head is the first row."""
    head, *lines = ("| " + " | ".join(row) + " |" for row in rows)
    return "\n".join([head, "|" + "---|" * len(rows[0]), *lines])

"""Lists of the tokens that a draft's heads score: read by an engine, and counted from text or records by a command.

    python -m proposers.draft_vocabulary --from FILES --size 32768 --model FOLDER --output vocabulary.json

A list is a JSON file: an array of token ids, or an object with them in `token_ids` and, if it was made by the command,
with `vocab_size` and `coverage`, the share of held-out tokens that the list has.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCHEMA = "vllm-mtp-proposers/draft-vocabulary/1"


@dataclass(frozen=True, slots=True)
class TokenList:
    """A list that fits a model.

    Attributes:
        token_ids: ascending, none twice.
        coverage: None where the file doesn't say it.
    """

    token_ids: list[int]
    coverage: float | None = None


def read(path: str, vocab_size: int, num_ranks: int = 1) -> TokenList:
    """Reads a list for a model of so many tokens, whose head so many ranks share.

    Raises:
        ValueError: there is no such file, it holds something else, or it is another model's.
    """
    where, remedy = f"draft_vocabulary={path!r}", "Make one by `python -m proposers.draft_vocabulary`."
    try:
        found = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{where} can't be read: {error}. {remedy}") from error
    described: dict[str, Any] = found if isinstance(found, dict) else {"token_ids": found}
    token_ids = described.get("token_ids")
    if not isinstance(token_ids, list) or not token_ids or not all(type(token) is int for token in token_ids):
        raise ValueError(f"{where} holds no token ids, as an array or in an object's token_ids. {remedy}")
    made_for = described.get("vocab_size", vocab_size)
    if made_for != vocab_size:
        raise ValueError(f"{where} is for a vocabulary of {made_for} tokens, and this model has {vocab_size}. {remedy}")
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        raise ValueError(
            f"{where} has token ids from {min(token_ids)} to {max(token_ids)}, and this model's go from 0 to "
            f"{vocab_size - 1}. {remedy}"
        )
    once = sorted(set(token_ids))
    if len(once) + -len(once) % num_ranks >= vocab_size:
        raise ValueError(
            f"{where} has {len(once)} tokens, and this model {vocab_size}: with a list as long as the vocabulary "
            "nothing is saved. Make a shorter one, or leave the option out."
        )
    coverage = described.get("coverage")
    return TokenList(once, float(coverage) if isinstance(coverage, int | float) else None)

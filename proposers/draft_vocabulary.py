"""Lists of the tokens that a draft's heads score: read by an engine, and counted from text or records by a command.

    python -m proposers.draft_vocabulary --from FILES --size 32768 --model FOLDER --output vocabulary.json

A list is a JSON file: an array of token ids, or an object with them in `token_ids` and, if it was made by the command,
with `vocab_size` and `coverage`, the share of held-out tokens that the list has.

A list has first the tokens that any text may need: special ones, those that were added to the tokenizer, and short ones
of ASCII without a letter (digits, brackets, blanks). Then those that were counted, the most frequent first. What is
left goes to the lowest ids: tokenizers number the merges of the most frequent pairs first.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCHEMA = "vllm-mtp-proposers/draft-vocabulary/1"
PIECE = 4096  # characters of a text, or tokens of a record, that are counted or held out together
HELD_OUT_ONE_IN = 10
STRUCTURAL_LENGTH = 4  # characters


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


# The command.


def pieces_of(sources: Iterable[Path], tokenizer: Any) -> Iterator[list[int]]:
    """Token ids of texts and of records of hidden states, in pieces.

    Args:
        sources: files and folders of them; records end in `.safetensors`.
    """
    for source in sources:
        for path in sorted(source.rglob("*")) if source.is_dir() else [source]:
            if path.suffix == ".safetensors":
                yield from _pieces_of_records(path)
            elif path.is_file():
                text = path.read_text(encoding="utf-8", errors="ignore")
                for first in range(0, len(text), PIECE):
                    yield tokenizer.encode(text[first : first + PIECE], add_special_tokens=False, verbose=False)


def _pieces_of_records(path: Path) -> Iterator[list[int]]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        names: list[str] = list(file.keys())
        for name in names:
            if name.endswith("token_ids"):  # of a shard, behind a record's name
                token_ids = file.get_tensor(name).tolist()
                yield from (token_ids[first : first + PIECE] for first in range(0, len(token_ids), PIECE))


def count(pieces: Iterable[list[int]]) -> tuple[Counter[int], Counter[int]]:
    """How often each token occurs, in most of the pieces and in those that are held out."""
    counted: Counter[int] = Counter()
    held_out: Counter[int] = Counter()
    for number, piece in enumerate(pieces, start=1):
        (counted if number % HELD_OUT_ONE_IN else held_out).update(piece)
    return counted, held_out


def needed_tokens(tokenizer: Any, config: dict[str, Any], vocab_size: int) -> set[int]:
    """Tokens that are in every list: special, added and structural ones."""
    needed = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = config.get(key)
        needed |= set(value) if isinstance(value, list) else {value}
    for token in range(min(vocab_size, len(tokenizer))):
        text = tokenizer.decode([token])
        if 0 < len(text) <= STRUCTURAL_LENGTH and text.isascii() and not any(map(str.isalpha, text)):
            needed.add(token)
    return {token for token in needed if isinstance(token, int) and 0 <= token < vocab_size}


def choose(counted: Counter[int], needed: set[int], size: int, vocab_size: int) -> list[int]:
    """The tokens of a list, ascending.

    Raises:
        ValueError: it would not be a part of the vocabulary, or has no room for what is needed.
    """
    if not len(needed) <= size < vocab_size:
        raise ValueError(
            f"--size is {size}; there are {vocab_size} tokens, of which {len(needed)} are in every list. Give a size "
            "between the two."
        )
    frequent = sorted(
        (token for token in counted if 0 <= token < vocab_size), key=lambda token: (-counted[token], token)
    )
    ordered = dict.fromkeys([*needed, *frequent, *range(vocab_size)])
    return sorted(list(ordered)[:size])


def coverage_of(token_ids: Iterable[int], held_out: Counter[int]) -> float | None:
    """The share of held-out tokens that the list has; None where none was held out."""
    total = held_out.total()
    return sum(held_out[token] for token in token_ids) / total if total else None


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m proposers.draft_vocabulary",
        description="Counts the tokens that drafts are to be out of, for the option draft_vocabulary.",
    )
    parser.add_argument(
        "--from",
        dest="sources",
        nargs="+",
        type=Path,
        required=True,
        help="texts like those to be served, records of hidden states (.safetensors), or folders of them",
    )
    parser.add_argument("--size", type=int, default=32768, help="tokens of the list")
    parser.add_argument("--model", type=Path, required=True, help="folder of the checkpoint with its tokenizer")
    parser.add_argument("--output", type=Path, help="file for the list; left out, only the coverage is printed")
    args = parser.parse_args(arguments)
    try:
        found = read_and_make(args.sources, args.size, args.model)
    except (OSError, ValueError) as error:
        print(f"python -m proposers.draft_vocabulary: {error}", file=sys.stderr)
        return 2
    if args.output:
        args.output.write_text(json.dumps(found))
    covered = "unknown: the text is too short" if found["coverage"] is None else f"{100 * found['coverage']:.2f} %"
    print(
        f"{args.size} of {found['vocab_size']} tokens, {found['counted']} counted; coverage of held-out text {covered}"
    )
    return 0


def read_and_make(sources: list[Path], size: int, model: Path) -> dict[str, Any]:
    """A list as its file has it, counted in these files by the tokenizer of a checkpoint's folder.

    Raises:
        OSError: a file can't be read.
        ValueError: there is no text, or no list of that size.
    """
    from transformers import AutoTokenizer

    missing = [str(source) for source in sources if not source.exists()]
    if missing:
        raise ValueError(f"--from names {', '.join(missing)}, which isn't there.")
    tokenizer = AutoTokenizer.from_pretrained(model)
    return make(pieces_of(sources, tokenizer), size, tokenizer, json.loads((model / "config.json").read_text()))


def make(pieces: Iterable[list[int]], size: int, tokenizer: Any, config: dict[str, Any]) -> dict[str, Any]:
    """A list as its file has it, for the model of this `config.json`. Raises `ValueError` as `read_and_make` does."""
    vocab_size = config.get("text_config", config)["vocab_size"]
    counted, held_out = count(pieces)
    if not counted:
        raise ValueError("--from has neither text nor records in it: give files like what is to be served.")
    token_ids = choose(counted, needed_tokens(tokenizer, config, vocab_size), size, vocab_size)
    return {
        "schema": SCHEMA,
        "vocab_size": vocab_size,
        "coverage": coverage_of(token_ids, held_out),
        "counted": counted.total(),
        "token_ids": token_ids,
    }


if __name__ == "__main__":
    sys.exit(main())

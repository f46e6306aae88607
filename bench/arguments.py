"""Options that several commands have, and how their values are read."""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path

from bench.reference import TINY_CHECKPOINTS


def numbers(text: str) -> list[int]:
    """Whole numbers, separated by commas."""
    return [int(part) for part in text.split(",")]


def parse_modes(text: str, known: Iterable[str]) -> list[str]:
    """Names of modes, separated by commas. Raises `ValueError` for one that isn't `known`."""
    modes = text.split(",")
    if unknown := set(modes) - set(known):
        raise ValueError(f"--modes has {', '.join(sorted(unknown))}; there are {', '.join(known)}.")
    return modes


def add_prompt_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompts", type=int, default=16, help="prompts per run, from the held-out files")
    parser.add_argument("--prompt-tokens", type=int, default=200)
    parser.add_argument("--output-tokens", type=int, default=96)


def add_architecture_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--architecture",
        choices=TINY_CHECKPOINTS,
        help="instead of a model: a tiny checkpoint of that architecture, which is written for the run",
    )


def add_engine_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--engine", type=json.loads, default={}, help="further engine arguments, as a JSON object")


def add_speculative_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--speculative-config", type=json.loads, default={}, help="further entries, as a JSON object")


def add_draft_vocabulary_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--draft-vocabulary",
        type=int,
        default=32768,
        metavar="TOKENS",
        help="that modes with cheap drafts score; where there are no more, three quarters of the vocabulary",
    )


def add_json_argument(parser: argparse.ArgumentParser, more: str = "") -> None:
    parser.add_argument("--json", type=Path, help="file for the result" + more)

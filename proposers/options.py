"""What users can choose in vLLM's `additional_config`, under `mtp_proposers`, and some of it in the environment."""

import os
from dataclasses import dataclass, fields
from typing import Any

KEY = "mtp_proposers"
WEIGHTS = ("fp8",)
FROM_ENVIRONMENT = {
    "draft_weights": "MTP_PROPOSERS_DRAFT_WEIGHTS",
    "draft_vocabulary": "MTP_PROPOSERS_DRAFT_VOCABULARY",
}
"""Variables that stand for options which `additional_config` doesn't have; empty ones stand for nothing."""


@dataclass(frozen=True, slots=True)
class Options:
    """The options of one engine.

    Attributes:
        captured_rows: the largest draft pass of a step with a prompt that is captured as a CUDA graph, in rows; 0: none
            is. Larger ones are run eagerly.
        adapt_drafts: the number of drafts of each step is chosen by measured step times and acceptance, from 0 to the
            configured number (`proposers/adaptive.py`).
        prefix_keys: keys of the prefix cache have the tokens that a draft's rows depend on, whoever drafts, and no hit
            loses its last block (`proposers/lookahead.py`).
        draft_weights: "fp8": the draft's linear layers and heads get weights of 8 bits; None: as they are loaded.
        draft_vocabulary: a file of the tokens that are drafted (`proposers/draft_vocabulary.py`); None: all.
    """

    captured_rows: int = 2048
    adapt_drafts: bool = False
    prefix_keys: bool = True
    draft_weights: str | None = None
    draft_vocabulary: str | None = None

    @classmethod
    def of(cls, vllm_config: Any) -> "Options":
        """Reads a configuration.

        Raises:
            ValueError: an option doesn't exist, or has a value that it can't have.
        """
        config = getattr(vllm_config, "additional_config", None)
        given = config.get(KEY, {}) if isinstance(config, dict) else {}
        known = [field.name for field in fields(cls)]
        if not isinstance(given, dict) or not set(given) <= set(known):
            raise ValueError(
                f"additional_config has {KEY}={given!r}: give a dictionary of options out of {', '.join(known)}, as in "
                f'{{"{KEY}": {{"captured_rows": 1024}}}}.'
            )
        chosen: dict[str, Any] = {
            name: value for name, variable in FROM_ENVIRONMENT.items() if (value := os.environ.get(variable))
        }
        options = cls(**(chosen | given))
        rows = options.captured_rows
        if isinstance(rows, bool) or not isinstance(rows, int) or rows < 0:
            raise ValueError(f"additional_config has captured_rows={rows!r}: give a number of rows, or 0 for none.")
        for name in ("adapt_drafts", "prefix_keys"):
            if not isinstance(value := getattr(options, name), bool):
                raise ValueError(f"additional_config has {name}={value!r}: give true or false.")
        if options.draft_weights not in (None, *WEIGHTS):
            raise ValueError(
                f"{KEY} has draft_weights={options.draft_weights!r}: give {' or '.join(WEIGHTS)}, or leave it out for "
                f"weights as they are loaded (additional_config, or {FROM_ENVIRONMENT['draft_weights']})."
            )
        if not isinstance(options.draft_vocabulary, str | None):
            raise ValueError(f"{KEY} has draft_vocabulary={options.draft_vocabulary!r}: give the path of a file.")
        return options

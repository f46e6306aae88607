"""Drafts that read weights of 8 bits and score a part of the vocabulary: their outputs, new weights, wrong options."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support import weights
from tests.support.engine_arguments import mtp
from tests.support.forked_engine import run

TINY_MIMO = str(Path("assets/tiny-mimo-v2").resolve())


def cheap(folder: Path, size: int = 600) -> dict[str, Any]:
    """Options of an engine whose drafts are out of the first tokens."""
    file = folder / "vocabulary.json"
    file.write_text(json.dumps({"token_ids": list(range(size)), "vocab_size": 1024, "coverage": 0.5}))
    return {"additional_config": {"mtp_proposers": {"draft_weights": "fp8", "draft_vocabulary": str(file)}}}


@pytest.mark.parametrize("which", ["draft", "target"])
def test_new_weights_are_made_cheap_as_the_first_ones_were(which: str, tmp_path: Path) -> None:
    engine = weights.ENGINE | mtp(3) | cheap(tmp_path)
    weights.assert_served_on(run(weights.updated, engine, which=which, max_tokens=24).value, which)

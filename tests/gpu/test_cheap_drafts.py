"""Cheap drafts in captured passes, by the kernel for products with weights of 8 bits."""

import json
from pathlib import Path

import pytest

from tests.gpu.test_weight_updates import CAPTURED
from tests.support import weights
from tests.support.forked_engine import run


@pytest.mark.parametrize("v2", [False, True], ids=["V1", "V2"])
@pytest.mark.parametrize("which", ["draft", "target"])
def test_captured_passes_with_cheap_drafts_serve_on_with_new_weights(which: str, v2: bool, tmp_path: Path) -> None:
    file = tmp_path / "vocabulary.json"
    file.write_text(json.dumps(list(range(600))))
    cheap = {"additional_config": {"mtp_proposers": {"draft_weights": "fp8", "draft_vocabulary": str(file)}}}
    value = run(weights.updated, CAPTURED | cheap | {"dtype": "bfloat16"}, v2=v2, which=which, max_tokens=40).value
    assert all(value[step]["replays"] > 0 for step in ("before", "noise", "after", "after again"))
    weights.assert_served_on(value, which)

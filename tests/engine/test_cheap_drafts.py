"""Drafts that read weights of 8 bits and score a part of the vocabulary: their outputs, new weights, wrong options."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.reference import dense_model
from bench.reference.dense import Reference
from tests.support import scenarios, weights
from tests.support.children import MIMO_V2, TINY, ChildFailedError
from tests.support.engine_arguments import mtp
from tests.support.forked_engine import run


def cheap(folder: Path, size: int = 600) -> dict[str, Any]:
    """Options of an engine whose drafts are out of the first tokens."""
    file = folder / "vocabulary.json"
    file.write_text(json.dumps({"token_ids": list(range(size)), "vocab_size": 1024, "coverage": 0.5}))
    return {"additional_config": {"mtp_proposers": {"draft_weights": "fp8", "draft_vocabulary": str(file)}}}


@pytest.mark.parametrize("which", ["draft", "target"])
def test_new_weights_are_made_cheap_as_the_first_ones_were(which: str, tmp_path: Path) -> None:
    engine = weights.ENGINE | mtp(3) | cheap(tmp_path)
    weights.assert_served_on(run(weights.updated, engine, which=which, max_tokens=24).value, which)


def test_a_copy_of_the_targets_head_is_made_again_with_the_target(tmp_path: Path) -> None:
    engine = {**weights.ENGINE, **mtp(3), **cheap(tmp_path), "model": str(MIMO_V2)}
    value = run(weights.updated, engine, which="target", max_tokens=24).value
    assert value["before"]["accepted"] > 0
    assert value["noise"]["tokens"] != value["before"]["tokens"]
    assert value["after"] == value["after again"] == value["before"]


def test_sampled_drafts_out_of_a_part_of_the_vocabulary_leave_the_distribution_as_it_is(tmp_path: Path) -> None:
    """The second token of a sampled output is the first that a draft stands for."""
    prompt, count, temperature = [301, 17, 45, 260, 33, 12], 1200, 1.0
    expected = distribution(prompt, temperature)
    likeliest = [pair for pair, _ in expected.most_common(25)]
    # The likeliest of the second tokens can't be drafted.
    second = Counter[int]()
    for (_, token), share in expected.items():
        second[token] += share
    left_out = {token for token, _ in second.most_common(2)}
    file = tmp_path / "vocabulary.json"
    file.write_text(json.dumps([token for token in range(1024) if token not in left_out]))
    engine = {
        **mtp(1, draft_sample_method="probabilistic"),
        "additional_config": {"mtp_proposers": {"draft_vocabulary": str(file)}},
        "max_num_seqs": 64,
    }
    outcome = run(scenarios.sampled, engine, prompt=prompt, count=count, temperature=temperature, max_tokens=2).value
    assert outcome["accepted"] > count / 20
    assert outcome["drafted"] > outcome["accepted"]
    got = Counter(map(tuple, outcome["tokens"]))
    cells = [(got[pair], expected[pair] * count) for pair in likeliest]
    cells.append((count - sum(n for n, _ in cells), count - sum(share for _, share in cells)))
    statistic = sum((n - share) ** 2 / share for n, share in cells)
    freedom = len(cells) - 1
    assert min(share for _, share in cells) > 5
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5


def distribution(prompt: list[int], temperature: float) -> Counter[tuple[int, int]]:
    """Of the first two tokens of an output, those that are likely enough to be of interest."""
    model = dense_model(Path(TINY))

    def after(tokens: list[int]) -> list[tuple[int, float]]:
        reference = Reference(model)
        reference.update(tokens, len(tokens) - 1)
        probs = (model.logits(reference.target_hidden()[-1:])[0] / temperature).softmax(-1)
        values, indices = torch.topk(probs, 30)
        return list(zip(indices.tolist(), values.tolist(), strict=True))

    found = Counter[tuple[int, int]]()
    for first, share in after(prompt):
        for second, of_it in after([*prompt, first]):
            found[first, second] = share * of_it
    return found


def test_an_engine_says_what_is_saved_and_refuses_what_it_cannot_use(tmp_path: Path) -> None:
    options = cheap(tmp_path)
    log = run(scenarios.random_prompts, {**mtp(1), **options, "model": str(MIMO_V2)}, vocab_size=1024).log
    assert "Drafts are out of 600 of 1024 tokens, 50.00 % of those counted." in log
    options["additional_config"]["mtp_proposers"]["draft_vocabulary"] = str(tmp_path / "no.json")
    with pytest.raises(ChildFailedError, match=r"no\.json' can't be read"):
        run(scenarios.random_prompts, {**mtp(1), **options}, vocab_size=1024)

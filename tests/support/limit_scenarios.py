"""Requests beside one that is longer than the draft may be, for `tests.support.forked_engine.run`."""

import json
from pathlib import Path
from typing import Any

from vllm import LLM

from bench.corpus import held_out_prompts
from tests.support.children import TINY
from tests.support.scenarios import greedy, metrics

SHORT, NUM_SHORT = 60, 4
MAX_TOKENS = 48


def write_shorter(folder: Path, max_position_embeddings: int) -> str:
    """The tiny model with another native length, and its path."""
    for file in Path(TINY).iterdir():
        if file.name != "config.json":
            (folder / file.name).symlink_to(file)
    config = json.loads(Path(TINY, "config.json").read_text())
    config |= {"max_position_embeddings": max_position_embeddings, "max_seq_len": max_position_embeddings}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def beside_a_long_one(llm: LLM, long: int) -> dict[str, Any]:
    """Short requests alone, a long one alone, and all in one batch: tokens, steps' drafts, and those accepted."""
    texts = held_out_prompts(llm.get_tokenizer(), NUM_SHORT + 1, long)
    shorts = [text[:SHORT] for text in texts[:NUM_SHORT]]
    return {
        "short": _generate(llm, shorts),
        "long": _generate(llm, texts[NUM_SHORT:]),
        "mixed": _generate(llm, [*shorts, texts[NUM_SHORT]]),
    }


def _generate(llm: LLM, prompts: list[list[int]]) -> dict[str, Any]:
    llm.reset_prefix_cache()
    before = metrics(llm)
    tokens = greedy(llm, prompts, MAX_TOKENS)
    after = metrics(llm)
    names = {"steps": "num_drafts", "drafted": "num_draft_tokens", "accepted": "num_accepted_tokens"}
    counted = {
        name: after.get(f"spec_decode_{key}", 0) - before.get(f"spec_decode_{key}", 0) for name, key in names.items()
    }
    return {"tokens": tokens, **counted}

"""Text that every Python installation has: the standard library's own sources.

`tools/train_tiny.py` trains on one part of it; the demo, the benchmarks and the tests take their prompts from the
other. Which part a file belongs to depends on its name alone, so it is the same on every machine and Python version.
"""

import functools
import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path

# Not every distribution ships these, and vendored or generated tables are poor text.
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "__pycache__"}
HELD_OUT_ONE_IN = 20


def is_held_out(relative_path: str) -> bool:
    """Whether the file is kept away from training."""
    return int(hashlib.sha256(relative_path.encode()).hexdigest(), 16) % HELD_OUT_ONE_IN == 0


def read_sources(*, held_out: bool, root: Path | None = None) -> Iterator[tuple[str, str]]:
    """Yields `(relative path, text)` of one part of the standard library, in the order of the paths."""
    root = root or Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if SKIPPED_FOLDERS.intersection(relative.parts) or is_held_out(relative.as_posix()) != held_out:
            continue
        text = path.read_text(encoding="utf-8", errors="ignore")
        if len(text) > 256:
            yield relative.as_posix(), text


def has_tokenizer(model: Path) -> bool:
    """Whether the folder of a checkpoint has one."""
    return (model / "tokenizer.json").is_file()


def held_out_prompts(tokenizer, count: int, num_tokens: int) -> list[list[int]]:
    """`count` different prompts of exactly `num_tokens` token ids each, cut out of held-out files.

    The cuts are spread over the files, so that no file gives two prompts before every file gave one.

    Raises:
        ValueError: the held-out text is too short for that many prompts.
    """
    # Not verbose: whole files are longer than the model takes, and prompts are cut out of them.
    encode = functools.partial(tokenizer.encode, add_special_tokens=False, verbose=False)
    streams = [encode(text) for _, text in read_sources(held_out=True)]
    prompts: list[list[int]] = []
    for cut in range(max(len(stream) // num_tokens for stream in streams)):
        for stream in streams:
            prompt = stream[cut * num_tokens : (cut + 1) * num_tokens]
            if len(prompt) == num_tokens:
                prompts.append(prompt)
            if len(prompts) == count:
                return prompts
    raise ValueError(
        f"The held-out files give {len(prompts)} prompts of {num_tokens} tokens, and {count} were asked for. "
        "Ask for fewer or shorter prompts."
    )

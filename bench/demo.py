"""A short comparison on the tiny model, with some text and what to try next: `make demo`."""

import argparse
from pathlib import Path

from bench import compare

TINY_MODEL = Path("assets/tiny-step3p5")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    compare.add_arguments(parser, model=str(TINY_MODEL))
    parser.set_defaults(
        json=Path("results/demo.json"),
        plot=Path("results/demo.png"),
        prompts=8,
        runs=2,
        engine={"enforce_eager": True},  # compiling would take longer than all the rest
    )


def run(args: argparse.Namespace) -> int:
    result = compare.compare(args)
    print(compare.format_table(result))
    compare.write_outputs(result, args)
    print(f"\nText that ours continued a held-out file with:\n  {result['text'].strip().splitlines()[0]!r}")
    print(
        f"\nThe record is in {args.json}, a plot in {args.plot}. To try next:\n"
        "  python -m bench compare --model assets/tiny-step3p5 --k 6 --batch 1,16\n"
        "  python -m bench compare --help\n"
        "  and README.md, for serving a model of your own."
    )
    return 0 if result["lossless"] else 1

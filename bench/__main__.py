"""`python -m bench COMMAND`: every measurement that the README quotes."""

import argparse
import sys

from bench import compare, cost, demo, extract, gpu, oracle

COMMANDS = {"compare": compare, "cost": cost, "demo": demo, "extract": extract, "gpu": gpu, "oracle": oracle}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    subparsers = parser.add_subparsers(dest="command", required=True)
    for name, module in COMMANDS.items():
        module.add_arguments(subparsers.add_parser(name, help=(module.__doc__ or "").splitlines()[0]))
    args = parser.parse_args()
    return COMMANDS[args.command].run(args)


if __name__ == "__main__":
    sys.exit(main())

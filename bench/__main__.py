"""`python -m bench COMMAND`: every measurement that the README quotes."""

import argparse
import sys

from bench import compare, cost, demo, extract, gpu, oracle, prefix, serve

COMMANDS = {
    "compare": compare,
    "cost": cost,
    "demo": demo,
    "extract": extract,
    "gpu": gpu,
    "oracle": oracle,
    "prefix": prefix,
    "serve": serve,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    subparsers = parser.add_subparsers(dest="command", required=True)
    for name, module in COMMANDS.items():
        summary = (module.__doc__ or "").splitlines()[0]
        module.add_arguments(
            subparsers.add_parser(name, help=summary, description=summary, formatter_class=WithDefaults)
        )
    args = parser.parse_args()
    try:
        return COMMANDS[args.command].run(args)
    except ValueError as error:  # arguments that don't fit together, or to the model
        print(f"python -m bench {args.command}: {error}", file=sys.stderr)
        return 2


class WithDefaults(argparse.ArgumentDefaultsHelpFormatter):
    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default in (None, False, {}) else super()._get_help_string(action)


if __name__ == "__main__":
    sys.exit(main())

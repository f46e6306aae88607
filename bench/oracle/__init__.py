"""`python -m bench oracle`: random schedules on the real engine, held against a dense reference after every pass."""

import argparse
import json
import sys
from pathlib import Path

from bench.environment import write_record

MODEL = Path(__file__).resolve().parents[2] / "assets" / "tiny-step3p5"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--schedules", type=int, default=200, help="random schedules of 10 to 60 steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the record there too")
    parser.add_argument(
        "--model", type=Path, default=MODEL, help="folder of a Step-3.5 checkpoint (default: %(default)s)"
    )
    parser.add_argument("--modules", type=int, help="check only that many modules, the first ones (default: all)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the engines")
    parser.add_argument("--graphs", action="store_true", help="record decode steps and passes as CUDA graphs")
    parser.add_argument(
        "--runner",
        choices=("v1", "v2"),
        default="v1",
        help="vLLM's model runner; v2 on the CPU by Triton's interpreter",
    )
    parser.add_argument("--setup", action="append", help="only engines of that name (repeatable)")


def run(args: argparse.Namespace) -> int:
    """Returns 0 where everything was right, 1 where anything wasn't."""
    import torch

    from bench.interpreter import choose_runner
    from bench.oracle.driver import run_schedules
    from bench.oracle.schedules import SETUPS

    if args.modules is not None and args.modules < 1:
        raise SystemExit(f"--modules={args.modules} would check nothing: give 1 or more.")
    choose_runner(args.runner)
    gpus = torch.cuda.device_count()
    fitting = [
        setup
        for setup in SETUPS
        if (not gpus or setup.ranks <= gpus)  # a rank needs a GPU of its own
        and (args.runner == "v1" or setup.v2)
        and (args.dtype == "float32" or setup.ranks == 1)
    ]
    setups = [setup for setup in fitting if not args.setup or setup.name in args.setup]
    if not setups:
        names = ", ".join(repr(setup.name) for setup in fitting)
        raise SystemExit(f"There is no engine called {args.setup}: choose from {names}.")
    record = run_schedules(
        args.model,
        args.schedules,
        args.seed,
        modules=args.modules,
        setups=setups,
        graphs=args.graphs,
        dtype=args.dtype,
        progress=True,
    )
    result = {"runner": args.runner} | record.to_json()
    print(json.dumps(result, indent=1))
    write_record(result, args.json)
    return 0 if record.clean else 1


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.oracle", description=__doc__)
    add_arguments(parser)
    return run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())

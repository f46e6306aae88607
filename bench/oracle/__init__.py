"""`python -m bench oracle`: random schedules on the real engine, held against a dense reference after every pass."""

import argparse
import importlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.arguments import add_architecture_argument
from bench.environment import describe_environment, write_record
from bench.oracle.schedules import BLOCK_SIZE, SETUPS, Setup
from bench.reference import TINY_CHECKPOINTS, TinyCheckpoint, architecture_of, count_modules

# Only a checkout has it: an installed package comes without a model.
TINY_MODEL = Path(__file__).resolve().parents[2] / "assets" / "tiny-step3p5"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--schedules", type=int, default=200, help="random schedules of 10 to 60 steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the report there too")
    parser.add_argument(
        "--model",
        type=Path,
        default=TINY_MODEL if TINY_MODEL.is_dir() else None,
        help="folder of a checkpoint whose architecture has a reference",
    )
    add_architecture_argument(parser)
    parser.add_argument(
        "--import",
        dest="imports",
        action="append",
        metavar="MODULE",
        help="a module to import first, which registers an architecture and its reference (repeatable)",
    )
    parser.add_argument("--modules", type=int, help="check only that many modules, the first ones (default: all)")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), help="of the engines (default: float32, where the model has it)"
    )
    parser.add_argument("--graphs", action="store_true", help="capture decode steps and passes as CUDA graphs")
    parser.add_argument(
        "--runner",
        choices=("v1", "v2"),
        default="v1",
        help="vLLM's model runner; v2 on the CPU by Triton's interpreter",
    )
    parser.add_argument("--setup", action="append", help="only engines of that name (repeatable)")


def run(args: argparse.Namespace) -> int:
    """Returns 0 where everything was right, 1 where anything wasn't.

    Raises:
        ValueError: there is no model, or arguments under which nothing would be checked.
    """
    from bench.interpreter import choose_runner, run_recurrent_states
    from bench.oracle.driver import run_schedules

    if args.modules is not None and args.modules < 1:
        raise ValueError(f"--modules={args.modules} would check nothing: give 1 or more.")
    with the_model(args) as model:
        tiny = TINY_CHECKPOINTS.get(args.architecture)
        args.dtype = args.dtype or (tiny.dtype if tiny else "float32")
        choose_runner(args.runner)
        if tiny and tiny.cached:
            run_recurrent_states()
        for module in args.imports or ():
            importlib.import_module(module)
        report = run_schedules(
            model,
            args.schedules,
            args.seed,
            modules=args.modules,
            setups=choose_setups(args, model),
            graphs=args.graphs,
            dtype=args.dtype,
            progress=True,
        )
        name = args.architecture or (model.name if model != TINY_MODEL else None)
        subject = {"architecture": name, "modules": count_modules(model)} if name else {}
    environment = describe_environment()
    device = {"device": environment["device"]} if environment["platform"] == "cuda" else {}
    result = {"runner": args.runner} | device | subject | report.to_json()
    print(json.dumps(result, indent=1))
    write_record(result, args.json)
    return 0 if report.clean else 1


@contextmanager
def the_model(args: argparse.Namespace) -> Iterator[Path]:
    """A context with the folder of the checkpoint that is asked for.

    Raises:
        ValueError: there is none, or no engine of this machine runs it rightly.
    """
    if args.architecture is None:
        yield checked_model(args.model)
        return
    import torch

    tiny = TINY_CHECKPOINTS[args.architecture]
    if tiny.latent and not torch.cuda.is_available():
        raise ValueError(
            f"--architecture {args.architecture} has latent attention, which vLLM's CPU build computes wrongly: keys "
            "aren't rotated past the first row. Run it where there is a GPU."
        )
    with TemporaryDirectory() as name:
        tiny.write(Path(name))
        yield Path(name)


def checked_model(model: Path | None) -> Path:
    """Raises `ValueError` where there is no checkpoint."""
    if model is None:
        raise ValueError(f"There is no model at {TINY_MODEL}, as there is in a checkout: give --model, a checkpoint.")
    if not (model / "config.json").is_file():
        raise ValueError(f"--model={model} is no folder with a config.json: give that of a checkpoint.")
    return model


def choose_setups(args: argparse.Namespace, model: Path) -> Sequence[Setup]:
    """The engines that are asked for and that the machine, the model, the runner and the dtype allow.

    Raises:
        ValueError: there are none.
    """
    import torch

    gpus = torch.cuda.device_count()
    tiny = TINY_CHECKPOINTS.get(args.architecture)
    fitting = [
        setup
        for setup in SETUPS
        if (not gpus or setup.ranks <= gpus)  # a rank needs a GPU of its own
        and (setup.v1 if args.runner == "v1" else setup.v2)
        and (args.dtype == "float32" or setup.ranks == 1)
        # The rows of an extractor are looked at by a hook, which a replay doesn't run.
        and not (args.graphs and (setup.extracts or setup.collects))
        and (gpus or setup.checkpoint != "narrow")
        and (setup.any_model or architecture_of(model) == setup.architecture)
        and not (tiny and tiny.recurrent and (setup.k_by_batch or setup.adaptive or not setup.hybrid))
        and not (tiny and tiny.recurrent and setup.prefixes and not tiny.cached)
    ]
    chosen = [setup for setup in fitting if not args.setup or setup.name in args.setup]
    if not chosen:
        names = ", ".join(repr(setup.name) for setup in fitting)
        raise ValueError(f"There is no engine called {args.setup}: choose from {names}.")
    chosen = [setup.for_modules(count_modules(model)) for setup in chosen]
    return [for_tiny(setup, tiny) for setup in chosen] if tiny else chosen


def for_tiny(setup: Setup, tiny: TinyCheckpoint) -> Setup:
    """The same for an engine of that checkpoint; with a crowd it still runs out of blocks."""
    fewest = -(-setup.max_model_len // BLOCK_SIZE) + 2
    num_blocks = max(fewest, int(setup.num_blocks * tiny.blocks)) if setup.crowd else setup.num_blocks
    return replace(setup, num_blocks=num_blocks, **tiny.setup)

"""`python -m proposers.hidden_states`: records on the command line."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from proposers.hidden_states.export import EXPORTERS, export
from proposers.hidden_states.masks import FILE, Masks
from proposers.hidden_states.record import RecordDataset


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m proposers.hidden_states", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    _add_export(commands)
    _add_collect(commands)
    args = parser.parse_args()
    try:
        status: int = args.run(args)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return status


def _add_export(commands: Any) -> None:
    command = commands.add_parser("export", help="write records in the layout of a trainer")
    command.set_defaults(run=_export)
    command.add_argument("--to", required=True, choices=EXPORTERS, help="who is to read them")
    command.add_argument("--records", required=True, type=Path, help="the storage root, or a folder in it")
    command.add_argument("--out", required=True, type=Path, help="the folder to write to")
    command.add_argument("--model", type=Path, help="the checkpoint, where the final norm has to be applied")
    command.add_argument("--masks", type=Path, help=f"loss masks; by default {FILE} beside the records, if it is there")


def _export(args: argparse.Namespace) -> int:
    if args.out.resolve().is_relative_to(args.records.resolve()):
        raise ValueError(f"{args.out} is under {args.records}, where it would be taken for records. Name another.")
    dataset = RecordDataset(args.records)
    path = args.masks or args.records / FILE
    masks = Masks.read(path) if args.masks or path.is_file() else None
    named = ((name, dataset[i]) for i, name in enumerate(dataset.names))
    count = export(named, args.to, args.out, args.model, masks)
    print(f"{count} records for {args.to} in {args.out}")
    return 0


def _add_collect(commands: Any) -> None:
    command = commands.add_parser("collect", help="run a data set and keep its hidden states, with loss masks")
    command.set_defaults(run=_collect)
    command.add_argument("--model", required=True, help="the checkpoint, for its tokenizer and the engine")
    command.add_argument(
        "--data", required=True, type=Path, help="JSON lines with messages, conversations, prompt or text"
    )
    command.add_argument("--out", required=True, type=Path, help="the folder of the records; again, to go on")
    command.add_argument("--server", help="URL of a server that runs it; by default an engine of the collector's own")
    command.add_argument("--layers", type=_layers, help="layer ids, by commas; by default EAGLE-3's and the last")
    command.add_argument("--chat-template", type=Path, help="a Jinja file in place of the model's template")
    command.add_argument("--max-tokens", type=int, default=512, help="of an answer, where one is wanted (%(default)s)")
    command.add_argument("--fp8", action="store_true", help="records in eight bits, of half the size")
    command.add_argument("--engine-args", type=json.loads, default={}, help="vLLM's, as a JSON object")
    command.add_argument("--anyway", action="store_true", help="even if the records may not fit on the disk")


def _layers(text: str) -> list[int]:
    return [int(layer) for layer in text.split(",")]


def _collect(args: argparse.Namespace) -> int:
    from proposers.hidden_states.backends import Backend, OwnEngine, Server
    from proposers.hidden_states.collect import Collector, Task, digest, digest_of_file
    from proposers.hidden_states.conversations import Lines, Renderer

    if args.server and (args.layers or args.engine_args or args.fp8):
        raise ValueError(
            "--layers, --fp8 and --engine-args are of an engine of the collector's own; a server has its own."
        )
    renderer = Renderer(args.model, args.chat_template.read_text() if args.chat_template else None)
    args.out.mkdir(parents=True, exist_ok=True)
    template = digest((renderer.chat_template or "").encode())
    Task(str(args.model), digest_of_file(args.data), args.layers, template, args.max_tokens, args.fp8).check(args.out)
    backend: Backend
    if args.server:
        backend = Server(args.server, args.out)
    else:
        backend = OwnEngine(args.model, args.layers, args.out, args.engine_args, args.fp8)
    report = Collector(Lines(args.data), renderer, backend, args.out, args.max_tokens).collect(not args.anyway)
    print(report)
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())

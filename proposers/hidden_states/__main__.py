"""`python -m proposers.hidden_states`: records on the command line."""

import argparse
import sys
from pathlib import Path

from proposers.hidden_states.export import EXPORTERS, export
from proposers.hidden_states.masks import FILE, Masks
from proposers.hidden_states.record import RecordDataset


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m proposers.hidden_states", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("export", help="write records in the layout of a trainer")
    command.add_argument("--to", required=True, choices=EXPORTERS, help="who is to read them")
    command.add_argument("--records", required=True, type=Path, help="the storage root, or a folder in it")
    command.add_argument("--out", required=True, type=Path, help="the folder to write to")
    command.add_argument("--model", type=Path, help="the checkpoint, where the final norm has to be applied")
    command.add_argument("--masks", type=Path, help=f"loss masks; by default {FILE} beside the records, if it is there")
    args = parser.parse_args()
    try:
        if args.out.resolve().is_relative_to(args.records.resolve()):
            raise ValueError(f"{args.out} is under {args.records}, where it would be taken for records. Name another.")
        dataset = RecordDataset(args.records)
        path = args.masks or args.records / FILE
        masks = Masks.read(path) if args.masks or path.is_file() else None
        named = ((name, dataset[i]) for i, name in enumerate(dataset.names))
        count = export(named, args.to, args.out, args.model, masks)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{count} records for {args.to} in {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

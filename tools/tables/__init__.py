"""The tables of the pages, from the records in bench/results: `python -m tools.tables`."""

"""Writes every table of the pages anew, and draws the README's picture: `python -m tools.tables`."""

from tools.tables import page
from tools.tables.picture import PICTURE, draw


def main() -> None:
    for name in page.PAGES:
        path = page.ROOT / name
        old = path.read_text()
        if (new := page.fill(old)) != old:
            path.write_text(new)
            print(f"{name}: written anew")
    draw(page.ROOT / PICTURE)


if __name__ == "__main__":
    main()

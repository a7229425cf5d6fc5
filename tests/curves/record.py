"""Record the curves again, or show the effect of a change. Without --write the records stay.

python -m tests.curves.record                     # old and new, for every curve
python -m tests.curves.record --write dropout     # curves whose name contains a word; written after they are shown
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from tests.curves.curves import COLUMNS, CURVES, FOLDER, Recorded, differences, train


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="parts of names; default: all curves")
    parser.add_argument("--write", action="store_true", help="replace the recorded files")
    options = parser.parse_args()
    names = [name for name in CURVES if not options.words or any(word in name for word in options.words)]
    if not names:
        parser.error(f"{' '.join(options.words)}: no curve of such a name. There are: {', '.join(CURVES)}")
    with tempfile.TemporaryDirectory() as folder:
        found = train(names, Path(folder))
    changed = 0
    for name, new in found.items():
        path = FOLDER / f"{name}.txt"
        old = path.read_text(encoding="utf-8") if path.exists() else None
        if old is None:
            print(f"{name}: new, {len(Recorded.parse(new).rows)} steps")
        elif lines := differences(old, new):
            print(f"{name}: {len(lines)} steps differ; {' '.join(COLUMNS)}")
            print(*(f"  {line}" for line in lines), sep="\n")
        else:
            print(f"{name}: unchanged")
        changed += old is None or bool(differences(old, new))
        if options.write:
            path.parent.mkdir(exist_ok=True)
            path.write_text(new, encoding="utf-8")
    print(f"{changed} of {len(names)} curves differ" + (", written" if options.write else ""))


if __name__ == "__main__":
    main()

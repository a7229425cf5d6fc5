"""Show the effect of a change on the recorded curves, or record them again. Without --write the record stays.

python -m tests.curves.record                     # every curve: its steps that differ, and a table of what moved
python -m tests.curves.record --write dropout     # curves with such a name; written after they are shown

docs/changelog.md has a row for each change that moved curves, with its reason.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from pathlib import Path

from tests.curves.curves import COLUMNS, CURVES, Recorded, differences, moved, read_recorded, train, write_recorded


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="regular expressions of names; default: all curves")
    parser.add_argument("--write", action="store_true", help="replace the recorded curves")
    options = parser.parse_args()
    names = [name for name in CURVES if not options.words or any(re.search(word, name) for word in options.words)]
    if not names:
        parser.error(f"{' '.join(options.words)}: no curve of such a name. There are: {', '.join(CURVES)}")
    with tempfile.TemporaryDirectory() as folder:
        found = train(names, Path(folder))
    recorded, rows = read_recorded(), []
    for name, new in found.items():
        old = recorded.get(name)
        if old is None:
            print(f"{name}: new, {len(Recorded.parse(new).rows)} steps")
        elif lines := differences(old, new):
            print(f"{name}: {len(lines)} steps differ; {' '.join(COLUMNS)}")
            print(*(f"  {line}" for line in lines), sep="\n")
            rows.append(moved(name, old, new))
    if rows:
        print("\n| curve | steps that differ | last loss before | after | change |\n| --- | --- | --- | --- | --- |")
        print(*rows, sep="\n")
    if options.write:
        write_recorded(recorded | found)
    changed = len(rows) + len(found.keys() - recorded.keys())
    print(f"{changed} of {len(names)} curves differ" + (", written" if options.write else ""))


if __name__ == "__main__":
    main()

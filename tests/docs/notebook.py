"""Run docs/notebook.ipynb, keep its outputs in it, and write docs/notebook.md, the same as a page of the site.

    python -m tests.docs.notebook           # in a folder without runs/notebook; two minutes on two cores

`--page` writes the page alone, from the outputs that are there.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
from contextlib import redirect_stdout
from typing import Any

from tests.support.paths import ROOT

NOTEBOOK, PAGE = ROOT / "docs/notebook.ipynb", ROOT / "docs/notebook.md"


def run(cells: list[dict[str, Any]]) -> None:
    """Run the code of all cells in one namespace and store each one's output and last value in it."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate((each for each in cells if each["cell_type"] == "code"), 1):
        tree = ast.parse("".join(cell["source"]))
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        with redirect_stdout(io.StringIO()) as printed:
            exec(compile(tree, "notebook", "exec"), names)
            value = eval(compile(ast.Expression(last.value), "notebook", "eval"), names) if last else None
        cell |= {"execution_count": number, "outputs": []}
        if text := printed.getvalue():
            cell["outputs"].append({"output_type": "stream", "name": "stdout", "text": text.splitlines(keepends=True)})
        if value is not None:
            data = {"text/plain": repr(value).splitlines(keepends=True)}
            result = {"output_type": "execute_result", "execution_count": number, "metadata": {}, "data": data}
            cell["outputs"].append(result)


def page(cells: list[dict[str, Any]]) -> str:
    """The cells as Markdown, each output below its code."""
    parts = []
    for cell in cells:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", []):
            text = "".join(output.get("text") or output["data"]["text/plain"]).rstrip()
            parts.append(f"```text\n{text}\n```")
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", action="store_true", help="from the outputs that are in the notebook")
    options = parser.parse_args()
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    if not options.page:
        run(notebook["cells"])
        NOTEBOOK.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    PAGE.write_text(page(notebook["cells"]), encoding="utf-8")


if __name__ == "__main__":
    main()

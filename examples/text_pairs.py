"""Pairs of texts that answer each other, taken from documents: a heading and its section, a docstring and its function.

    python examples/text_pairs.py OUT.jsonl FILE...

Each FILE is JSON lines (plain, .gz or .zst) with the keys `text` and `path`. A line of OUT has `query` and `positive`,
as `prepare` reads pairs. From Markdown and reStructuredText come "heading - page title" and the section of 50 to 400
words; from Python the first sentence of a docstring and the function without it, of 3 to 150 lines. A query that says
too little (fewer than four words), or that its answer contains word for word, is left out, and so is one that occurs
twice. At most four pairs come from a document.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from datasets import load_dataset

MAX_PAIRS = 4  # of a document
_HEADING = re.compile(r"^(#{1,4})\s+(.+?)\s*#*$|^(\S.*)\n(?:=|-|~|\^){3,}$", re.MULTILINE)
_FRONT = re.compile(r"\A---\n(.*?)^---$", re.DOTALL | re.MULTILINE)  # YAML front matter of a page
_TITLE = re.compile(r"^title: *[\"']?(.+?)[\"']? *$", re.MULTILINE)
_MARKUP = re.compile(r"`+|\*\*|\{#.*?\}|\[([^\]]*)\]\([^)]*\)|:[a-z:]+:`([^`<]*)[^`]*`|</?[a-z][^>]*>")


def sections(text: str) -> Iterator[tuple[str, str]]:
    """Yield (heading - page title, text) of each section; front matter is skipped, but may give the title."""
    front = _FRONT.match(text)
    named = _TITLE.search(front[1]) if front else None
    text = text[front.end() :] if front else text
    headings = list(_HEADING.finditer(text))
    titles = [_MARKUP.sub(r"\1\2", each[2] or each[3]).strip() for each in headings]
    page = named[1] if named else titles[0] if titles else ""
    ends = [each.start() for each in headings[1:]] + [len(text)]
    for title, each, end in zip(titles, headings, ends, strict=False):
        answer = text[each.end() : end].strip()
        if title != page and any(map(str.isalpha, title)) and 50 <= len(answer.split()) <= 400:
            yield f"{title} - {page}", answer


def functions(text: str) -> Iterator[tuple[str, str]]:
    """Yield (first sentence of the docstring, the function without it) for each function of a Python file."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return
    lines = text.splitlines()
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        docstring, first = ast.get_docstring(node), node.body[0]
        if not docstring or first.end_lineno is None or node.end_lineno is None or len(node.body) < 2:
            continue
        code = lines[node.lineno - 1 : first.lineno - 1] + lines[first.end_lineno : node.end_lineno]
        if 3 <= len(code) <= 150:
            sentence = re.split(r"(?<=[.!?])\s|\n\s*\n", docstring.strip(), maxsplit=1)[0]
            yield " ".join(sentence.split()), "\n".join(code)


def pairs(text: str, path: str) -> Iterator[tuple[str, str]]:
    """Yield at most `MAX_PAIRS` pairs of a document, spread over it."""
    kind = Path(path.partition("#")[0]).suffix
    candidates = (
        functions(text) if kind == ".py" else sections(text) if kind in (".md", ".rst", ".txt", ".mdx") else iter(())
    )
    good = [
        (query, answer)
        for query, answer in candidates
        if len(query.split()) > 3 and query.lower() not in answer.lower()
    ]
    yield from good[:: max(1, len(good) // MAX_PAIRS)][:MAX_PAIRS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT.jsonl")
    parser.add_argument("files", nargs="+", metavar="FILE")
    asked = parser.parse_args()
    documents = load_dataset("json", data_files=asked.files, split="train", streaming=True)
    rows = [(query, answer) for each in documents for query, answer in pairs(each["text"], each["path"])]
    times = Counter(query for query, _ in rows)
    kept = [(query, answer) for query, answer in rows if times[query] == 1]
    with asked.out.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"query": query, "positive": answer}) + "\n" for query, answer in kept)
    print(f"{asked.out}: {len(kept):,} pairs; {len(rows) - len(kept):,} left out whose query occurs twice")


if __name__ == "__main__":
    main()

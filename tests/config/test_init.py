"""`init`: a starting file must be complete, explain its keys, and train the same as the recipe."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from modernbert_train.cli.before import STARTING_POINTS
from modernbert_train.config.read_yaml import INCLUDE, read_yaml
from modernbert_train.config.tools.merge_yaml import starting_point
from tests.support.verbs import Says

YAMLS = Path(__file__).parents[2] / "yamls"
INCLUDING = [file for file in sorted(YAMLS.rglob("*.yaml")) if f"\n{INCLUDE}:" in file.read_text()]


@pytest.mark.runs
@pytest.mark.parametrize("file", INCLUDING, ids=lambda file: str(file.relative_to(YAMLS)))
def test_one_file_contains_several(file: Path, tmp_path: Path) -> None:
    """A user of a wheel lacks the checkout whose files a recipe could include."""
    one = tmp_path / "one.yaml"
    one.write_text(starting_point(file))
    errors: list[str] = []
    tree = read_yaml(one, {}, errors)
    assert tree == read_yaml(file, {}, errors) and INCLUDE not in tree and not errors
    assert one.read_text().count("#") >= file.read_text().count("#")


def test_comments_and_order_survive_and_the_later_file_wins(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(
        "# of the base\n\nmodel: # which\n  width: 8 # wide\nphases:\n  one: {tokens: 1}\n"
    )
    (tmp_path / "mine.yaml").write_text(
        "# mine\n\ninclude: base.yaml\nmodel:\n  # deep\n  depth: 2\n  width: 9\nphases:\n  two:\n    - a list\n"
    )
    assert starting_point(tmp_path / "mine.yaml") == (
        "# mine\n\nmodel: # which\n  width: 9\n  # deep\n  depth: 2\n"
        "phases:\n  one: {tokens: 1}\n  two:\n    - a list\n"
    )


def test_braces_become_lines_where_two_files_say_something_of_a_section(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("model: {width: 8, depth: 1} # small\n")
    (tmp_path / "mine.yaml").write_text("# mine\ninclude: base.yaml\nmodel:\n  depth: 2 # deep\n")
    assert starting_point(tmp_path / "mine.yaml") == "# mine\nmodel: # small\n  width: 8\n  depth: 2 # deep\n"


def test_what_cannot_be_put_together_as_text_is_written_without_comments(tmp_path: Path) -> None:
    """For quoted keys: wrong values would be worse than missing comments."""
    (tmp_path / "base.yaml").write_text("model: # which\n  'width': 8\n")
    (tmp_path / "mine.yaml").write_text("# mine\ninclude: base.yaml\nmodel:\n  depth: 2 # deep\n")
    assert starting_point(tmp_path / "mine.yaml") == "# mine\n\nmodel:\n  width: 8\n  depth: 2\n"


def test_a_command_in_the_head_of_a_recipe_prints_the_file_that_it_means(says: Says) -> None:
    """A user of a wheel has no other way to the sources of Ettin's settings."""
    (named,) = re.findall(r"modernbert-train (init recipe \S+/\S+)", says("init", "recipe", "ettin-17m"))
    assert "arXiv 2507.11412" in says(*named.split())


def test_names_are_listed_and_an_unknown_one_is_answered(says: Says) -> None:
    for kind, folder in STARTING_POINTS.items():
        names = says("init", kind).split()
        assert names == sorted(path.stem for path in (YAMLS / folder).glob("*.yaml"))
        assert says("init", kind, names[0])
    said = says("init", "recipe", "modernbert-huge", code=78)
    assert "Known: adapt-decoder, adapt-minilm, albert-base, bert-base" in said

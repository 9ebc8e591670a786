"""Planted defects (tests/defects): every entry fits the code of today, and names tests that there are."""

from __future__ import annotations

import ast
import collections
import functools
from pathlib import Path

import pytest

pytest.importorskip("tomllib")  # Python 3.11 and later
from defects import plant

ROOT = Path(__file__).parents[1]


@functools.cache
def functions(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def is_there(test: str) -> bool:
    file, _, name = test.partition("::")
    return (ROOT / file).is_file() and (not name or name.partition("[")[0].split("::")[-1] in functions(file))


@pytest.mark.parametrize("defect", plant.defects(), ids=lambda each: each.id)
def test_a_defect_can_be_planted_once_and_changes_its_file(defect):
    text = (ROOT / defect.file).read_text()
    assert defect.planted(text) != text
    assert defect.kind in plant.KINDS and defect.where in plant.WHERE
    assert [test for test in (*defect.tests, *filter(None, [defect.caught_by])) if not is_there(test)] == []


def test_there_are_ten_of_each_kind_and_all_have_names_of_their_own():
    every = plant.defects()
    assert collections.Counter(each.kind for each in every) == dict.fromkeys(plant.KINDS, 10)
    assert len({each.id for each in every}) == len(every)


def test_the_suites_name_tests_that_there_are():
    assert [test for tests in plant.suites().values() for test in tests if not is_there(test)] == []

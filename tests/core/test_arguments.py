"""Each kind of argument has one check and one text, and an option class refuses what its fields declare."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

import geartrain as gt
from geartrain import rpc
from geartrain.core.arguments import (
    FLAG,
    SEED,
    Options,
    at_most_one,
    check_array,
    check_calls,
    check_names_of,
    check_pair,
    check_path,
    check_real,
    check_whole,
    checked,
    leave_out,
    optional,
)
from geartrain.errors import ArgumentError


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: check_whole("n", 1.5, 1, 8), "n must be a whole number, found 1.5"),
        (lambda: check_whole("n", True), "n must be a whole number, found True"),
        (lambda: check_whole("n", 0, 1, 8), "n must be from 1 to 8, found 0"),
        (lambda: check_whole("n", 0, 1, 2**32), "n must be at least 1, found 0"),
        (lambda: check_whole("n", 2**33, 1, 2**32), "n must be from 1 to 4294967296, found 8589934592"),
        (lambda: check_real("x", "1"), "x must be a finite number, found '1'"),
        (lambda: check_real("x", 2, 0, 1), "x must be a finite number from 0 to 1, found 2"),
        (lambda: check_real("x", 0, None, 9, above=0), "x must be a finite number above 0 and at most 9, found 0"),
        (lambda: SEED("seed", -1), "seed must be at least 0, found -1"),
        (lambda: check_names_of("fields", "obs"), "fields is a list of names, found 'obs'"),
        (lambda: check_names_of("fields", ["obs", 1]), "fields is a list of names, found 1"),
        (lambda: check_names_of("fields", []), "fields names each field once, and at least one; found []"),
        (lambda: check_array("rows are (n, 2)", np.zeros(3), (-1, 2)), "rows are (n, 2), found float64 (3,)"),
        (lambda: check_calls("a run has log", 3, "log"), "a run has log, found 3"),
        (lambda: leave_out("a view has its own", pad="left", window=None, whole=True),
         "a view has its own: leave out pad='left' and whole"),
        (lambda: leave_out("no windows", ends=np.zeros(2)), "no windows: leave out ends"),
        (lambda: at_most_one(group=1, mesh=2, other=None), "group and mesh exclude each other: give one of them"),
        (lambda: check_pair("--env", "A"), "--env takes NAME=VALUE, found 'A'"),
        (lambda: check_pair("--env", "A="), "--env takes NAME=VALUE, found 'A='"),
        (lambda: check_path("to", 3), "to is a path, found 3"),
        (lambda: check_path("to", "a\0"), "to must be a path that is not empty and has no zero byte, found 'a\\x00'"),
        (lambda: check_path("to", "x" * 256), "to has a name of 256 bytes, and file systems take at most 255: shorten "
         f"it, found '{'x' * 79}... (258 characters)"),
    ],
)  # fmt: skip
def test_each_kind_has_one_text(call: Callable[[], object], text: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{re.escape(text)}$"):
        call()


def test_checks_return_what_was_given_as_its_kind() -> None:
    assert type(check_whole("n", np.uint8(3), 1, 8)) is int
    assert type(check_real("x", np.float32(0.5), 0, 1)) is float
    assert optional(check_whole, "n", None, 1) is None and optional(check_whole, "n", 2, 1) == 2
    assert check_names_of("fields", [], empty=True) == ()
    assert check_pair("--env", "A=", empty=True) == ("A", "") and check_pair("--env", "A=b=c") == ("A", "b=c")
    leave_out("nothing is given", a=None, b=False, c=())


@dataclass(frozen=True)
class Rare(Options):
    size: int = field(default=1, metadata=checked(check_whole, 1, 8))
    limit: int | None = field(default=None, metadata=checked(check_whole, 1, 8))
    flag: bool = field(default=False, metadata=FLAG)


def test_an_option_class_checks_what_its_fields_declare() -> None:
    assert Rare(np.int64(2), None, np.True_) == Rare(2, None, True)  # type: ignore[arg-type]
    for wrong, text in (({"size": None}, "size must be a whole"), ({"limit": 9}, "limit must be from 1 to 8, found 9")):
        with pytest.raises(ArgumentError, match=text):
            Rare(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("made", "wrong"),
    [
        (gt.ReplayOptions, {"threads": 0}),
        (gt.ReplayOptions, {"pad": "middle"}),
        (rpc.NodeOptions, {"peer_timeout_s": -1}),
        (rpc.NodeOptions, {"spin_us": -1}),
        (rpc.NodeOptions, {"views": 3}),
        (rpc.NodeOptions, {"limits": 3}),
        (rpc.NodeOptions, {"advertise": "10.0.0.1"}),
    ],
)
def test_an_option_is_refused_by_its_class_and_not_only_by_its_user(made: Any, wrong: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=next(iter(wrong))):
        made(**wrong)

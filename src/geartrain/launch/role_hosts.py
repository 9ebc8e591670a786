"""Resolves the hosts that a role names, for a job with a given number of hosts.

A role names its hosts by a list of terms, separated by commas:

    all         every host
    first       host 0
    3           host 3, counted from 0
    0-3         hosts 0 to 3
    4-          host 4 and all after it
    simulators  a class of hosts, which the job defines (`Job.hosts`) by the terms above
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from geartrain.core.arguments import check_type, shown
from geartrain.errors import ArgumentError

#: Hosts of a role or a class: terms, or a list of host numbers.
HostTerms = str | Sequence[int]

_RANGE = re.compile(r"(\d{1,6})(?:(-)(\d{1,6})?)?")
_CLASS = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")
_ALL = ("all", "first")


def check_terms(about: str, given: Any) -> str:
    """Terms as one string, with a list of numbers as its terms.

    Raises:
        ArgumentError: they are no terms.
    """
    if isinstance(given, Sequence) and not isinstance(given, str):
        if not given or not all(type(each) is int and each >= 0 for each in given):
            raise ArgumentError(f"{about}: hosts is a list of host numbers, from 0 on, found {given!r}")
        given = ",".join(map(str, given))
    wanted = "'all', 'first', ranges such as '0-3,6-' or a class of hosts, as a string, or a list of host numbers"
    check_type(f"{about}: hosts is {wanted}", given, str)
    terms = [term.strip() for term in given.split(",")]
    for term in terms:
        found = _RANGE.fullmatch(term)
        if found is None and not _CLASS.fullmatch(term):
            raise ArgumentError(
                f"{about}: hosts is made of 'all', 'first', ranges such as '0-3' or '4-', and classes of hosts, found "
                f"{shown(term)} in {shown(given)}"
            )
        if found is not None and found[3] and int(found[3]) < int(found[1]):
            raise ArgumentError(f"{about}: hosts {term} ends before it begins")
    return ",".join(terms)


def check_classes(about: str, classes: Any) -> dict[str, str]:
    """A job's classes of hosts, as terms by name.

    Raises:
        ArgumentError: a name is no plain word, or the terms are none or name another class.
    """
    told = (
        "a table of classes of hosts, such as simulators = '2-' (how many there are is said when the job is launched)"
    )
    check_type(f"{about}: hosts is {told}", classes, Mapping)
    checked = {}
    for name, terms in classes.items():
        if not isinstance(name, str) or not _CLASS.fullmatch(name) or name in _ALL:
            raise ArgumentError(f"{about}: a class of hosts has a plain word as its name, found {name!r}")
        checked[name] = check_terms(f"{about}: class {name!r}", terms)
        if others := class_names(checked[name]):
            raise ArgumentError(f"{about}: class {name!r} is made of host numbers, found {', '.join(others)}")
    return checked


def class_names(terms: str) -> list[str]:
    """The classes that terms name."""
    return [term for term in terms.split(",") if term not in _ALL and not _RANGE.fullmatch(term)]


def resolve_hosts(about: str, terms: str, classes: Mapping[str, str], hosts: int) -> tuple[int, ...]:
    """The hosts that terms name, in order, of a job on `hosts` hosts.

    Raises:
        ArgumentError: a term names a host that the job does not have, or a class that is not defined.

    Example:
        >>> resolve_hosts("role 'actor'", "simulators", {"simulators": "0,2-"}, 5)
        (0, 2, 3, 4)
    """
    found: set[int] = set()
    for term in terms.split(","):
        if term in _ALL:
            found |= set(range(hosts if term == "all" else 1))
        elif (spanned := _RANGE.fullmatch(term)) is not None:
            first = int(spanned[1])
            last = int(spanned[3]) if spanned[3] else max(first, hosts - 1) if spanned[2] else first
            if last >= hosts:
                ends = f"0 to {hosts - 1}" if hosts > 1 else "0 alone"
                raise ArgumentError(f"{about} is to run on hosts {term}, and this job has hosts {ends}")
            found |= set(range(first, last + 1))
        else:
            if term not in classes:
                known = ", ".join(sorted(classes)) or "none"
                raise ArgumentError(f"{about}: there is no class of hosts {term!r}; the job defines {known}")
            found |= set(resolve_hosts(f"{about} (class {term!r})", classes[term], {}, hosts))
    return tuple(sorted(found))


__all__ = ["HostTerms", "check_classes", "check_terms", "class_names", "resolve_hosts"]

"""Screen of `geartrain top`: its state, its keys, and its lines for a terminal of any size.

1-7 or Tab  one section, 0 all      up, down  choose a line        Enter  all of it, Esc back
s, S        sort by another column  r         the other way round  p      pause        q  quit
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from geartrain.core.printable import printable
from geartrain.tools.watch.causes import Diagnosis
from geartrain.tools.watch.sections import Column, Line, Section, sections_of, size

HELP = "1-7 section, 0 all, up/down, Enter all of a line, Esc back, s sort, r reverse, p pause, q quit"
_STYLES = {"stopped": "bold red", "lost": "red", "waits": "yellow", "note": "dim"}
_GAP = "  "


@dataclass
class Screen:
    """What is shown: newest snapshots, and what keys have chosen."""

    snapshots: Sequence[Mapping[str, Any]] = ()
    findings: Sequence[Diagnosis] = ()
    missing: Sequence[str] = ()  # hosts that could not be reached, and why
    names: Sequence[str] = ()  # only lines in which one of these stands; all without any
    section: int | None = None  # None: all of them
    cursor: int = 0
    dive: bool = False
    scroll: int = 0
    paused: bool = False
    sorting: dict[int, tuple[int, bool]] = field(default_factory=dict)  # section -> column, descending

    def update(
        self, snapshots: Sequence[Mapping[str, Any]], findings: Sequence[Diagnosis], missing: Sequence[str]
    ) -> None:
        """Newer snapshots."""
        if not self.paused:
            self.snapshots, self.findings, self.missing = snapshots, findings, missing

    def press(self, key: str) -> bool:
        """Handles a key; False for the keys that end the screen."""
        if key in ("q", "Q", "ctrl-d"):
            return False
        if key == "p":
            self.paused = not self.paused
        elif key in "01234567" and len(key) == 1:
            self._show(None if key == "0" else int(key) - 1)
        elif key == "tab":
            self._show(0 if self.section is None else self.section + 1 if self.section < 6 else None)
        elif key in ("up", "k"):
            self.cursor, self.scroll = max(0, self.cursor - 1), max(0, self.scroll - 1)
        elif key in ("down", "j"):
            self.cursor, self.scroll = self.cursor + 1, self.scroll + 1
        elif key == "enter" and self.section is not None:
            self.dive, self.scroll = True, 0
        elif key in ("esc", "backspace"):
            if self.dive:
                self.dive = False
            else:
                self._show(None)
        elif key in ("s", "S", "r") and self.section is not None and self.snapshots:
            columns = len(sections_of(self.snapshots, self.names)[self.section].columns)
            column, descending = self.sorting.get(self.section, (0, False))
            if key == "r":
                self.sorting[self.section] = (column, not descending)
            else:
                column = (column + (1 if key == "s" else -1)) % columns
                self.sorting[self.section] = (column, column != 0)
        return True

    def _show(self, section: int | None) -> None:
        self.section, self.cursor, self.dive, self.scroll = section, 0, False, 0

    # --- lines ------------------------------------------------------------------------------------------------

    def lines(self, width: int, height: int) -> list[Text]:
        """At most `height` lines of at most `width` cells."""
        if not self.snapshots:
            return [_fit("reading ...", width)][:height]
        sections = sections_of(self.snapshots, self.names)
        head = [self._head(width)]
        rest = max(0, height - len(head) - 1)
        if self.dive and self.section is not None:
            body = self._detail(sections[self.section], width, rest)
        elif self.section is not None:
            found = self._findings(width, max(1, rest // 4))
            body = found + self._table(self.section, sections[self.section], width, rest - len(found))
        else:
            body = self._findings(width, max(2, rest // 3))
            filled = [(i, each) for i, each in enumerate(sections) if each.lines]
            for left, (number, section) in zip(range(len(filled), 0, -1), filled, strict=True):
                body += self._table(number, section, width, max(0, rest - len(body)) // left)
        body = body[:rest] + [Text()] * (rest - len(body))
        return [*head, *body, _fit(HELP, width, "reverse dim")][:height]

    def _head(self, width: int) -> Text:
        hosts = self.snapshots
        shm = hosts[0]["shm"]
        used = sum(each["shm"]["bytes"] - each["shm"]["free_bytes"] for each in hosts)
        what = hosts[0]["host"] if len(hosts) == 1 else f"{len(hosts)} hosts"
        at = time.strftime("%H:%M:%S", time.localtime(max(each["at_s"] for each in hosts)))
        paused = "PAUSED  " if self.paused else ""
        room = f"{shm['directory']} {size(used)} of {size(sum(each['shm']['bytes'] for each in hosts))}"
        missing = "".join(f"  no answer: {each}" for each in self.missing)
        left_out = sum(each.get("left_out", 0) for host in hosts for each in host["processes"])
        beyond = f"  objects that reports have no room for: {left_out}" if left_out else ""
        only = f"  only {', '.join(self.names)}" if self.names else ""
        return _fit(f"{paused}geartrain top{only}  {what}  {at}  {room}{missing}{beyond}", width, "reverse")

    def _findings(self, width: int, height: int) -> list[Text]:
        if not self.findings:
            return [_fit("nothing is stopped, and nothing waits", width, "green")]
        many = len(self.snapshots) > 1
        lines: list[Text] = []
        for finding in self.findings:
            where = f"{finding.host}: " if many and finding.host else ""
            cause = "" if not finding.cause or finding.level == "stopped" else f"; cause: {', '.join(finding.cause)}"
            wrapped = _wrap(f"! {where}{finding.text}{cause}", width)
            lines += [_fit(each, width, _STYLES[finding.level]) for each in wrapped]
        if len(lines) > height:
            lines = [*lines[: max(0, height - 1)], _fit(f"and more: {len(self.findings)} findings", width, "dim")]
        return lines

    def _table(self, number: int, section: Section, width: int, height: int) -> list[Text]:
        if height <= 0:
            return []
        column, descending = self.sorting.get(number, (0, False))
        lines = section.sorted(column, descending)
        title = _fit(f"{number + 1} {section.title} ({len(lines)})", width, "bold cyan")
        chosen = self.section == number
        if chosen:
            self.cursor = max(0, min(self.cursor, len(lines) - 1))
        head = 2 if height > 2 else 1  # without the names of columns where there is room for one of both
        room = max(0, height - head)
        first = max(0, self.cursor - room + 1) if chosen else 0
        shown = lines[first : first + room]
        columns = _columns(section.columns, lines[:200], column, width)
        heading = _GAP.join(
            _cell(
                section.columns[at].name + (("▼" if descending else "▲") if at == column and chosen else ""),
                wide,
                section.columns[at].right,
            )
            for at, wide in columns
        )
        made = [title, _fit(heading, width, "dim")][:head]
        for number_shown, line in enumerate(shown):
            row = _GAP.join(
                _cell(section.columns[at].show(line.values[at]), wide, section.columns[at].right)
                for at, wide in columns
            )
            here = chosen and first + number_shown == self.cursor
            made.append(_fit(row, width, f"{line.style} reverse" if here else line.style))
        if len(lines) > first + len(shown) and made and room:
            made[-1] = _fit(f"... {len(lines) - first - len(shown) + 1} more", width, "dim")
        return made[:height]

    def _detail(self, section: Section, width: int, height: int) -> list[Text]:
        column, descending = self.sorting.get(self.section or 0, (0, False))
        lines = section.sorted(column, descending)
        if not lines:
            return [_fit("it is gone", width)]
        line = lines[min(self.cursor, len(lines) - 1)]
        shown = [_fit(f"{section.title}: {text_of(line)}", width, "bold cyan")]
        entries = [
            _fit(part, width) for name, value in flat(line.detail) for part in _wrap(f"{name:<28} {value}", width)
        ]
        self.scroll = max(0, min(self.scroll, len(entries) - height + 1))
        return shown + entries[self.scroll : self.scroll + max(0, height - 1)]


def plain_lines(
    snapshots: Sequence[Mapping[str, Any]], findings: Sequence[Diagnosis], width: int, names: Sequence[str] = ()
) -> list[Text]:
    """All sections from top to bottom, for `--once`."""
    screen = Screen(snapshots, findings, names=names)
    lines = [*screen._findings(width, 1 << 20)]
    sections = sections_of(snapshots, names)
    for number, section in enumerate(sections):
        if section.lines:
            lines += [Text(), *screen._table(number, section, width, 1 << 20)]
    if names and not any(section.lines for section in sections):
        lines += [Text(f"no line has {' or '.join(map(printable, names))} in it", "yellow")]
    return lines


def flat(found: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested names joined by dots, with their values as text."""
    entries: list[tuple[str, str]] = []
    for name, value in found.items():
        if isinstance(value, Mapping):
            entries += flat(value, f"{prefix}{name}.")
        elif isinstance(value, list) and value and all(isinstance(each, Mapping) for each in value):
            for at, each in enumerate(value):
                entries += flat(each, f"{prefix}{name}.{at}.")
        else:
            shown = f"{value:,.6g}" if isinstance(value, float) else f"{value:,}" if type(value) is int else str(value)
            entries.append((f"{prefix}{name}", printable(shown)))
    return entries


def text_of(line: Line) -> str:
    """A line's name."""
    return printable(str(line.values[0]))


def _columns(columns: list[Column], lines: list[Line], kept: int, width: int) -> list[tuple[int, int]]:
    """The columns that fit, by number, and their widths; the first one always, and else those with anything in them."""
    chosen: list[tuple[int, int]] = []
    left = width
    for at, column in enumerate(columns):
        shown = [cell_len(printable(column.show(line.values[at]))) for line in lines if line.values[at] is not None]
        if at not in (0, kept) and not any(shown):
            continue
        wide = min(max([len(column.name) + 1, *shown]), max(12, width // 3))
        taken = wide + (len(_GAP) if at else 0)
        if taken > left:
            return chosen or [(0, width)]
        chosen.append((at, wide))
        left -= taken
    return chosen


def _cell(content: str, width: int, right: bool) -> str:
    content = printable(content)
    if cell_len(content) > width:
        return set_cell_size(content, max(0, width - 1)) + ("…" if width else "")
    pad = " " * (width - cell_len(content))
    return pad + content if right else content + pad


def _fit(content: str, width: int, style: str = "") -> Text:
    content = printable(content)
    if cell_len(content) > width:
        content = set_cell_size(content, max(0, width - 1)) + ("…" if width else "")
    elif "reverse" in style:
        content = set_cell_size(content, width)
    return Text(content, style=style, no_wrap=True, end="")


def _wrap(content: str, width: int) -> list[str]:
    """Lines of words; the second and later ones are set in."""
    lines, line = [], ""
    for word in printable(content).split(" "):
        if line and cell_len(line) + 1 + cell_len(word) > width and line.strip():
            lines.append(line)
            line = f"  {word}"
        else:
            line = f"{line} {word}" if line else word
    return [*lines, line]


__all__ = ["HELP", "Screen", "flat", "plain_lines"]

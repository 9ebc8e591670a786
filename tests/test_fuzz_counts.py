"""Fuzz counts: what `make fuzz` runs, counts and says of a finding."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from fuzz_native import COUNTS, QUICK, ROOT, FindingError, fuzzers, run


def program(folder: Path, name: str, body: str) -> Path:
    """An executable in the place of a fuzzer of fuzz_driver.cc."""
    path = folder / name
    path.write_text(f'#!/bin/sh\n[ "$1" = -help=1 ] && exit 0\n{body}\n')
    path.chmod(0o755)
    return path


SAYS = 'echo "$n inputs, the slowest took 0.001 s; $new of them new, 9 edges"'


def test_executions_are_counted_and_no_slice_has_the_seed_of_another(tmp_path: Path) -> None:
    body = f'echo $3 >> "$0.seeds"; n=$1; new=1; [ $n -gt 40 ] && n=40; {SAYS}'
    programs = [program(tmp_path, name, body) for name in ("fuzz_a", "fuzz_b")]
    counts = tmp_path / "counts.json"
    assert run(programs, counts, 100, jobs=2) == {"fuzz_a": 50, "fuzz_b": 50}
    assert run(programs, counts, 20, jobs=1) == {"fuzz_a": 10, "fuzz_b": 10}
    assert json.loads(counts.read_text())["fuzz_b"] == {"executions": 60, "slices": 3}
    assert (tmp_path / "fuzz_a.seeds").read_text().split() == ["0", "40", "50"]


def test_a_fuzzer_that_found_nothing_new_has_a_quarter_of_the_time_until_it_does(tmp_path: Path) -> None:
    body = f'echo $2 >> "$0.seconds"; n=10; new=0; [ $3 = 10 ] && new=2; {SAYS}'
    run([program(tmp_path, "fuzz_a", body)], tmp_path / "counts.json", 40, jobs=1, slice_s=8)
    assert (tmp_path / "fuzz_a.seconds").read_text().split() == ["8.0", "2.0", "8.0", "2.0"]


def test_a_run_ends_with_the_round_in_which_its_time_is_over(tmp_path: Path) -> None:
    programs = [program(tmp_path, name, f"sleep 0.05; n=1; new=0; {SAYS}") for name in ("fuzz_a", "fuzz_b")]
    assert run(programs, tmp_path / "counts.json", 10**9, jobs=2, seconds=0.01) == {"fuzz_a": 1, "fuzz_b": 1}


def test_libfuzzer_is_asked_in_its_own_words(tmp_path: Path) -> None:
    """Its statistics are counted, and inputs that it keeps go to a folder of the fuzzer's own."""
    path = tmp_path / "fuzz_a"
    path.write_text(
        "#!/bin/sh\n"
        '[ "$1" = -help=1 ] && echo "max_total_time 0 ..." >&2 && exit 0\n'
        'echo "$@" >> "$0.asked"\n'
        "printf 'stat::number_of_executed_units: 70\\nstat::new_units_added: 3\\n' >&2\n"
    )
    path.chmod(0o755)
    assert run([path], tmp_path / "counts.json", 100, jobs=1, slice_s=5) == {"fuzz_a": 140}
    first, second = (tmp_path / "fuzz_a.asked").read_text().splitlines()
    assert "-runs=100 -max_total_time=5 -seed=1 " in first
    assert "-runs=30 -max_total_time=5 -seed=71 " in second
    corpus = Path(second.split()[-1])
    assert corpus == tmp_path / "corpus" / "fuzz_a"
    assert corpus.is_dir()


def test_one_slice_in_eight_of_libfuzzer_looks_for_uses_of_stacks_after_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is slow where exceptions are thrown, and the only thing that sees them."""
    monkeypatch.delenv("ASAN_OPTIONS", raising=False)
    path = tmp_path / "fuzz_a"
    path.write_text(
        "#!/bin/sh\n"
        '[ "$1" = -help=1 ] && echo "max_total_time" && exit 0\n'
        'echo "${ASAN_OPTIONS:-all}" >> "$0.options"\n'
        "printf 'stat::number_of_executed_units: 1\\nstat::new_units_added: 1\\n'\n"
    )
    path.chmod(0o755)
    assert run([path], tmp_path / "counts.json", 9, jobs=1) == {"fuzz_a": 9}
    first, *others, ninth = (tmp_path / "fuzz_a.options").read_text().splitlines()
    assert first == ninth == "all"
    assert others == [QUICK] * 7


@pytest.mark.parametrize("ends", ["exit 1", "kill -SEGV $$", "echo nothing said"])
def test_a_finding_ends_the_run_with_the_command_that_shows_it_and_counts_nothing(tmp_path: Path, ends: str) -> None:
    counts = tmp_path / "counts.json"
    broken = program(tmp_path, "fuzz_a", f"echo what it said; {ends}")
    with pytest.raises(FindingError, match=r"(?s)fuzz_a 10 20\.0 0 \S+ ended with .*what it said"):
        run([broken], counts, 10, jobs=1)
    assert not counts.exists()


def test_every_fuzzer_is_built_and_counted() -> None:
    built = re.search(r"foreach\(test (segment/segment .*?)\)\n", (ROOT / "CMakeLists.txt").read_text(), re.DOTALL)
    assert built is not None
    assert fuzzers() == sorted(f"fuzz_{name.split('/')[1]}" for name in built[1].split())
    counted = json.loads(COUNTS.read_text())
    assert sorted(counted) == fuzzers()
    assert all((entry["executions"] > 0) == (entry["slices"] > 0) for entry in counted.values())

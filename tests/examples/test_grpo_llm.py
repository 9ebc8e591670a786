"""GRPO on a Hugging Face decoder by tasks: what is checked, counted and continued, and a small run with deaths."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from deadlines import patience

import geartrain as gt

torch = pytest.importorskip("torch", reason="the example trains a torch model")

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

import grpo_llm  # noqa: E402
import grpo_llm_run  # noqa: E402


def test_an_answer_that_a_dead_process_began_is_continued(monkeypatch: pytest.MonkeyPatch) -> None:
    texts: list[bytes] = []

    def write(_model: object, asked: list[bytes]) -> list[tuple[bytes, np.ndarray]]:
        texts.extend(asked)
        turns = [b"\n" if b"]" in text else b"[3*4]" for text in asked]
        return [(turn, np.full(len(turn), -0.5, np.float32)) for turn in turns]

    monkeypatch.setattr(grpo_llm, "write", write)
    rollout = object.__new__(grpo_llm.Rollout)
    rollout.model, rollout.version = None, 7

    class Reader:
        def latest(self, timeout_s: float) -> object:
            return type("Snapshot", (), {"version": 7})()

    rollout.reader = Reader()
    store = gt.Store.create(grpo_llm.FIELDS, tasks=grpo_llm.TASKS, capacity=4, span_bytes=1 << 18)
    store.insert({"number": [0], "prompt": [list(b"3*4=")]})
    with store.claim("answer", output="numpy") as begun:  # and dies behind the model's first turn of one answer
        (row,) = begun
        row.append(item=2, ids=list(b"[3*4]"), log_prob=np.zeros(5, np.float32), mask=[True] * 5)
    with store.claim("answer", output="numpy") as claim:
        rollout(claim)
    assert texts.count(b"3*4=") == grpo_llm.GROUP - 1 and texts.count(b"3*4=[3*4]12") == grpo_llm.GROUP
    with store.claim("reward", output="numpy") as claim:
        ends = np.cumsum(claim["length"])[:-1]
        assert [each.tobytes() for each in np.split(claim["ids"], ends)] == [b"[3*4]12\n"] * grpo_llm.GROUP
        written = [True] * 5 + [False] * 2 + [True]
        assert [each.tolist() for each in np.split(claim["mask"], ends)] == [written] * grpo_llm.GROUP
        assert not claim["log_prob"][~claim["mask"]].any()
    store.close()


def test_steps_trained_again_replace_those_before(tmp_path: Path) -> None:
    def log(rank: int, *steps: tuple[int, list[int]]) -> None:
        lines = [json.dumps({"step": step, "rows": rows}) for step, rows in steps]
        (tmp_path / f"learner-{rank}.jsonl").write_text("\n".join([*lines, '{"step": 2, "ro']))

    log(0, (0, [1, 2]), (1, [5]), (1, [6]))
    log(1, (0, [3]), (1, [7, 8]), (1, [7, 8]))
    steps, again, others = grpo_llm_run.steps_of(tmp_path)
    rows = {step: {rank: record["rows"] for rank, record in by_rank.items()} for step, by_rank in steps.items()}
    assert rows == {0: {0: [1, 2], 1: [3]}, 1: {0: [6], 1: [7, 8]}}
    assert (again, others) == (2, 1)


@pytest.mark.slow
def test_packed_sequences_have_the_log_probabilities_of_each_alone() -> None:
    pytest.importorskip("transformers", reason="transformers is an extra: pip install 'geartrain[transformers]'")
    torch.manual_seed(0)
    model = grpo_llm.make_model()
    parts = [torch.randint(32, 127, (length,)) for length in (5, 9, 2)]
    places = [torch.arange(len(part)) for part in parts]
    packed = grpo_llm.log_probs(model, torch.cat(parts), torch.cat(places))
    alone = torch.cat([grpo_llm.log_probs(model, *each) for each in zip(parts, places, strict=True)])
    counted = torch.cat(places) > 0
    assert torch.allclose(packed[counted], alone[counted], atol=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_with_deaths_trains_each_row_once(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is an extra: pip install 'geartrain[transformers]'")
    pytest.importorskip("matplotlib", reason="the example draws with matplotlib")
    figures, picture = tmp_path / "figures.json", tmp_path / "figures.png"
    size = ["--steps", "12", "--supervised", "60", "--seeds", "1", "--save-every", "4", "--kill-every", "1"]
    files = ["--folder", str(tmp_path / f"grpo-llm-{os.getpid()}"), "--json", str(figures), "--plot", str(picture)]
    assert grpo_llm_run.main([*size, *files, "--timeout-s", f"{patience(400):g}"]) == 0
    (found,) = json.loads(figures.read_text()).values()
    assert found["steps"] == 12 and found["rows"] == 12 * grpo_llm.PROMPTS
    assert (found["rows_twice"], found["rows_missing"], found["again_on_other_rows"]) == (0, 0, 0)
    kills, restarts = sum(found["kills"].values()), sum(found["restarts"].values())
    assert kills > 0 and kills - 1 <= restarts <= kills, "nothing fails of itself; the last kill may be at the end"
    assert picture.stat().st_size > 5000

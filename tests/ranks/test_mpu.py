"""Positions of ranks as Megatron-Core's parallel state tells them: what reads the same batch, and what another part."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from geartrain.errors import ArgumentError
from geartrain.ranks.topology import MeshPosition, of_mesh

dist = pytest.importorskip("torch.distributed")

FUNCTIONS = {
    "dp": "data_parallel",
    "pp": "pipeline_model_parallel",
    "tp": "tensor_model_parallel",
    "cp": "context_parallel",
}


def states(**sizes: int) -> Iterator[SimpleNamespace]:
    """The parallel state of each rank, in Megatron-Core's order: tensor, context, data, pipeline."""
    for pp, dp, cp, tp in itertools.product(*(range(sizes[axis]) for axis in ("pp", "dp", "cp", "tp"))):
        at = {"pp": pp, "dp": dp, "cp": cp, "tp": tp}
        functions = {}
        for axis, name in FUNCTIONS.items():
            functions[f"get_{name}_rank"] = lambda place=at[axis]: place
            functions[f"get_{name}_world_size"] = lambda size=sizes[axis]: size
        yield SimpleNamespace(**functions, at=at)


def test_context_parallel_ranks_read_the_same_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda: 16)
    seen = set()
    for state in states(pp=2, dp=2, cp=2, tp=2):
        topology = of_mesh(state)
        position, at = topology.position, state.at
        assert topology.members == list(range(16))
        assert (position.dp, position.pp, position.dp_size, position.pp_size) == (at["dp"], at["pp"], 2, 2)
        assert (position.tp, position.tp_size) == (2 * at["tp"] + at["cp"], 4)
        seen.add(position)
    assert len(seen) == 16, "every rank has a place of its own"
    assert MeshPosition(1, 1, 3, 2, 2, 4) in seen


def test_sizes_that_do_not_make_the_ranks_of_the_job_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda: 12)
    for state in states(pp=2, dp=2, cp=2, tp=2):
        with pytest.raises(ArgumentError, match="2 data x 2 pipeline x 4 tensor parallel ranks do not make the 12"):
            of_mesh(state)


def test_megatron_core_has_these_functions() -> None:
    found = importlib.util.find_spec("megatron")
    if found is None or not found.submodule_search_locations:
        pytest.skip('needs pip install "geartrain[megatron]"')
    text = (Path(next(iter(found.submodule_search_locations))) / "core" / "parallel_state.py").read_text()
    for name in FUNCTIONS.values():
        assert f"def get_{name}_rank(" in text
        assert f"def get_{name}_world_size(" in text

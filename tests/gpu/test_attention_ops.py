"""The operators on a GPU: right, traceable as one graph, on their tensors' own stream, with opcheck's blessing."""

from __future__ import annotations

import pytest
import torch
from attention_cases import Decode, Output, Prefill, decode, prefill

import qsa_cute.torch_ops  # noqa: F401 - registers the operators
from qsa_cute.runners import SparsePrefillRunner

OPS = torch.ops.qsa_cute
LENGTHS = (700, 0, 130)


def inputs(name: str, seed: int = 0) -> tuple[Prefill | Decode, tuple[object, ...]]:
    if name == "sparse_prefill":
        case = prefill(lengths=LENGTHS, rows=4, width=300, seed=seed)
        return case, (*case.inputs, case.scale, case.query_starts)
    case = decode(lengths=LENGTHS, query_len=2, width=300, seed=seed)
    return case, (*case.inputs, case.scale)


each = pytest.mark.parametrize("name", ["sparse_prefill", "sparse_decode"])


@each
def test_matches_the_reference(name) -> None:
    case, args = inputs(name)
    want, want_lse = case.reference()
    out, lse = getattr(OPS, name)(*args, return_lse=True)
    found = Output.like(case.q)
    found.o.tensor.copy_(out)
    found.lse.tensor.copy_(lse)
    found.check(want, want_lse)
    alone, none = getattr(OPS, name)(*args)
    assert torch.equal(alone, out)
    assert none.numel() == 0


@each
def test_the_out_form(name) -> None:
    case, args = inputs(name)
    out = Output.like(case.q)
    getattr(OPS, f"{name}_out")(*args, out=out.o.tensor, lse=out.lse.tensor)
    out.check(*case.reference())


def test_both_algorithms() -> None:
    case, args = inputs("sparse_decode")
    want, _ = case.reference()
    for algorithm in ("tma", "split_kv"):
        out, _ = OPS.sparse_decode(*args, algorithm=algorithm)
        assert (out.float() - want).abs().max() <= 2e-2
    workspace = case.workspace()
    out = torch.empty_like(case.q)
    OPS.sparse_decode_out(*args, algorithm="split_kv", out=out, **workspace.parts)
    assert (out.float() - want).abs().max() <= 2e-2
    workspace.check()


def test_many_rows_share_their_gather() -> None:
    case = prefill(lengths=LENGTHS, rows=60, width=300)
    want, want_lse = case.reference()
    found = Output.like(case.q)
    OPS.sparse_prefill_out(*case.inputs, case.scale, case.query_starts, out=found.o.tensor, lse=found.lse.tensor)
    found.check(want, want_lse)
    size = SparsePrefillRunner.shared_workspace(3, 60, case.k.shape[1], 24, 2, 256, 300)
    union = case.run(workspace=torch.empty(size, dtype=torch.uint8, device="cuda"), algorithm="union")
    assert torch.equal(found.bits(), union.bits()), "the operator's own workspace, the same kernels"


@each
def test_opcheck(name) -> None:
    case, args = inputs(name)
    for array in args:  # opcheck compares runs, so nothing may be NaN
        if isinstance(array, torch.Tensor) and array.is_floating_point():
            array.nan_to_num_(0.5)
    torch.library.opcheck(getattr(OPS, name).default, args, {"return_lse": True})
    out = {"out": torch.zeros_like(case.q), "lse": torch.zeros(case.q.shape[:3], device="cuda")}
    torch.library.opcheck(getattr(OPS, f"{name}_out").default, args, out)


@each
def test_one_graph_for_compile(name) -> None:
    operator = getattr(OPS, name)

    @torch.compile(fullgraph=True)
    def layer(*args):
        out, _ = operator(*args)
        return out.float() * 2

    for seed in (0, 1):
        _, args = inputs(name, seed)
        want, _ = operator(*args)
        assert torch.equal(layer(*args), want.float() * 2)


@each
def test_runs_on_the_current_stream(name) -> None:
    """The inputs arrive late on a side stream; an operator that ran elsewhere would see them too early."""
    case, args = inputs(name)
    late = [array.clone() if isinstance(array, torch.Tensor) else array for array in args]
    late[0].zero_()
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        late[0].copy_(args[0])
        out, _ = getattr(OPS, name)(*late)
    stream.synchronize()
    assert (out.float() - case.reference()[0]).abs().max() <= 2e-2


@each
def test_captured(name) -> None:
    case, args = inputs(name)
    getattr(OPS, name)(*args)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = getattr(OPS, name)(*args, return_lse=True)
    out.fill_(torch.nan)
    graph.replay()
    want, want_lse = case.reference()
    assert (out.float() - want).abs().max() <= 2e-2
    assert torch.equal(lse == -torch.inf, want_lse == -torch.inf)

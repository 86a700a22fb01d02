"""The host side on a device: loading, capture and replay, streams, threads, contexts, the cost of a launch."""

from __future__ import annotations

import threading

import pytest
import torch
from attention_cases import Decode, Output, Prefill, Workspace, decode, prefill

from qsa_cute.errors import CaptureError
from qsa_cute.runners import SparseDecodeParams, SparseDecodeRunner, SparsePrefillParams, SparsePrefillRunner
from qsa_cute.runtime import Loader, available, default_loader
from qsa_cute.runtime.overhead import bench_launch
from qsa_cute.variants import variants

RUNNERS = {"prefill": None, "tma": "tma", "split_kv": "split_kv"}
each = pytest.mark.parametrize("runner", RUNNERS)
SMALL = (2052, 0, 5, 700)


def make(runner: str, seed: int) -> Prefill | Decode:
    if runner == "prefill":
        return prefill(lengths=SMALL, rows=4, seed=seed)
    return decode(lengths=SMALL, query_len=2, seed=seed, broken_pages=False)


def run(runner: str, case: Prefill | Decode, out: Output, workspace: Workspace | None, stream: int | None = None):
    """One launch into `out`; the params are made here, so the stream is the current one unless it is given."""
    if isinstance(case, Prefill):
        SparsePrefillRunner.run("bf16", case.params(out, stream=stream))
    else:
        SparseDecodeRunner.run("bf16", case.params(out, workspace, algorithm=RUNNERS[runner], stream=stream))


def space(case: Prefill | Decode) -> Workspace | None:
    return case.workspace() if isinstance(case, Decode) else None


def test_every_registered_variant_loads() -> None:
    report = available()[torch.cuda.current_device()]
    assert {variant.name for variant in variants(["sm_90a"])} <= set(report.usable), report.refused


def test_preflight_is_idempotent() -> None:
    for _ in range(2):
        for dtype in ("bf16", torch.float16):
            SparsePrefillRunner.preflight(dtype)
            SparseDecodeRunner.preflight(dtype, head_dim=256)


def test_a_first_use_under_capture_is_refused_and_leaves_the_capture_whole(monkeypatch) -> None:
    fresh = Loader()
    monkeypatch.setattr("qsa_cute.runners.sparse_prefill.default_loader", lambda: fresh)
    case = make("prefill", 0)
    out, graph, mark = Output.like(case.q), torch.cuda.CUDAGraph(), torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        with pytest.raises(CaptureError, match="preflight"):
            run("prefill", case, out, None)
        mark += 1
    graph.replay()
    torch.cuda.synchronize()
    assert mark.item() == 1
    SparsePrefillRunner.preflight("bf16")
    with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
        run("prefill", case, out, None)
    graph.replay()
    out.check(*case.reference())


@each
def test_a_thousand_replays_with_changing_inputs(runner) -> None:
    """One graph over fixed tensors, four sets of inputs in turn; every replay gives the bits of a plain run."""
    cases = [make(runner, seed) for seed in range(4)]
    wanted = []
    for case in cases:
        out = Output.like(case.q)
        run(runner, case, out, space(case))
        out.check(*case.reference())
        wanted.append(out.bits())
    fixed = make(runner, 9)
    out, workspace = Output.like(fixed.q), space(fixed)
    run(runner, fixed, out, workspace)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(runner, fixed, out, workspace)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    tensors = [name for name, value in vars(fixed).items() if isinstance(value, torch.Tensor)]
    for i in range(1000):
        for name in tensors:
            getattr(fixed, name).copy_(getattr(cases[i % 4], name))
        if workspace is not None and i % 100 == 0:
            workspace.poison()
        graph.replay()
        wrong += (out.bits() != wanted[i % 4]).any()
    assert wrong.item() == 0
    if workspace is not None:
        workspace.check()


@each
def test_two_streams_at_once(runner) -> None:
    cases = [make(runner, seed) for seed in (0, 1)]
    streams = [torch.cuda.Stream() for _ in cases]
    outs, spaces = [Output.like(case.q) for case in cases], [space(case) for case in cases]
    torch.cuda.synchronize()
    for _ in range(50):
        for case, stream, out, workspace in zip(cases, streams, outs, spaces, strict=True):
            with torch.cuda.stream(stream):
                run(runner, case, out, workspace)
    torch.cuda.synchronize()
    for case, out in zip(cases, outs, strict=True):
        out.check(*case.reference())


@each
def test_threads(runner, monkeypatch) -> None:
    """Eight threads launch on streams of their own, the first uses of a new loader among them."""
    fresh = Loader()
    for module in ("sparse_prefill", "sparse_decode"):
        monkeypatch.setattr(f"qsa_cute.runners.{module}.default_loader", lambda: fresh)
    cases = [make(runner, seed) for seed in range(8)]
    outs, spaces = [Output.like(case.q) for case in cases], [space(case) for case in cases]
    streams = [torch.cuda.Stream() for _ in cases]
    torch.cuda.synchronize()
    barrier, errors = threading.Barrier(len(cases)), []

    def work(number: int) -> None:
        try:
            barrier.wait()
            for _ in range(50):
                run(runner, cases[number], outs[number], spaces[number], streams[number].cuda_stream)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(cases))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert not errors
    for case, out in zip(cases, outs, strict=True):
        out.check(*case.reference())


class Foreign:
    """A second CUDA context and memory in it, through the driver alone."""

    def __init__(self) -> None:
        import cuda.bindings.driver as cuda

        self.cuda = cuda
        self.context = self.call("cuCtxCreate", None, 0, torch.cuda.current_device())  # it becomes current

    def call(self, name: str, *args: object):
        error, *values = getattr(self.cuda, name)(*args)
        assert not error, f"{name}: {error}"
        return values[0] if values else None

    def put(self, tensor: torch.Tensor) -> int:
        """Copy a tensor of the host into the current context's memory."""
        size = tensor.numel() * tensor.element_size()
        address = int(self.call("cuMemAlloc", size))
        self.call("cuMemcpyHtoD", address, tensor.data_ptr(), size)
        return address

    def get(self, address: int, like: torch.Tensor) -> torch.Tensor:
        found = torch.empty_like(like)
        self.call("cuCtxSynchronize")
        self.call("cuMemcpyDtoH", found.data_ptr(), address, found.numel() * found.element_size())
        return found


def sizes(case: Prefill | Decode) -> dict[str, object]:
    return {
        "batch_size": case.q.shape[0],
        "num_q_heads": case.q.shape[2],
        "num_kv_heads": 2,
        "head_dim": case.q.shape[3],
        "top_k": case.indices.shape[2],
        "attention_scale": case.scale,
    }


@each
def test_a_second_context(runner) -> None:
    """Raw addresses in a context that torch knows nothing of; torch's own context serves as before."""
    case = make(runner, 3)
    want = Output.like(case.q)
    run(runner, case, want, space(case))
    host = {name: value.cpu() for name, value in vars(case).items() if isinstance(value, torch.Tensor)}
    host["o"], host["workspace"] = torch.zeros_like(host["q"]), torch.full((16 << 20,), 255, dtype=torch.uint8)
    expected = want.o.tensor.cpu()
    torch.cuda.synchronize()
    foreign = Foreign()
    try:
        at = {name: foreign.put(tensor) for name, tensor in host.items()}
        if isinstance(case, Prefill):
            names = {"indices", "context_lengths", "query_starts"}
            pointers = {name if name in names else f"{name}_ptr": at[name] for name in at if name != "workspace"}
            rows = {"seq_len": case.q.shape[1], "kv_seq_len": case.k.shape[1]}
            SparsePrefillRunner.run("bf16", SparsePrefillParams(**pointers, **rows, **sizes(case)))
        else:
            layout = SparseDecodeRunner.workspace_size(case.rows, 2, 256)
            params = SparseDecodeParams(
                q_ptr=at["q"],
                kv_pool_ptr=at["kv_pool"],
                page_table=at["page_table"],
                indices=at["indices"],
                context_lengths=at["context_lengths"],
                o_ptr=at["o"],
                query_len=case.q.shape[1],
                pool_head_dim=384,
                num_flat_pages=case.kv_pool.shape[0],
                max_pages_per_seq=case.page_table.shape[2],
                algorithm=RUNNERS[runner],
                **layout.addresses(at["workspace"]),
                **sizes(case),
            )
            assert layout.size <= host["workspace"].numel()
            SparseDecodeRunner.run("bf16", params)
        found = foreign.get(at["o"], expected)
    finally:
        foreign.call("cuCtxPopCurrent")
        foreign.call("cuCtxDestroy", foreign.context)
    assert torch.equal(found, expected)
    again = Output.like(case.q)
    run(runner, case, again, space(case))
    assert torch.equal(again.bits(), want.bits())


def test_a_thread_without_a_context() -> None:
    """A new thread has no current context: the device's primary one serves, and none is left current."""
    import cuda.bindings.driver as cuda

    case = make("prefill", 4)
    out, found = Output.like(case.q), []
    params = case.params(out, stream=torch.cuda.current_stream().cuda_stream)

    def work() -> None:
        SparsePrefillRunner.run("bf16", params)
        found.append(int(cuda.cuCtxGetCurrent()[1]))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert found == [0]
    out.check(*case.reference())


@each
def test_the_host_cost_of_a_run(runner) -> None:
    """At most 1.5 times a bare cuLaunchKernel; the best of several, since another process may hold the CPU."""
    case = make(runner, 5)
    case.indices.fill_(-1)
    out, workspace = Output.like(case.q), space(case)
    stream = torch.cuda.current_stream().cuda_stream
    if runner == "prefill":
        packed = params = case.params(out)
        wanted, grid, call = ("sparse_prefill", 256, "bf16"), (params.num_blocks, 1, 1), SparsePrefillRunner.run
    else:
        params = case.params(out, workspace, algorithm=RUNNERS[runner], num_splits=1)
        packed = params.with_map(default_loader())
        name = "sparse_decode_tma" if runner == "tma" else "sparse_decode"
        wanted, grid, call = (name, 256, "bf16"), params.grid, SparseDecodeRunner.run
    kernel = Loader().kernel(wanted)
    measured = [bench_launch(kernel, packed, grid, stream, lambda: call("bf16", params), repeats=5) for _ in range(5)]
    assert min(one["ratio"] for one in measured) <= 1.5, measured

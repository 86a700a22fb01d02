"""The soak: `make gpu-soak`, about two minutes on an H200. Not part of `tests/gpu`, and not of the evidence.

Many launches over random ragged batches (`--launches`, 200,000 of decode and as many of select), shapes drawn by
hypothesis for the attention and indexer runners, eight threads on one loader, captures while others load, artifacts
replaced under a running process, and a context that is reset. Inputs, invariants and their proof on a CPU:
`soak_cases.py`, `tests/unit/test_soak.py`. The functions of the hosts: `soak_hosts.py`.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import test_indexer_layer as layers
import torch
from attention_cases import BLOCK_KINDS, DTYPES, KINDS, Output, decode, prefill
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from indexer_cases import LOGIT_ATOL, LOGIT_RTOL
from soak_cases import SLOTS, DecodeSoak, SelectSoak
from test_indexer import MASKED, score, score_case

from qsa_cute.errors import ArtifactError
from qsa_cute.reference import indexer as reference
from qsa_cute.runners import SparseDecodeParams, SparseDecodeRunner, SparsePrefillRunner
from qsa_cute.runners.indexer_select import Select
from qsa_cute.runtime import Loader, Wanted
from qsa_cute.runtime.artifacts import find_root

ROOT = Path(__file__).parents[2]
SAMPLE_EVERY = 40  # groups between two comparisons with the reference

# (batch, query_len, width, algorithm, splits), (rows, blocks, cluster)
DECODES = (
    (1, 1, 2051, None, 0),
    (1, 1, 2051, "split_kv", 8),
    (1, 4, 515, "tma", 16),
    (2, 2, 200, "tma", 3),
    (3, 1, 64, "split_kv", 3),
    (4, 3, 77, None, 0),
    (5, 1, 1024, "tma", 7),
    (8, 4, 129, "split_kv", 2),
    (9, 8, 40, None, 0),
)
SELECTS = (
    (1, 600, None),
    (1, 8192, 8),
    (1, 65536, None),
    (1, 70001, None),
    (2, 16384, None),
    (3, 33000, 2),
    (4, 2048, None),
    (8, 5000, 4),
    (16, 4096, None),
    (16, 8192, 1),
    (40, 513, None),
)


def soak(launches: int, groups: list[tuple[DecodeSoak | SelectSoak, Callable[[int], None]]]) -> None:
    """Groups in turn until so many launches were made; nothing waits for the device before the end."""
    torch.manual_seed(0)
    rounds = -(-launches // SLOTS)
    for number in range(rounds):
        case, launch = groups[number % len(groups)]
        case.group(launch, sample=number // len(groups) % SAMPLE_EVERY == 0)
    torch.cuda.synchronize()
    broken = {f"{type(case).__name__} {number}": case.broken() for number, (case, _) in enumerate(groups)}
    assert not any(broken.values()), broken


@pytest.fixture
def launches(request) -> int:
    return request.config.getoption("--launches")


@pytest.mark.parametrize("dtype", DTYPES)
def test_decode(launches, dtype) -> None:
    groups, held = [], []  # params are addresses: their memory is kept here
    for seed, (batch, query_len, width, algorithm, splits) in enumerate(DECODES):
        case = DecodeSoak("cuda", batch, query_len, width, DTYPES[dtype], seed)
        layout = SparseDecodeRunner.workspace_size(batch, 2, 256, query_len)
        memory = torch.full((layout.size,), 0xFF, dtype=torch.uint8, device="cuda")
        held.append(memory)
        each = [decode_params(case, slot, memory, layout, algorithm, splits) for slot in range(SLOTS)]
        groups.append((case, lambda slot, each=each: SparseDecodeRunner.run(dtype, each[slot])))
    soak(launches // len(DTYPES), groups)


def decode_params(case, slot, memory, layout, algorithm, splits) -> SparseDecodeParams:
    space = {part.name: layout.tensor(memory, part.name) for part in layout.parts}
    return SparseDecodeParams.from_tensors(
        case.q[slot],
        case.pool,
        case.table[slot],
        case.ids[slot],
        case.lengths[slot],
        case.o.tensor[slot],
        attention_scale=case.scale,
        lse=case.lse.tensor[slot],
        algorithm=algorithm,
        num_splits=splits,
        **space,
    )


def test_select(launches) -> None:
    groups = []
    for seed, (rows, blocks, cluster) in enumerate(SELECTS):
        case = SelectSoak("cuda", rows, blocks, seed)
        each = [
            Select(
                logits_ptr=case.logits[slot].data_ptr(),
                out_ptr=case.out.tensor[slot].data_ptr(),
                context_lengths=case.lengths[slot].data_ptr(),
                batch_size=rows,
                seq_len=1,
                num_blocks=blocks,
                from_end=True,
                expand=False,
                cluster=cluster,
                stream=torch.cuda.current_stream().cuda_stream,
            )
            for slot in range(SLOTS)
        ]
        groups.append((case, lambda slot, each=each: each[slot].run()))
    soak(launches, groups)


# Shapes of hypothesis' choice.

drawn = settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
heads = st.tuples(st.integers(1, 16), st.integers(1, 3))
lengths = st.lists(st.sampled_from([0, 1, 3, 4, 5, 127, 128, 129, 511, 700]), min_size=1, max_size=4).map(tuple)
types = st.sampled_from(list(DTYPES))
dims = st.sampled_from([256, 128])


@drawn
@given(types, dims, heads, lengths, st.integers(1, 40), st.integers(1, 700), st.integers(0, 9))
def test_any_prefill(dtype, dim, heads, lengths, rows, width, seed) -> None:
    case = prefill(dtype, dim, *heads, lengths, rows, width, seed)
    want = case.reference()
    case.run().check(*want)
    batch, kv_rows = case.k.shape[:2]
    space = SparsePrefillRunner.workspace_size(batch, rows, kv_rows, heads[0] * heads[1], heads[1], dim, width)
    memory = torch.full((space.size,), 0xFF, dtype=torch.uint8, device="cuda")
    case.run(workspace=memory, algorithm="union").check(*want)


@drawn
@given(
    types,
    dims,
    heads,
    lengths,
    st.integers(1, 8),
    st.integers(1, 700),
    st.sampled_from([KINDS, BLOCK_KINDS]),
    st.sampled_from([("tma", 16), ("split_kv", 8)]),
    st.integers(0, 16),
)
def test_any_decode(dtype, dim, heads, lengths, query_len, width, kinds, algorithm, splits) -> None:
    case = decode(dtype, dim, *heads, lengths, query_len, width, seed=splits, kinds=kinds)
    name, most = algorithm
    case.run(name, num_splits=min(splits, most)).check(*case.reference())
    case.run(None).check(*case.reference())


@drawn
@given(types, lengths, st.integers(0, 700), st.integers(1, 70), st.integers(1, 200), st.sampled_from(["mma", "wgmma"]))
def test_any_scores(dtype, lengths, start, rows, blocks, algorithm) -> None:
    q, kbar, context, begin, want = score_case(lengths, (start,) * len(lengths), rows, max(blocks, 200), dtype)
    found = score(q, kbar, context, begin, algorithm)
    want = want.flatten(0, 1)
    seen = want > MASKED
    assert (found[~seen] == MASKED).all()
    torch.testing.assert_close(found[seen].double(), want[seen], rtol=LOGIT_RTOL, atol=LOGIT_ATOL)


@drawn
@given(st.integers(1, 200), st.integers(1, 20000), st.sampled_from([None, 1, 2, 4, 8]), st.integers(0, 99))
def test_any_selection(rows, blocks, cluster, seed) -> None:
    generator = torch.Generator("cuda").manual_seed(seed)
    logits = (torch.randn(rows, blocks, device="cuda", generator=generator) * 8).round() / 8
    context = torch.randint(0, 4 * blocks + 8, (rows,), device="cuda", generator=generator).int()
    out = torch.full((rows, 2051), 2**31 - 1, dtype=torch.int32, device="cuda")
    fields = {"logits_ptr": logits.data_ptr(), "out_ptr": out.data_ptr(), "context_lengths": context.data_ptr()}
    Select(**fields, batch_size=rows, seq_len=1, num_blocks=blocks, from_end=True, cluster=cluster).run()
    visible = (context // 4).clamp(max=blocks)
    chosen = reference.select(logits, visible)
    ids = torch.where(chosen < 0, 2**40, chosen).sort(-1).values
    short = context // 4 <= blocks  # beyond, the reference has no open block where the logits end
    want = reference.expand(ids, torch.where(short, context.long() - 1, -1))
    assert torch.equal(out[short], want[short])


histories = st.lists(st.integers(17, 2600), min_size=1, max_size=3).map(tuple)


@settings(drawn, max_examples=12)
@given(histories, st.integers(1, 16), types)
def test_any_layer(lengths, group, dtype) -> None:
    layers.test_a_layer_decodes_as_it_prefills(lengths, group, dtype)


@settings(drawn, max_examples=12)
@given(histories, st.sampled_from(list(layers.PLANS)))
def test_any_indexer(lengths, plan) -> None:
    layers.test_decode_reproduces_prefill(lengths, layers.PLANS[plan])


# Threads, captures, contexts, files.


def small(seed: int):
    return decode(lengths=(700, 0, 5, 300), query_len=2, width=300, broken_pages=False, seed=seed)


def in_threads(*works: Callable[[], None]) -> None:
    """Run each in a thread, at once; the first error of any."""
    errors: list[BaseException] = []
    barrier = threading.Barrier(len(works))

    def guarded(work: Callable[[], None]) -> None:
        try:
            barrier.wait()
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    if errors:
        raise errors[0]


def test_eight_threads_share_a_loader(monkeypatch) -> None:
    """2000 launches each on streams of their own, while the loader's first uses and other variants are loaded."""
    fresh = Loader()
    for module in ("sparse_prefill", "sparse_decode"):
        monkeypatch.setattr(f"qsa_cute.runners.{module}.default_loader", lambda: fresh)
    cases, algorithms = [small(seed) for seed in range(8)], ("tma", "split_kv")
    outs, spaces = [Output.like(case.q) for case in cases], [case.workspace() for case in cases]
    streams = [torch.cuda.Stream() for _ in cases]
    torch.cuda.synchronize()

    def work(number: int) -> Callable[[], None]:
        algorithm, stream = algorithms[number % 2], streams[number].cuda_stream

        def run() -> None:
            params = cases[number].params(outs[number], spaces[number], algorithm=algorithm, stream=stream)
            for i in range(2000):
                SparseDecodeRunner.run("bf16", params)
                if i % 200 == number:
                    SparsePrefillRunner.preflight(("bf16", "fp16")[i // 200 % 2])

        return run

    in_threads(*(work(number) for number in range(8)))
    for case, out in zip(cases, outs, strict=True):
        out.check(*case.reference())


def test_captures_while_another_thread_loads() -> None:
    """Neither the loads nor the captures fail, and what was captured is right."""
    case, stop, loads = small(0), threading.Event(), []
    SparseDecodeRunner.preflight("bf16")
    out, space, graphs = Output.like(case.q), case.workspace(), []
    wanted = [Wanted("sparse_prefill", dim, dtype) for dim in (256, 128) for dtype in DTYPES]

    def load() -> None:
        torch.cuda.init()
        while not stop.is_set():
            loader = Loader()
            for one in wanted:
                loader.kernel(one, device=torch.cuda.current_device())
            loads.append(1)

    def capture() -> None:
        try:
            for _ in range(30):
                graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
                with torch.cuda.graph(graph, stream=stream):
                    params = case.params(out, space, stream=stream.cuda_stream)
                    SparseDecodeRunner.run("bf16", params)
                graphs.append((graph, params))
        finally:
            stop.set()

    in_threads(load, capture)
    assert loads
    for graph, _ in graphs:
        out.o.tensor.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        out.check(*case.reference())


def test_artifacts_replaced_under_a_running_process(tmp_path, monkeypatch) -> None:
    """What is loaded goes on, what is not is refused with the mending command, and comes back with the files."""
    root = tmp_path / "artifacts"
    shutil.copytree(find_root(), root)
    fresh = Loader(root)
    monkeypatch.setattr("qsa_cute.runners.sparse_decode.default_loader", lambda: fresh)
    case = small(1)
    out, space = Output.like(case.q), case.workspace()
    params = case.params(out, space, algorithm="tma")
    SparseDecodeRunner.run("bf16", params)
    root.rename(tmp_path / "away")
    root.mkdir()
    for sm in (tmp_path / "away").iterdir():
        if sm.is_dir():
            shutil.copytree(sm, root / sm.name)
            for cubin in (root / sm.name).glob("*.cubin"):
                cubin.write_bytes(b"another build")
    out.o.tensor.fill_(torch.nan)
    SparseDecodeRunner.run("bf16", params)
    torch.cuda.synchronize()
    out.check(*case.reference())
    with pytest.raises(ArtifactError, match="rebuild it"):
        fresh.kernel(("sparse_decode_tma", 128, "bf16"))
    shutil.rmtree(root)
    (tmp_path / "away").rename(root)
    assert fresh.kernel(("sparse_decode_tma", 128, "bf16"))


def test_a_context_that_is_reset() -> None:
    """In a process of its own: errors of ours, not a crash, and after a new context all is as before."""
    done = subprocess.run(
        [sys.executable, "tests/gpu/context_reset.py"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "after the reset:" in done.stdout, done.stdout

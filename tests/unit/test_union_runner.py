"""The union behind `SparsePrefillRunner`: when it is taken, what it needs, and what is launched, in which order."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from attention_params import PREFILL, prefill

from qsa_cute import union_layout
from qsa_cute.errors import ArgumentError, UnsupportedError
from qsa_cute.runners import SparsePrefillRunner, dispatch, sparse_prefill, union

ROWS = {"batch_size": 1, "seq_len": 4096, "kv_seq_len": 8192}
BASE = 1 << 45  # a workspace away from every tensor
# The bitmap of one row of so long a context is too much.
WIDE = {"num_q_heads": 2, "kv_seq_len": 1 << 23, "o_ptr": 1 << 40, "v_ptr": 1 << 44}


class Driver:
    def __init__(self, capability=(9, 0)) -> None:
        self._capability = capability
        self.maps = []

    def current_context(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def capability(self, device: int) -> tuple[int, int]:
        return self._capability

    def encode_map(self, dtype, address, sizes, strides, box):
        self.maps.append((dtype, address, sizes, strides, box))
        return tuple(range(16))


class FakeLoader:
    def __init__(self, capability=(9, 0), lacks: str = "") -> None:
        self.driver, self.log, self._lacks = Driver(capability), [], lacks

    def encode_map(self, device, *asked):
        return self.driver.encode_map(*asked)

    def missing_reason(self, wanted, device=0) -> str | None:
        return "not built" if self._lacks and self._lacks in wanted.kernel else None

    def kernel(self, wanted, device=None, stream=0) -> None:
        self.log.append(SimpleNamespace(kernel=wanted.kernel))

    def peek(self, wanted, device=-1, stream=0):
        def launch(params, grid, stream, cluster=1, smem=None):
            self.log.append(
                SimpleNamespace(
                    kernel=wanted.kernel,
                    baked=dict(wanted.baked),
                    dtype=wanted.dtype,
                    params=params,
                    grid=grid,
                    stream=stream,
                    smem=smem,
                )
            )

        return SimpleNamespace(launch=launch)


@pytest.fixture
def use(monkeypatch):
    def install(loader):
        monkeypatch.setattr(dispatch, "_capabilities", {})
        monkeypatch.setattr(sparse_prefill, "default_loader", lambda: loader)
        sparse_prefill.union_for.cache_clear()
        return loader

    yield install
    sparse_prefill.union_for.cache_clear()


@pytest.mark.parametrize(
    ("changes", "shares"),
    [
        ({}, False),
        ({"workspace": BASE}, True),
        ({"workspace": BASE, "algorithm": "rows"}, False),
        ({"workspace": BASE, "seq_len": union.LEAST_ROWS - 1}, False),
        ({"workspace": BASE, "seq_len": 1, "algorithm": "union"}, True),
        ({"workspace": BASE, "seq_len": 1, "index_kind": "blocks", "top_k": 512}, True),
        ({"workspace": BASE, "seq_len": 0}, False),
        ({"workspace": BASE, **WIDE}, False),
    ],
)
def test_when_it_is_taken(changes, shares) -> None:
    assert prefill(**ROWS | changes).shares is shares


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"algorithm": "tile"}, "algorithm is 'tile'; it takes 'rows', 'union' or None"),
        ({"index_kind": "csr"}, "index_kind is 'csr'; it takes 'padded', 'counted', 'blocks'"),
        ({"algorithm": "union"}, "workspace is null"),
        ({"index_kind": "counted"}, "workspace is null"),
        ({"index_kind": "blocks", "algorithm": "rows", "workspace": BASE}, "that takes 'padded' lists"),
        ({"workspace": BASE + 16}, "workspace is .* multiple of 256"),
        ({"workspace": BASE, "algorithm": "union", **WIDE}, "kv_seq_len is 8388608 and .* do not fit in shared"),
        ({"workspace": PREFILL["q_ptr"]}, "workspace at .* overlaps q"),
    ],
)
def test_what_it_refuses(changes, says) -> None:
    with pytest.raises(ArgumentError, match=says):
        prefill(**ROWS | changes)


def test_launches_in_order(use) -> None:
    loader, params = use(FakeLoader()), prefill(**ROWS, workspace=BASE, stream=7)
    for _ in range(2):
        SparsePrefillRunner.run("bf16", params)
    prepare, main, rows = loader.log[:3]
    assert [one.kernel for one in loader.log] == ["union_prepare", "union_prefill", "union_rows"] * 2
    tiles = 4096 * 12 // 128
    assert (prepare.grid, main.grid, rows.grid) == (tiles, 132, 264)
    assert (main.smem, rows.smem) == (None, None)
    assert 0 < prepare.smem == union.shared_memory(params) <= union_layout.MAX_SMEM_BYTES
    assert {one.stream for one in loader.log} == {7}
    assert loader.log[3].params is prepare.params, "made once"
    assert len(loader.driver.maps) == 2
    dtype, address, sizes, strides, box = loader.driver.maps[0]
    assert (dtype, address, sizes, box) == ("bf16", params.k_ptr, (256, 2, 8192), (64, 1, 4))
    assert strides == (2 * params.k_stride_head, 2 * params.k_stride_row)
    assert prepare.params.index_kind == 0
    assert [getattr(prepare.params, f"v_map_{i}") for i in range(16)] == list(range(16))


@pytest.mark.parametrize(
    ("rows", "tiles", "threads"), [(512, 64, 512), (1024, 128, 512), (1408, 132, 512), (1409, 193, 256)]
)
def test_few_tiles_have_many_threads_each(use, rows, tiles, threads) -> None:
    loader = use(FakeLoader())
    SparsePrefillRunner.run("bf16", prefill(**ROWS | {"seq_len": rows}, workspace=BASE, algorithm="union"))
    assert (loader.log[0].grid, loader.log[0].baked) == (tiles, {"threads": threads})


def test_parts_of_the_workspace_lie_within_it() -> None:
    params = prefill(**ROWS, workspace=BASE)
    needed = SparsePrefillRunner.workspace_size(
        1, 4096, 8192, params.num_q_heads, params.num_kv_heads, params.head_dim, params.top_k
    )
    assert needed == union.workspace(params)
    for part in needed.parts:
        assert part.offset % needed.alignment == 0
        assert part.offset + part.size <= needed.size


@pytest.mark.parametrize("capability", [(8, 0), (10, 0)])
def test_elsewhere_the_row_kernel_does_it(use, capability) -> None:
    loader = use(FakeLoader(capability))
    SparsePrefillRunner.run("bf16", prefill(**ROWS, workspace=BASE))
    assert [one.kernel for one in loader.log] == ["sparse_prefill"]
    with pytest.raises(UnsupportedError, match="built for sm_90a"):
        SparsePrefillRunner.run("bf16", prefill(**ROWS, workspace=BASE, index_kind="blocks"))


@pytest.mark.parametrize("lacks", ["union", "union_rows"])
def test_artifacts_without_the_union_do_row_by_row(use, lacks) -> None:
    """What `preflight` asks for and what `run` takes agree: a store may be built for a part of the registry."""
    loader = use(FakeLoader(lacks=lacks))
    SparsePrefillRunner.preflight("bf16", device=0, head_dim=256)
    SparsePrefillRunner.run("bf16", prefill(**ROWS, workspace=BASE))
    assert [one.kernel for one in loader.log] == ["sparse_prefill"] * 2
    SparsePrefillRunner.run("bf16", prefill(**ROWS, workspace=BASE, algorithm="union"))
    assert loader.log[2].kernel == "union_prepare", "what is asked for by name is asked for: the loader says what lacks"
    loader._lacks = ""  # it was built since
    del loader.log[:]
    SparsePrefillRunner.preflight("bf16", device=0, head_dim=256)
    SparsePrefillRunner.run("bf16", prefill(**ROWS, workspace=BASE))
    assert [one.kernel for one in loader.log] == [
        "sparse_prefill",
        *["union_prepare"] * 2,  # with few threads and with many
        *["union_prefill", "union_rows"],
        *["union_prepare", "union_prefill", "union_rows"],
    ]


def test_one_head_and_one_token_still_have_strides(use) -> None:
    loader = use(FakeLoader())
    one = {"num_q_heads": 12, "num_kv_heads": 1, "kv_seq_len": 1, "k_stride_head": 0, "k_stride_row": 0}
    SparsePrefillRunner.run("bf16", prefill(**ROWS | one, workspace=BASE, algorithm="union"))
    assert loader.driver.maps[0][3] == (512, 512)


def test_a_workspace_holds_fewer_rows_too() -> None:
    """Fewer rows may be cut in more and smaller tiles."""
    sizes = [SparsePrefillRunner.workspace_size(1, rows, 8192, 24, 2, 256, 2051).size for rows in range(1, 3000, 7)]
    assert sizes == sorted(sizes)


@pytest.mark.parametrize("kind", ["padded", "counted", "blocks"])
@pytest.mark.parametrize("group", [1, 2, 3, 6, 12, 16])
def test_long_contexts_take_tiles_of_fewer_pairs(group, kind) -> None:
    """Whatever the context, a launch asks for no more shared memory than there is, and its tiles' rows have masks."""
    top = 512 if kind == "blocks" else 2051
    for tokens in (8192, 131_072, 262_144, 1 << 20):
        sizes = (1, 4096, tokens, 2 * group, 2, 256, top)
        params = sparse_prefill._somewhere(*sizes, index_kind=kind)
        found = union._sizes(params)
        assert union.fits(params)
        assert union.shared_memory(params) <= union_layout.MAX_SMEM_BYTES
        pairs, rows = found["tile_pairs"], found["mask_rows"]
        for start in range(0, 4096 * group, pairs):
            assert (start + pairs - 1) // group - start // group < rows
        assert union.pays(params) is (pairs >= min(4 * group, 32))


CONTEXTS = sorted({int(1000 * 1.25**i) for i in range(32)} | {1 << 17, 1 << 20})


@pytest.mark.parametrize(("kind", "top"), [("blocks", 512), ("padded", 2051), ("padded", 8192), ("blocks", 8192)])
@pytest.mark.parametrize("group", range(1, 17))
def test_every_tile_stays_within_what_the_kernels_have(group, kind, top) -> None:
    """Rows within the mask words, counts within 16 bits, and memory."""
    before = 0
    for tokens in CONTEXTS:
        shape = (1, 700, tokens, 2 * group, 2, 256, top, kind)
        sizes = {"seq_len": 700, "batch_size": 1, "group_size": group, "num_kv_heads": 2, "head_dim": 256}
        p = SimpleNamespace(**sizes, kv_seq_len=tokens, index_kind=kind, top_k=top)
        space = union.workspace(p)
        assert space.size >= before, "what is for a context is for shorter ones"
        before = space.size
        if not union._most_pairs(p):
            assert (kind, top) == ("blocks", 8192), "16 times what the model selects"
            continue
        assert space == SparsePrefillRunner.workspace_size(*shape)
        found = union._sizes(p)
        pairs, mask_rows = found["tile_pairs"], found["mask_rows"]
        assert union.shared_memory(p) <= union_layout.MAX_SMEM_BYTES
        for start in range(0, 700 * group, pairs):
            end = min(start + pairs, 700 * group)
            assert (end - 1) // group - start // group < mask_rows
        union_blocks = min(mask_rows * union._blocks_per_row(p), -(-tokens // 4))
        assert found["max_chunks"] * found["tile"] // 4 <= union_blocks + 2 * found["tile"] // 4
        assert union_layout.max_union(group, pairs, union._blocks_per_row(p), tokens) < 2**16, "counts of 16 bits"


def test_a_workspace_serves_shorter_contexts() -> None:
    """A shorter context may have tiles of more pairs, and those more words of masks."""
    small, large = (SparsePrefillRunner.workspace_size(1, 4096, n, 3, 1, 256, 512, "blocks") for n in (98_304, 1 << 20))
    assert small.parts[-1].offset + small.parts[-1].size <= large.size
    assert max(part.size for part in small.parts) > max(part.size for part in large.parts), "what makes this a case"


@pytest.mark.parametrize(("group", "tokens"), [(1, 262_144), (3, 131_072), (12, 1 << 20), (12, 32_768)])
def test_a_workspace_serves_fewer_rows(group, tokens) -> None:
    shape = (tokens, 2 * group, 2, 256, 512, "blocks")
    sizes = [SparsePrefillRunner.workspace_size(1, rows, *shape).size for rows in range(128, 3000, 61)]
    assert sizes == sorted(sizes)

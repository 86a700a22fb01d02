"""What the indexer's and the layer's parameters derive, refuse, and launch, without a GPU."""

from __future__ import annotations

import dataclasses
import importlib
import struct

import pytest
from attention_params import MiB, decode, prefill
from hypothesis import given
from hypothesis import strategies as st

from qsa_cute import variants
from qsa_cute.errors import ArgumentError, UnsupportedError
from qsa_cute.runners import indexer_launch as launches
from qsa_cute.runners import indexer_select as selects
from qsa_cute.runners.indexer import (
    IndexerDecodeParams,
    IndexerDecodeRunner,
    IndexerPrefillParams,
    IndexerPrefillRunner,
    chunk_rows,
)
from qsa_cute.runners.indexer_state import QsaIndexerPoolState
from qsa_cute.runners.layer import QsaLayer, QsaLayerDecodeParams, QsaLayerPrefillParams
from qsa_cute.support import SupportCode

GiB = 1 << 30
QK, COS, LENGTHS, WQ, WK, OUT, Q, KBAR, LOGITS, WORK, STARTS = (i * GiB for i in range(1, 12))
STATE = {"pool_ptr": 64 * GiB, "page_table": 96 * GiB, "max_pages_per_seq": 512, "num_pages": 1024}
ROWS = {"index_qk_ptr": QK, "context_lengths": LENGTHS, "batch_size": 2, "seq_len": 300}
KEYS = {"cos_sin_ptr": COS, "w_k_ptr": WK, "num_blocks": 75, "kbar_ptr": KBAR}


def state(**changes):
    return QsaIndexerPoolState(**(STATE | changes))


def one_of_each():
    scored = {"logits_ptr": LOGITS, "context_lengths": LENGTHS, "batch_size": 2}
    query = {"cos_sin_ptr": COS, "w_q_ptr": WQ, "q_normed_ptr": Q}
    pooled = {"pool_state": state()}
    decoded = {"index_qk_ptr": QK, "context_lengths": LENGTHS, "batch_size": 2, "query_len": 3}
    return {
        "prepare": launches.QueryPrepare(**ROWS, **query),
        "compress": launches.KeyCompress(**ROWS, **KEYS),
        "tail_write": launches.RawKeyTailWrite(**ROWS, **pooled),
        "pre_decode": launches.PreDecode(**decoded, **query, w_k_ptr=WK, **pooled),
        "ids_fill": launches.IdsFill(ids_ptr=OUT, num_rows=7, num_blocks=2049),
        "expand": launches.Expand(
            out_idx_ptr=OUT, sorted_ids_ptr=KBAR, context_lengths=LENGTHS, batch_size=2, seq_len=300, num_blocks=75
        ),
        "scores_prefill": selects.Scores(**scored, q_normed_ptr=Q, kbar_ptr=KBAR, seq_len=300, num_blocks=75),
        "scores_decode": selects.ScoresDecode(**scored, **pooled, q_normed_ptr=Q, max_blocks=16384, query_len=2),
        "select": selects.Select(**scored, out_ptr=OUT, seq_len=300, num_blocks=75),
    }


@pytest.mark.parametrize("name", one_of_each())
def test_there_is_a_packable_value_for_every_kernel_parameter(name):
    module = importlib.import_module(f"qsa_cute.kernels.indexer.{name}")
    launch = one_of_each()[name]
    codes = {"ptr": "<Q", "i64": "<q", "i32": "<i", "f32": "<f"}
    for param in module.PARAMS:
        struct.pack(codes[param.kind], getattr(launch, param.name))


@pytest.mark.parametrize(("name", "launch"), one_of_each().items())
def test_every_launch_names_a_registered_kernel(name, launch):
    assert launch.KERNEL in variants.KERNELS


@pytest.mark.parametrize("kernels", [selects.prefill_kernels, selects.decode_kernels])
@pytest.mark.parametrize(("sm", "sm90"), [("sm_90a", True), ("sm_80", False), ("sm_120a", False)])
def test_preflight_asks_for_what_is_built_once(kernels, sm, sm90):
    """An ambiguous or missing variant would fail every first use."""
    for kernel, baked in kernels(sm90):
        matching = [v for v in variants.variants([sm], kernel, dtypes=["bf16"]) if set(baked) <= set(v.baked)]
        assert len(matching) == 1, (kernel, sm, matching)


class TestPoolState:
    def test_addressing(self):
        found = state()
        assert found.num_flat_pages == 2048
        assert found.tail_offset == 256
        assert found.v_page_table - found.k_page_table == 512 * 4
        assert found.page_table_stride == 1024
        assert found.reach == 65536
        assert found.element(3, 5, 1, 7) == 3 * 128 * 2 * 384 + 5 * 2 * 384 + 384 + 7

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"pool_ptr": 8}, "multiple of 16"),
            ({"pool_ptr": 0}, "null"),
            ({"page_table": 2}, "multiple of 4"),
            ({"pool_head_dim": 376}, "from 384"),
            ({"pool_head_dim": 388}, "multiple of 8"),
            ({"num_pages": 2**31}, "num_pages is 2147483648"),
            ({"max_pages_per_seq": 0}, "from 1"),
            ({"token_stride": 100}, "multiple of 8"),
        ],
    )
    def test_refuses(self, changes, words):
        with pytest.raises(ArgumentError, match=words):
            state(**changes)


class TestGrids:
    def test_one_block_a_row(self):
        each = one_of_each()
        assert each["prepare"].grid == 600
        assert each["tail_write"].grid == 2
        assert each["pre_decode"].grid == 6
        assert each["ids_fill"].grid == 7 * 3
        assert each["expand"].grid == each["select"].grid == 600

    def test_four_keys_a_block(self):
        assert one_of_each()["compress"].grid == 38
        assert launches.KeyCompress(**ROWS, **KEYS, block_begin=10, block_end=13).grid == 2
        assert launches.KeyCompress(**ROWS, **KEYS, block_begin=10, block_end=10).grid == 0

    @pytest.mark.parametrize(
        ("rows", "start", "count", "tiles"), [(128, 0, 600, 6), (128, 0, 300, 3), (32, 299, 2, 2), (128, 130, 1, 1)]
    )
    def test_score_tiles_stay_within_a_sequence(self, rows, start, count, tiles):
        assert selects.score_grid(rows, 300, start, count, 10_000)[0] == tiles

    def test_few_tiles_split_their_columns(self):
        assert selects.score_grid(128, 128, 0, 128, 8192) == (1, 128, 1)
        assert selects.score_grid(128, 128, 0, 128, 100) == (1, 2, 1)
        assert selects.score_grid(128, 4096, 0, 4096, 8192) == (32, 4, 1)

    @pytest.mark.parametrize(("batch", "shares"), [(1, 256), (2, 128), (64, 64), (500, 16)])
    def test_decode_shares(self, batch, shares):
        launch = selects.ScoresDecode(
            logits_ptr=LOGITS,
            q_normed_ptr=Q,
            context_lengths=LENGTHS,
            pool_state=state(),
            batch_size=batch,
            max_blocks=16384,
        )
        assert launch.grid == (shares, batch, 1)

    def test_empty_batches_launch_nothing(self):
        for launch in one_of_each().values():
            if hasattr(launch, "batch_size"):
                empty = {f.name: getattr(launch, f.name) for f in dataclasses.fields(launch) if f.init}
                assert not type(launch)(
                    **(empty | {"batch_size": 0, "num_rows": 0} if "num_rows" in empty else empty | {"batch_size": 0})
                ).grid


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: launches.QueryPrepare(**ROWS | {"index_qk_ptr": QK + 4}, **QUERY), "multiple of 8"),
        (lambda: launches.QueryPrepare(**ROWS, **QUERY | {"q_normed_ptr": QK + 1280}), "overlaps index_qk"),
        (lambda: launches.QueryPrepare(**ROWS, **QUERY, index_stride_row=642), "multiple of 4"),
        (lambda: launches.KeyCompress(**ROWS, **KEYS, block_end=76), "block_end is 76"),
        (lambda: launches.KeyCompress(**ROWS, **KEYS, read_pool=True), "without a pool_state"),
        (lambda: launches.KeyCompress(**ROWS, **KEYS, pool_state=7), "QsaIndexerPoolState"),
        (lambda: launches.RawKeyTailWrite(**ROWS, pool_state=None), "pool_state is None"),
        (lambda: selects.Select(**SELECT, cluster=3), "cluster is 3"),
        (lambda: selects.Select(**SELECT, row_start=599, num_rows=2), "num_rows is 2"),
        (lambda: selects.Select(**SELECT | {"out_ptr": LOGITS}), "overlaps logits"),
        (lambda: selects.Select(**SELECT | {"logits_ptr": 0, "num_blocks": 600}), "logits_ptr is null"),
    ],
)
def test_launches_refuse(build, words):
    with pytest.raises(ArgumentError, match=words):
        build()


QUERY = {"cos_sin_ptr": COS, "w_q_ptr": WQ, "q_normed_ptr": Q}
SELECT = {
    "logits_ptr": LOGITS,
    "out_ptr": OUT,
    "context_lengths": LENGTHS,
    "batch_size": 2,
    "seq_len": 300,
    "num_blocks": 75,
}
PREFILL = {
    "index_qk_ptr": QK,
    "cos_sin_ptr": COS,
    "context_lengths": LENGTHS,
    "w_q_ptr": WQ,
    "w_k_ptr": WK,
    "out_idx_ptr": OUT,
    "batch_size": 1,
    "seq_len": 4096,
    "workspace": WORK,
}
DECODE = {name: value for name, value in PREFILL.items() if name != "seq_len"}


def names(params):
    return [launch.KERNEL for launch in params.launches]


class TestPrefill:
    def test_launches(self):
        found = IndexerPrefillParams(**PREFILL, pool_state=state())
        assert names(found) == [
            "index_compress",
            "index_tail_write",
            "index_prepare",
            "scores_prefill",
            "select",
        ]
        compress, _, _, scores, select = found.launches
        assert compress.num_blocks == scores.num_blocks == select.num_blocks == 1024
        assert (compress.read_pool, scores.fill, select.expand) == (0, 0, 1)

    def test_short_contexts_are_not_scored(self):
        for length, count in ((2051, 3), (2052, 5)):
            found = IndexerPrefillParams(**PREFILL | {"seq_len": length}, pool_state=state())
            assert len(found.launches) == count
        alone = IndexerPrefillParams(**PREFILL | {"seq_len": 2051, "workspace": 0})
        assert names(alone) == ["select"]

    def test_rows_are_chunked(self):
        found = IndexerPrefillParams(
            **PREFILL, pool_state=state(), query_starts=STARTS, max_context_len=65536, scratch_bytes=64 * MiB
        )
        selected = [launch for launch in found.launches if launch.KERNEL == "select"]
        assert [launch.row_start for launch in selected] == [0, 1024, 2048, 3072]
        assert [launch.out_ptr - OUT for launch in selected] == [4 * 2051 * start for start in (0, 1024, 2048, 3072)]
        assert found.launches[0].read_pool == 1
        size = IndexerPrefillRunner.workspace_size(1, 4096, 65536, 64 * MiB)
        assert [part.name for part in size.parts] == ["q_normed", "kbar", "logits"]
        assert size.parts[2].size == 64 * MiB

    @given(rows=st.integers(1, 10**6), context=st.integers(0, 2**22), scratch=st.integers(1, 1 << 32))
    def test_chunks_fit(self, rows, context, scratch):
        chunk = chunk_rows(rows, context, scratch)
        assert 1 <= chunk <= rows
        size = IndexerPrefillRunner.workspace_size(1, rows, context, scratch)
        logits = [part for part in size.parts if part.name == "logits"]
        if logits and logits[0].shape[0] > 1:
            assert logits[0].size <= scratch

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"workspace_bytes": 4096}, "this call needs"),
            ({"workspace": WORK + 16}, "multiple of 256"),
            ({"query_starts": STARTS}, "without a pool_state"),
            ({"pool_state": "state(max_pages_per_seq=8)"}, "widen it to 32"),
        ],
    )
    def test_refuses(self, changes, words):
        if "pool_state" in changes:
            changes = {"pool_state": state(max_pages_per_seq=8)}
        with pytest.raises(ArgumentError, match=words):
            IndexerPrefillParams(**PREFILL | changes)

    def test_an_empty_batch_launches_nothing(self):
        assert IndexerPrefillParams(**PREFILL | {"batch_size": 0, "workspace": 0}).launches == ()


class TestDecode:
    def test_three_launches(self):
        found = IndexerDecodeParams(**DECODE, pool_state=state(), query_len=5, split_counters=STARTS)
        assert names(found) == ["index_pre_decode", "scores_decode", "select"]
        prepare, scores, select = found.launches
        assert prepare.grid == 5
        assert scores.max_blocks == select.num_blocks == 16384
        assert (select.from_end, select.seq_len, select.split_counters) == (1, 5, STARTS)

    def test_short_contexts_are_not_scored(self):
        assert names(IndexerDecodeParams(**DECODE, pool_state=state(), max_context_len=2051)) == [
            "index_pre_decode",
            "select",
        ]

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"query_len": 9}, "from 1 to 8"),
            ({"pool_state": None}, "QsaIndexerPoolState"),
            ({"max_context_len": 65537}, "widen it to 513"),
            ({"workspace": 0}, "workspace is null"),
        ],
    )
    def test_refuses(self, changes, words):
        with pytest.raises(ArgumentError, match=words):
            IndexerDecodeParams(**{**DECODE, "pool_state": state()} | changes)

    @pytest.mark.parametrize("query_len", [1, 4, 8])
    def test_workspace(self, query_len):
        size = IndexerDecodeRunner.workspace_size(32, 65536, query_len)
        assert [(part.name, part.size) for part in size.parts] == [
            ("q_normed", 32 * query_len * 1024),
            ("logits", 32 * query_len * 65536),
        ]


class TestCanImplement:
    def test_yes(self):
        assert IndexerPrefillRunner.can_implement(4, 128, 90, "bf16")
        assert IndexerDecodeRunner.canImplement(4, 128, "sm_80", "fp16")
        assert QsaLayer.can_implement(24, 2, 256, 384, 90, "bf16")

    @pytest.mark.parametrize(
        ("question", "code"),
        [
            ((8, 128, 90, "bf16"), SupportCode.HEADS),
            ((4, 64, 90, "bf16"), SupportCode.HEAD_DIM),
            ((4, 128, 70, "bf16"), SupportCode.SM),
            ((4, 128, 90, "fp8_e4m3"), SupportCode.DTYPE),
        ],
    )
    def test_no(self, question, code):
        answer = IndexerPrefillRunner.can_implement(*question)
        assert not answer
        assert answer.code is code
        assert answer.reason

    @given(*[st.one_of(st.integers(), st.text(), st.none(), st.floats(), st.booleans())] * 4)
    def test_never_raises(self, heads, dim, sm, dtype):
        IndexerDecodeRunner.can_implement(heads, dim, sm, dtype)

    def test_runners_are_not_made(self):
        for runner in (IndexerPrefillRunner, IndexerDecodeRunner, QsaLayer):
            with pytest.raises(ArgumentError, match="static"):
                runner()

    def test_an_unknown_type_is_refused(self):
        for dtype in ("fp8_e4m3", [], None):
            with pytest.raises(UnsupportedError, match="bf16"):
                launches.wanted("select", dtype)


class TestLayer:
    def test_the_halves_agree(self):
        indexer = IndexerPrefillParams(**PREFILL | {"seq_len": 64, "batch_size": 2})
        attention = prefill(indices=OUT, context_lengths=LENGTHS)
        assert QsaLayerPrefillParams(indexer, attention).attention is attention
        for change in ({"indices": OUT + 64}, {"stream": 3}, {"seq_len": 63}, {"query_starts": STARTS}):
            with pytest.raises(ArgumentError, match=next(iter(change))):
                QsaLayerPrefillParams(indexer, prefill(**{"indices": OUT, "context_lengths": LENGTHS} | change))
        typed = dataclasses.replace(attention, dtype="bf16")
        assert QsaLayerPrefillParams(indexer, typed).attention is typed
        other = IndexerPrefillParams(**PREFILL | {"seq_len": 64, "batch_size": 2, "dtype": "fp16"})
        with pytest.raises(ArgumentError, match="dtype is fp16 for the indexer and bf16 for the attention"):
            QsaLayerPrefillParams(other, typed)

    @pytest.mark.parametrize("wrong", [None, "bf16"])
    def test_what_are_no_halves_or_no_params(self, wrong):
        with pytest.raises(ArgumentError, match=r"indexer is .*; it takes IndexerPrefillParams"):
            QsaLayerPrefillParams(wrong, wrong)
        with pytest.raises(ArgumentError, match=r"indexer is .*; it takes IndexerDecodeParams"):
            QsaLayerDecodeParams(wrong, wrong)
        for run, kind in (
            (QsaLayer.prefill, "QsaLayerPrefillParams"),
            (QsaLayer.decode, "QsaLayerDecodeParams"),
            (IndexerPrefillRunner.run, "IndexerPrefillParams"),
            (IndexerDecodeRunner.run, "IndexerDecodeParams"),
        ):
            with pytest.raises(ArgumentError, match=f"params is {wrong!r}; it takes {kind}"):
                run("bf16", wrong)

    def test_a_type_that_is_not_the_tensors(self, monkeypatch):
        ran = []
        monkeypatch.setattr(launches.Launch, "run", lambda self, dtype: ran.append(dtype))
        for cls in (selects.Scores, selects.ScoresDecode, selects.Select):
            monkeypatch.setattr(cls, "run", lambda self, dtype: ran.append(dtype))
        for run, made in (
            (IndexerPrefillRunner.run, IndexerPrefillParams(**PREFILL, dtype="fp16")),
            (IndexerDecodeRunner.run, IndexerDecodeParams(**DECODE, pool_state=state(), dtype="fp16")),
        ):
            with pytest.raises(ArgumentError, match="dtype is 'bf16'; params are of fp16 tensors and take 'fp16'"):
                run("bf16", made)
            assert not ran
            run("half", made)
            assert ran == ["half"] * len(made.launches)
            ran.clear()

    def test_decode_halves_agree(self):
        indexer = IndexerDecodeParams(**DECODE | {"batch_size": 4}, pool_state=state())
        QsaLayerDecodeParams(indexer, decode(indices=OUT, context_lengths=LENGTHS))
        with pytest.raises(ArgumentError, match="query_len"):
            QsaLayerDecodeParams(indexer, decode(indices=OUT, context_lengths=LENGTHS, query_len=2))

    def test_workspace_holds_the_lists_and_the_partials(self):
        size = QsaLayer.decode_workspace_size(4, 2, 256, 65536)
        assert [part.name for part in size.parts] == [
            "q_normed",
            "logits",
            "indices",
            "partial_o",
            "partial_stats",
            "split_counters",
        ]
        assert [part.name for part in QsaLayer.prefill_workspace_size(1, 64).parts] == ["indices"]

"""The operators without a GPU: schemas, fakes, tracing, what they keep, and what they say of tensors on the CPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from runtime_fakes import FakeDriver
from torch._subclasses.fake_tensor import FakeTensorMode

from qsa_cute import torch_ops
from qsa_cute.errors import ArgumentError
from qsa_cute.runners import SparsePrefillRunner, dispatch, sparse_decode, sparse_prefill, tensors

OPS = torch.ops.qsa_cute


def prefill_inputs(device="cpu"):
    def empty(*shape, dtype=torch.bfloat16):
        return torch.empty(shape, dtype=dtype, device=device)

    lists = empty(2, 5, 7, dtype=torch.int32), empty(2, dtype=torch.int32)
    return empty(2, 5, 12, 256), empty(2, 9, 2, 256), empty(2, 9, 2, 256), *lists, 0.1


def decode_inputs(device="cpu"):
    def empty(*shape, dtype=torch.bfloat16):
        return torch.empty(shape, dtype=dtype, device=device)

    lists = empty(3, 2, 4, dtype=torch.int32), empty(3, 1, 7, dtype=torch.int32), empty(3, dtype=torch.int32)
    return empty(3, 1, 12, 256), empty(20, 128, 2, 384), *lists, 0.1


INPUTS = {"sparse_prefill": prefill_inputs, "sparse_decode": decode_inputs}
each = pytest.mark.parametrize("name", INPUTS)


@each
@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_fakes(name, return_lse, device) -> None:
    with FakeTensorMode():
        inputs = INPUTS[name](device)
        out, lse = getattr(OPS, name)(*inputs, return_lse=return_lse)
    assert (out.shape, out.dtype, out.device) == (inputs[0].shape, torch.bfloat16, inputs[0].device)
    assert lse.shape == (inputs[0].shape[:3] if return_lse else (0,))
    assert lse.dtype is torch.float32


@each
def test_tracing_with_dynamic_shapes(name) -> None:
    inputs = INPUTS[name]("meta")
    operator = getattr(OPS, name)
    graph = torch.fx.experimental.proxy_tensor.make_fx(lambda *args: operator(*args)[0], tracing_mode="symbolic")
    assert name in graph(*inputs).code


@each
def test_the_out_form_is_known_to_write(name) -> None:
    schema = getattr(OPS, f"{name}_out").default._schema
    written = {argument.name for argument in schema.arguments if argument.is_write}
    assert {"out", "lse"} <= written
    assert not written & {"q", "k", "v", "kv_pool", "indices", "page_table"}
    assert not any(argument.is_write for argument in getattr(OPS, name).default._schema.arguments)


@each
def test_a_tensor_that_is_not_on_a_gpu(name) -> None:
    inputs = INPUTS[name]()
    with pytest.raises(ArgumentError, match="q is on cpu; it takes a CUDA tensor"):
        getattr(OPS, name)(*inputs)
    with pytest.raises(ArgumentError, match="q is on cpu; it takes a CUDA tensor"):
        getattr(OPS, f"{name}_out")(*inputs, out=torch.empty_like(inputs[0]))


class Launches:
    """A loader of every kernel, and what was launched: (kernel's name, params), in order."""

    def __init__(self) -> None:
        self.all: list[tuple[str, object]] = []
        self.driver = FakeDriver()

    def peek(self, wanted, *_) -> SimpleNamespace:
        def launch(params, *_, **__) -> None:
            self.all.append((wanted.kernel, params))

        return SimpleNamespace(launch=launch, zero=lambda *_: None)

    def missing_reason(self, *_) -> None:
        return None

    def encode_map(self, _, *asked) -> tuple[int, ...]:
        return self.driver.encode_map(*asked)

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.all]

    @property
    def params(self) -> list:
        return [params for _, params in self.all]


@pytest.fixture
def launches(monkeypatch) -> Launches:
    """CPU tensors pass for those of an SM90."""
    found = Launches()

    def view(name, tensor):
        pointer, shape, strides = tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride())
        return tensors._make(name, pointer, shape, strides, str(tensor.dtype), 0)

    monkeypatch.setattr(tensors, "view", view)
    for module in (sparse_prefill, sparse_decode):
        monkeypatch.setattr(module, "default_loader", lambda: found)
    monkeypatch.setattr(dispatch, "_capabilities", {})
    monkeypatch.setattr(sparse_prefill, "ALIGNMENT", 64)  # what the CPU's allocator gives; a GPU's gives 512
    monkeypatch.setattr(torch_ops, "_on_gpu", lambda _: True)
    monkeypatch.setattr(torch_ops, "_stream", lambda _: 7)
    monkeypatch.setattr(torch_ops, "_prefills", torch_ops._Kept())
    monkeypatch.setattr(torch_ops, "_decodes", torch_ops._Kept())
    sparse_prefill.union_for.cache_clear()
    yield found
    sparse_prefill.union_for.cache_clear()


class TestKeptParams:
    """A params object serves every call with the same addresses, sizes, types and constants, and no other."""

    def test_the_same_call_takes_the_same_object(self, launches) -> None:
        inputs, out = decode_inputs(), torch.empty(3, 1, 12, 256, dtype=torch.bfloat16)
        for _ in range(3):
            OPS.sparse_decode_out(*inputs, out=out)
        first, *others = launches.params
        assert all(params is first for params in others)
        assert (first.q_ptr, first.o_ptr, first.stream) == (inputs[0].data_ptr(), out.data_ptr(), 7)

    @pytest.mark.parametrize("number", range(5))
    @pytest.mark.parametrize("change", ["address", "shape", "stride", "type"])
    def test_a_tensor_that_differs_makes_another(self, launches, number, change) -> None:
        """Each of q, the pool, the page table, ids and lengths, at the same address unless that is what differs."""
        inputs, out = list(decode_inputs()), torch.empty(3, 1, 12, 256, dtype=torch.bfloat16)
        OPS.sparse_decode_out(*inputs, out=out)
        before = launches.params[0]
        tensor, kept = inputs[number], torch_ops._of(inputs[number])
        if change == "address":
            tensor = tensor.clone()
        elif change == "shape":
            tensor = tensor[:2]
        elif change == "stride":
            tensor = tensor.as_strided(tensor.shape, [0, *tensor.stride()[1:]])
        else:
            tensor = tensor.view(torch.float16 if tensor.is_floating_point() else torch.float32)
        assert torch_ops._of(tensor) != kept
        inputs[number] = tensor
        try:
            OPS.sparse_decode_out(*inputs, out=out)
        except ArgumentError:
            return  # it does not fit the others: looked at anew, and refused
        assert launches.params[-1] is not before

    def test_constants_and_streams_make_another(self, launches, monkeypatch) -> None:
        *inputs, scale = decode_inputs()
        out, lse = torch.empty(3, 1, 12, 256, dtype=torch.bfloat16), torch.empty(3, 1, 12)
        OPS.sparse_decode_out(*inputs, scale, out=out)
        OPS.sparse_decode_out(*inputs, 2 * scale, out=out)
        OPS.sparse_decode_out(*inputs, scale, "tma", out=out)
        OPS.sparse_decode_out(*inputs, scale, out=out, lse=lse)
        monkeypatch.setattr(torch_ops, "_stream", lambda _: 8)
        OPS.sparse_decode_out(*inputs, scale, out=out)
        launched = launches.params
        assert len({id(params) for params in launched}) == 5
        assert [params.stream for params in launched] == [7, 7, 7, 7, 8]
        assert [params.lse_ptr for params in launched] == [0, 0, 0, lse.data_ptr(), 0]

    def test_a_refused_call_is_not_kept(self, launches) -> None:
        *inputs, _ = decode_inputs()
        for _ in range(2):
            with pytest.raises(ArgumentError, match="finite"):
                OPS.sparse_decode_out(*inputs, float("nan"), out=torch.empty(3, 1, 12, 256, dtype=torch.bfloat16))
        assert not torch_ops._decodes._found

    def test_no_more_than_the_limit_are_kept(self, launches, monkeypatch) -> None:
        monkeypatch.setattr(torch_ops, "KEPT", 4)
        kept = torch_ops._Kept()
        for number in range(100):
            assert kept.get(number % 7, lambda number=number: (number % 7,)) == (number % 7,)
            assert len(kept._found) <= 4


class TestDecodeOfAnyPool:
    """A pool that has no tensor map goes by the kernel that needs none, whose workspace the operator brings."""

    @pytest.mark.parametrize(
        ("change", "kernel"),
        [
            (lambda pool: pool, "sparse_decode_tma"),
            (lambda pool: pool[:, :, :1].expand(-1, -1, 2, -1), "sparse_decode"),
            (lambda pool: pool[:1].expand(20, -1, -1, -1), "sparse_decode"),
            # One head needs no stride.
            (lambda pool: pool.as_strided((20, 128, 1, 384), (98304, 768, 0, 1)), "sparse_decode_tma"),
        ],
    )
    def test_the_kernel(self, launches, change, kernel) -> None:
        q, pool, *others = decode_inputs()
        OPS.sparse_decode(q, change(pool), *others)
        assert launches.names == [kernel]
        assert (launches.params[0].partial_o != 0) == (kernel == "sparse_decode")


class TestSharedGather:
    def inputs(self, rows: int, kv_rows: int = 300):
        def empty(*shape, dtype=torch.bfloat16):
            return torch.empty(shape, dtype=dtype)

        lists = empty(1, rows, 64, dtype=torch.int32), empty(1, dtype=torch.int32)
        return [empty(1, rows, 24, 256), empty(1, kv_rows, 2, 256), empty(1, kv_rows, 2, 256), *lists, 0.1]

    def test_many_rows_get_a_workspace(self, launches) -> None:
        OPS.sparse_prefill(*self.inputs(200))
        assert launches.names == ["union_prepare", "union_prefill", "union_rows"]
        params = launches.params[0]
        assert params.workspace > 0

    def test_few_rows_do_not(self, launches) -> None:
        OPS.sparse_prefill(*self.inputs(64))
        assert launches.names == ["sparse_prefill"]
        assert launches.params[0].workspace == 0

    def test_the_callers_own(self, launches) -> None:
        inputs = self.inputs(200)
        size = SparsePrefillRunner.workspace_size(1, 200, 300, 24, 2, 256, 64).size
        memory = torch.empty(size + 256, dtype=torch.uint8)
        memory = memory[-memory.data_ptr() % 256 :][:size]
        OPS.sparse_prefill_out(*inputs, out=torch.empty_like(inputs[0]), workspace=memory)
        assert launches.params[0].workspace == memory.data_ptr()

    def test_expanded_keys_have_no_tensor_map(self, launches) -> None:
        inputs = self.inputs(200)
        inputs[1] = inputs[1][:, :, :1].expand(-1, -1, 2, -1)
        OPS.sparse_prefill(*inputs)
        assert launches.names == ["sparse_prefill"]

    def test_expanded_keys_and_the_callers_own(self, launches) -> None:
        inputs = self.inputs(200)
        inputs[1] = inputs[1][:, :, :1].expand(-1, -1, 2, -1)
        size = SparsePrefillRunner.workspace_size(1, 200, 300, 24, 2, 256, 64).size
        memory = torch.empty(size + 256, dtype=torch.uint8)
        memory = memory[-memory.data_ptr() % 256 :][:size]
        OPS.sparse_prefill_out(*inputs, out=torch.empty_like(inputs[0]), workspace=memory)
        assert launches.names == ["sparse_prefill"]

    def test_where_the_kernels_are_not_built(self, launches, monkeypatch) -> None:
        loader = sparse_prefill.default_loader()
        monkeypatch.setattr(loader, "missing_reason", lambda wanted, _: wanted.kernel == "union_rows" or None)
        OPS.sparse_prefill(*self.inputs(200))
        assert launches.names == ["sparse_prefill"]

    def test_shapes_that_do_not_fit_get_the_runners_sentence(self, launches) -> None:
        inputs = self.inputs(200)
        with pytest.raises(ArgumentError, match=r"v has shape .* kv_rows is 300 by k"):
            OPS.sparse_prefill(*inputs[:2], inputs[2][:, :99], *inputs[3:])
        with pytest.raises(ArgumentError, match="q has type f32"):
            OPS.sparse_prefill(inputs[0].float(), *inputs[1:])

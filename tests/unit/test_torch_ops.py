"""The operators without a GPU: schemas, fakes, tracing, and what they say of tensors that are not on one."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import qsa_cute.torch_ops  # noqa: F401 - registers the operators
from qsa_cute.errors import ArgumentError

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

# SPDX-License-Identifier: Apache-2.0
"""What crosses processes arrives as it was: tensors with their layouts, and exceptions."""

import pickle

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lockstep import local
from lockstep.errors import NotPicklableError
from lockstep.serialization import (
    dumps_exception,
    dumps_or_refuse,
    in_host_memory,
    join,
    pack,
    split,
    unpack,
)
from lockstep.sync import is_local


def tensors():
    images = torch.randn(2, 3, 4, 5)
    return {
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "bytes": torch.arange(5, dtype=torch.int8),
        "half": torch.ones(5, dtype=torch.bfloat16),
        "transposed": torch.randn(3, 4).t(),
        "channels last": images.to(memory_format=torch.channels_last),
        "one channel": images[:, :1].to(memory_format=torch.channels_last),
        "conjugated": torch.complex(torch.ones(2, 3), torch.ones(2, 3)).conj().t(),
    }


def roundtrips(state):
    head, buffers = split(state)
    sizes = [buffer.numel() for buffer in buffers]
    yield join(head, unpack(pack(buffers), sizes))
    arrays = [buffer.numpy() for buffer in buffers]
    for array in arrays:
        array.flags.writeable = False  # as Ray maps them
    yield join(head, arrays)


def test_tensors_keep_values_dtypes_and_strides():
    sent = tensors()
    for got in roundtrips(sent):
        for name, tensor in sent.items():
            assert torch.equal(got[name], tensor), name
            assert (got[name].dtype, got[name].stride()) == (tensor.dtype, tensor.stride()), name


def test_a_tensor_with_gaps_or_repeats_comes_row_by_row():
    sent = {"gaps": torch.arange(6.0)[::2], "repeats": torch.ones(3).expand(2, 3)}
    assert [buffer.numel() for buffer in split(sent)[1]] == [12, 24]
    for got in roundtrips(sent):
        assert all(torch.equal(got[name], tensor) for name, tensor in sent.items())
        assert all(tensor.is_contiguous() for tensor in got.values())


def test_structure_and_parameters_survive():
    layer = nn.Linear(2, 3)
    sent = {"layer": layer, "again": [layer.weight], "text": ("a", None, {1})}
    for got in roundtrips(sent):
        assert got["again"][0] is got["layer"].weight
        assert got["layer"].weight.requires_grad
        assert torch.equal(got["layer"].bias, layer.bias)
        assert got["text"] == sent["text"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8])
def test_a_parameter_that_leaves_its_device_keeps_marks_and_whether_it_trains(dtype):
    parameter = local(nn.Parameter(torch.ones(3, dtype=dtype), requires_grad=False))
    moved = pickle.loads(pickle.dumps(in_host_memory(parameter)))
    assert is_local(moved)
    assert type(moved) is nn.Parameter
    assert (moved.dtype, moved.requires_grad) == (dtype, False)
    assert in_host_memory(nn.Parameter(torch.ones(3))).requires_grad


def test_a_tensor_that_lies_on_the_cpu_is_not_copied():
    tensor = torch.randn(100)
    _, (buffer,) = split([tensor])
    assert buffer.data_ptr() == tensor.data_ptr()


def test_every_buffer_of_a_block_may_be_of_any_dtype():
    buffers = [torch.ones(size, dtype=torch.uint8) for size in (1, 0, 16, 17)]
    block = pack(buffers)
    assert block.numel() == 64
    found = unpack(block, [1, 0, 16, 17])
    assert [piece.storage_offset() for piece in found] == [0, 16, 16, 32]
    assert all(map(torch.equal, found, buffers))


class Picky(Exception):
    def __init__(self, one, two):
        super().__init__(one)


def test_an_exception_that_would_not_arrive_is_replaced():
    instead = RuntimeError("instead")
    assert str(pickle.loads(dumps_exception(ValueError("as it is"), instead))) == "as it is"
    for error in (Picky(1, 2), KeyboardInterrupt(), SystemExit(1)):
        assert str(pickle.loads(dumps_exception(error, instead))) == "instead"


def test_a_refusal_names_the_value():
    with pytest.raises(NotPicklableError, match="the argument cannot be sent"):
        dumps_or_refuse((each for each in ()), "the argument")


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(24.0).view(4, 6)[:, 1:],
        torch.arange(24.0).view(4, 6)[1:, :2],
        torch.arange(24.0).view(4, 6).t()[2:],
        torch.ones(3, 1).expand(3, 5),
        torch.arange(10, dtype=torch.float16)[3:],
        torch.tensor(1.5),
        torch.empty(0, 3),
    ],
    ids=lambda each: f"{tuple(each.shape)} {each.stride()} {each.storage_offset()}",
)
def test_a_tensor_that_keeps_its_place(tensor):
    """Kernels choose by strides and alignment how they add."""
    arrived = join(*split({"x": tensor}, keeps_places=True))["x"]
    assert torch.equal(arrived, tensor)
    assert arrived.stride() == tensor.stride()
    assert arrived.data_ptr() % 64 == tensor.data_ptr() % 64 or not tensor.numel()


@pytest.mark.slow
def test_a_loader_that_keeps_its_processes_arrives_without_them():
    loader = DataLoader(range(5), 2, num_workers=1, persistent_workers=True)
    batches = list(loader)
    arrived = pickle.loads(dumps_or_refuse({"loader": loader}, "the loader"))["loader"]
    assert arrived.persistent_workers
    assert all(map(torch.equal, arrived, batches))
    assert all(map(torch.equal, loader, batches))


def test_a_loader_of_a_class_of_its_own_arrives_as_it_says_itself():
    class Remade(DataLoader):
        def __reduce__(self):
            return Remade, (range(3),)

    arrived = pickle.loads(dumps_or_refuse(Remade(range(5)), "the loader"))
    assert (type(arrived).__name__, len(arrived)) == ("Remade", 3)

# SPDX-License-Identifier: Apache-2.0
"""A value comes back from a checkpoint as it was, or is refused by its place before the write."""

from __future__ import annotations

import collections
import datetime
import enum
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lockstep import checkpoint
from lockstep.errors import CheckpointError, LockstepError, WrongTypeError


class Tracker:
    best = 0.5


class Phase(enum.IntEnum):
    WARM_UP = 1


class Share(int):
    whole = 21


Point = collections.namedtuple("Point", "x y")


def round_trip(tmp_path: Path, value: Any) -> Any:
    path = checkpoint.write(tmp_path / "c.pt", {"value": value})
    again = torch.load(path, weights_only=True)["value"]
    read = checkpoint.read(path)["value"]
    assert type(again) is type(read)
    return read


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        -(2**63),
        2**2000,
        0.1,
        math.inf,
        1 + 2j,
        "grün \n",
        "",
        b"\x00\xff",
        bytearray(b"ab"),
        (1, (2, [3])),
        [],
        {},
        {1, "a"},
        {1: "int", "1": "str", None: 0, (1, 2): 3, True and 2.5: 4},
        collections.OrderedDict(b=1, a=2),
        collections.Counter({30: 1}),
        torch.float32,
        torch.device("cuda:1"),
        torch.Size([2, 3]),
    ],
    ids=lambda value: "a set" if isinstance(value, set) else repr(value),
)
def test_plain_values_come_back_as_they_were(tmp_path: Path, value: object) -> None:
    read = round_trip(tmp_path, value)
    assert type(read) is type(value)
    assert read == value


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.float64(0.1), 0.1),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3),
        (np.bool_(True), True),
        (np.str_("a"), "a"),
        (np.complex64(1j), 1j),
        (Share(10), 10),
        (torch.torch_version.TorchVersion("2.6.0"), "2.6.0"),
        ({np.int64(1): np.float32(2)}, {1: 2.0}),
    ],
)
def test_numpy_scalars_and_subclasses_become_plain(
    tmp_path: Path, value: object, expected: object
) -> None:
    read = round_trip(tmp_path, value)
    assert type(read) is type(expected)
    assert read == expected


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6.0).reshape(2, 3).T,
        np.arange(6)[::-2],
        np.array([1, 2], dtype=">i4"),
        np.array([True, False]),
        np.array(2.5),
        np.empty((0, 3), dtype=np.float32),
        np.arange(3, dtype=np.uint32),
        np.array([1j]),
    ],
    ids=lambda array: f"{array.dtype}-{array.shape}",
)
def test_arrays_become_tensors(tmp_path: Path, array: np.ndarray) -> None:
    read = round_trip(tmp_path, array)
    assert isinstance(read, torch.Tensor)
    np.testing.assert_array_equal(read.numpy(), array)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 4),
        torch.randn(3, 4).T,
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.randn(1).expand(1000),
        torch.randn(2, 3, dtype=torch.complex64).conj(),
        torch.tensor(3, dtype=torch.uint8),
        torch.randn(0, 3),
        torch.randn(3, dtype=torch.bfloat16),
        torch.tensor([math.nan, -0.0]),
        torch.eye(3).to_sparse(),
        torch.randn(5, requires_grad=True) * 2,
        torch.nn.Parameter(torch.randn(2)),
    ],
    ids=lambda t: f"{t.dtype}-{tuple(t.shape)}-{t.layout}",
)
def test_tensors_come_back_bit_for_bit(tmp_path: Path, tensor: torch.Tensor) -> None:
    read = round_trip(tmp_path, tensor)
    assert type(read) is torch.Tensor
    assert (read.dtype, read.shape, read.requires_grad) == (tensor.dtype, tensor.shape, False)
    torch.testing.assert_close(read, tensor.detach(), rtol=0, atol=0, equal_nan=True)


def test_a_view_does_not_bring_the_whole_tensor(tmp_path: Path) -> None:
    big = torch.zeros(1_000_000)
    views = {"row": big[10:20], "column": big.view(1000, 1000)[:, 0], "none": big[:0]}
    path = Path(checkpoint.write(tmp_path / "c.pt", views))
    assert path.stat().st_size < 20_000
    torch.testing.assert_close(checkpoint.read(path), views)


def test_flat_buckets_are_saved_once(tmp_path: Path) -> None:
    bucket = torch.randn(100_000)
    path = checkpoint.write(tmp_path / "c.pt", {"views": list(bucket.split(1000))})
    assert Path(path).stat().st_size < 1.3 * bucket.nbytes
    assert torch.equal(torch.cat(checkpoint.read(path)["views"]), bucket)


def test_shared_memory_stays_shared(tmp_path: Path) -> None:
    weight, bucket = torch.randn(300, 300), torch.randn(100)
    state = {"in": weight, "out": weight.T, "a": bucket[:50], "also a": bucket[:50]}
    path = checkpoint.write(tmp_path / "c.pt", state)
    assert Path(path).stat().st_size < 1.1 * weight.nbytes
    read = checkpoint.read(path)
    read["in"][0, 1] = 7.0
    read["a"][0] = 8.0
    assert read["out"][1, 0] == 7.0
    assert read["also a"][0] == 8.0


def test_the_state_itself_is_not_changed(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.randn(4))
    state = {"a": np.float64(1), "b": [parameter, parameter[:2]]}
    checkpoint.write(tmp_path / "c.pt", state)
    assert type(state["a"]) is np.float64
    assert state["b"][0] is parameter
    assert parameter.requires_grad


def test_modules_optimizers_and_schedulers(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.Adam(model.parameters())
    lr = torch.optim.lr_scheduler
    schedulers = [
        lr.MultiStepLR(optimizer, [1, 2]),
        lr.OneCycleLR(optimizer, 0.1, total_steps=9),
        lr.ReduceLROnPlateau(optimizer),
        lr.SequentialLR(
            optimizer, [lr.ConstantLR(optimizer), lr.ExponentialLR(optimizer, 0.9)], [3]
        ),
        lr.LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch)),
    ]
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "schedulers": [scheduler.state_dict() for scheduler in schedulers],
        "numpy": np.random.RandomState(0).get_state(),
    }
    read = checkpoint.read(checkpoint.write(tmp_path / "c.pt", state))
    assert read["model"]._metadata == state["model"]._metadata
    torch.testing.assert_close(read["model"], state["model"], rtol=0, atol=0)
    torch.testing.assert_close(read["optimizer"], state["optimizer"], rtol=0, atol=0)
    assert read["schedulers"] == state["schedulers"]
    restored = np.random.RandomState(1)
    restored.set_state([getattr(part, "numpy", lambda part=part: part)() for part in read["numpy"]])
    assert restored.random() == np.random.RandomState(0).random()


@pytest.mark.parametrize("write", [checkpoint.write, checkpoint.write_directory])
def test_a_modules_own_state_keeps_its_layout_versions(tmp_path: Path, write: Any) -> None:
    state = torch.nn.BatchNorm1d(3).state_dict()
    read = checkpoint.read(write(tmp_path / "c", state))
    assert type(read) is collections.OrderedDict
    assert read._metadata == state._metadata
    # Without them torch takes the layout for an old one, and sets the count to 0.
    del read["num_batches_tracked"]
    with pytest.raises(RuntimeError, match="num_batches_tracked"):
        torch.nn.BatchNorm1d(3).load_state_dict(read)


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (Tracker(), "Tracker"),
        (Tracker, "type"),
        (Phase.WARM_UP, "Phase"),
        (Point(1, 2), "Point"),
        (frozenset({1}), "frozenset"),
        (collections.defaultdict(list), "defaultdict"),
        (collections.deque([1]), "deque"),
        (datetime.date(2020, 1, 1), "date"),
        (Path("a"), "PosixPath"),
        (lambda: None, "function"),
        (range(3), "range"),
        (2**3000, "int"),
        (np.array(["a"]), "ndarray of <U1"),
        (np.array([Tracker()]), "ndarray of object"),
        (np.longdouble(1), "longdouble"),
        (np.array([1], dtype=np.longdouble), "ndarray of float128"),
        (np.datetime64("2020-01-01"), "datetime64"),
        (np.datetime64("2020-01-01", "ns"), "datetime64"),  # its `item` is an int
        (np.timedelta64(5, "ns"), "timedelta64"),
        (np.datetime64("NaT", "ns"), "datetime64"),  # its `item` is None
        (torch.ones(2, device="meta"), "Tensor"),
        (torch.nn.Linear(1, 1), "Linear"),
        (torch.nn.UninitializedParameter(), "UninitializedParameter"),
        (torch.Generator(), "Generator"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_needs_code_to_rebuild_is_refused_by_name(
    tmp_path: Path, value: object, kind: str
) -> None:
    path = checkpoint.write(tmp_path / "c.pt", {"epoch": 1})
    before = Path(path).read_bytes()
    state = {"epoch": 2, "operator": {"tracker": value, 3: [0, (value,)]}}
    with pytest.raises(CheckpointError) as caught:
        checkpoint.write(path, state)
    assert f'state["operator"]["tracker"]: {kind}' in str(caught.value)
    assert isinstance(caught.value, LockstepError)
    state["operator"].pop("tracker")
    with pytest.raises(CheckpointError) as caught:
        checkpoint.write(path, state)
    assert f'state["operator"][3][1][0]: {kind}' in str(caught.value)
    assert Path(path).read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["c.pt"]


def test_odd_keys_and_cycles_are_refused_by_name(tmp_path: Path) -> None:
    cycle: list[object] = []
    cycle.append(cycle)
    keyed, items = {torch.ones(1): 1}, {torch.ones(1)}
    for value, name in (
        (cycle, 'state["x"][0]: list'),
        (keyed, 'state["x"], key tensor'),
        (items, 'state["x"], key tensor'),
    ):
        with pytest.raises(CheckpointError) as caught:
            checkpoint.write(tmp_path / "c.pt", {"x": value})
        assert name in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("state", [None, [1], torch.ones(1), "text"])
def test_a_state_is_a_dict(tmp_path: Path, state: Any) -> None:
    with pytest.raises(WrongTypeError, match="a checkpoint holds a dict"):
        checkpoint.write(tmp_path / "c.pt", state)


def test_a_class_that_the_user_allowed_in_this_process_is_still_refused(tmp_path: Path) -> None:
    # It could be read here and nowhere else.
    with (
        torch.serialization.safe_globals([Tracker]),
        pytest.raises(CheckpointError, match="Tracker"),
    ):
        checkpoint.write(tmp_path / "c.pt", {"x": Tracker()})

# SPDX-License-Identifier: Apache-2.0
"""Memory is used again, and never for two copies at once."""

import torch

from lockstep.worker.tensor_pool import TensorPool


def test_memory_that_was_put_back_is_written_over():
    pool = TensorPool()
    state = {"a": torch.ones(3), "b": [torch.ones(2, 2)], "c": (torch.ones(()),), "d": "text"}
    places = {tensor.data_ptr() for tensor in (state["a"], state["b"][0], state["c"][0])}
    pool.put_back(state)
    copies = [pool.copy_of(torch.full(shape, 7.0)) for shape in ((3,), (2, 2), ())]
    assert {copy.data_ptr() for copy in copies} == places
    assert all(copy.eq(7).all() for copy in copies)
    fresh = pool.copy_of(torch.full((3,), 8.0))
    assert fresh.data_ptr() not in places
    assert copies[0].eq(7).all()


def test_what_stands_in_two_places_is_memory_for_one_copy():
    pool, tensor = TensorPool(), torch.zeros(4)
    pool.put_back({"operator": tensor, "operator_by_rank": [tensor, torch.zeros(4)]})
    copies = [pool.copy_of(torch.full((4,), float(number))) for number in range(3)]
    assert [copy.tolist() for copy in copies] == [[number] * 4 for number in (0.0, 1.0, 2.0)]


def test_only_what_fits_is_used():
    pool = TensorPool()
    pool.put_back([torch.zeros(2, 3), torch.zeros(6, dtype=torch.float64)])
    for tensor in (
        torch.ones(3, 2),
        torch.ones(6),
        torch.ones(3, 2).t(),
        torch.ones(2).to_sparse(),
    ):
        copy = pool.copy_of(tensor)
        assert copy.layout == tensor.layout
        assert copy.dtype == tensor.dtype
        assert torch.equal(copy.to_dense(), tensor.to_dense())

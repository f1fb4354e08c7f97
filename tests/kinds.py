# SPDX-License-Identifier: Apache-2.0
"""Buffers that are not simply numbers in memory: two values of each kind."""

import torch


def _quantized(scale):
    return torch.quantize_per_tensor(torch.arange(3.0), scale, 1, torch.qint8)


def _by_channel(scale):
    scales, zeros = torch.tensor([scale, 0.25]), torch.tensor([0, 1])
    return torch.quantize_per_channel(torch.ones(2, 3), scales, zeros, 0, torch.qint8)


def _dense(value):
    return torch.diag(torch.tensor([value, 0.0, torch.nan, 1.0], dtype=torch.float64))


def _nested(value, layout):
    return torch.nested.nested_tensor([torch.full((2,), value), torch.ones(3)], layout=layout)


def _conjugate(value):
    return torch.tensor([1 + 2j, value]).conj()


KINDS = {
    "coo": lambda value: _dense(value).to_sparse(),
    "hybrid": lambda value: _dense(value).to_sparse(1),
    "csr": lambda value: _dense(value).to_sparse_csr(),
    "csc": lambda value: _dense(value).to_sparse_csc(),
    "bsr": lambda value: _dense(value).to_sparse_bsr((2, 2)),
    "quantized": _quantized,
    "by channel": _by_channel,
    "conjugate": _conjugate,
    "negative": lambda value: _conjugate(value * 1j).imag,
    "expanded": lambda value: torch.full((1, 2), value).expand(3, 2),
    "uint16": lambda value: torch.tensor([int(value), 2], dtype=torch.uint16),
    "float8": lambda value: torch.tensor([value, 1.0]).to(torch.float8_e4m3fn),
}
"""By name: a function of a number."""

NESTED = {
    "nested": lambda value: _nested(value, torch.strided),
    "jagged": lambda value: _nested(value, torch.jagged),
}
"""Those that no state may hold."""

# SPDX-License-Identifier: Apache-2.0
"""Splits a model's output for a batch into one output for each sample.

A list holds one entry for each sample, as detection models return them, and so does a tuple of
nothing but plain values, as torch's ``default_collate`` leaves names; all other containers are
trees (see `lockstep.tensor_tree`) whose leaves have one row for each sample. Rejected: guessing by
a list's length whether it holds samples or columns, which is right for one batch and wrong for the
next.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from lockstep.errors import ConfigurationError
from lockstep.tensor_tree import children_of, is_rows, rebuild_container


def split_predictions(output: Any, count: int, place: str = "the output") -> list[Any]:
    """Split `output` into one prediction for each of `count` samples, in the structure of `output`.

    Args:
        output: tensors or arrays of shape (count, ...), lists of `count` entries, tuples of
            `count` plain values, or tuples, mappings and dataclasses of such; a string, a number
            or None by itself belongs to every sample.
        place: the name of `output` in an error.

    Raises:
        ConfigurationError: a part of `output` has not one row for each sample; the message names
            it.
    """
    if isinstance(output, (torch.Tensor, np.ndarray)):
        if output.ndim == 0 or output.shape[0] != count:
            raise _wrong_row_count_error(place, count, f"shape {tuple(output.shape)}")
        return list(output.unbind(0) if isinstance(output, torch.Tensor) else output)
    if isinstance(output, list) or is_rows(output):
        if len(output) != count:
            got = f"a {type(output).__name__} of {len(output)}"
            raise _wrong_row_count_error(place, count, got)
        return list(output)
    if output is None or isinstance(output, (str, bytes, int, float, complex, np.generic)):
        return [output] * count
    children = children_of(output)
    if children is None:
        raise _wrong_row_count_error(place, count, f"a {type(output).__name__}")
    columns = [split_predictions(child, count, f"{place}{key}") for key, child in children]
    return [
        rebuild_container(output, [column[number] for column in columns]) for number in range(count)
    ]


def _wrong_row_count_error(place: str, count: int, got: str) -> ConfigurationError:
    return ConfigurationError(
        "a prediction has not one row for each sample",
        where=place,
        expected=f"{count} rows: a tensor of shape ({count}, ...) or a list of {count} entries, or"
        " tuples, dicts and dataclasses of them",
        got=got,
        fix="return from predict_batch what belongs to the samples, and only that",
    )

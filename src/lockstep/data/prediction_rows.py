# SPDX-License-Identifier: Apache-2.0
"""Splits the predictions for a batch into one for each sample.

A list holds one entry for each sample, as detection models return them; `batch_structure` reads
all other containers. To guess by its length whether a list holds samples or columns would be right
for one batch and wrong for the next.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from lockstep.errors import ConfigurationError
from lockstep.tensor_tree import Key, children_of, rebuild_container


def split_predictions(output: Any, count: int, place: str = "the output") -> list[Any]:
    """One prediction for each of `count` samples, each of the structure that `output` has.

    Args:
        output: tensors or arrays of shape (count, ...), lists of `count` entries, or tuples,
            mappings and dataclasses of such; strings, numbers and None belong to every sample.
        place: what to call it in an error.

    Raises:
        ConfigurationError: something in `output` has not one row for each sample; names its place.
    """
    if isinstance(output, (torch.Tensor, np.ndarray)):
        if output.ndim == 0 or output.shape[0] != count:
            raise _not_rows(place, count, f"shape {tuple(output.shape)}")
        return list(output.unbind(0) if isinstance(output, torch.Tensor) else output)
    if isinstance(output, list):
        if len(output) != count:
            raise _not_rows(place, count, f"a list of {len(output)}")
        return list(output)
    if output is None or isinstance(output, (str, bytes, int, float, complex, np.generic)):
        return [output] * count
    children = children_of(output)
    if children is None and isinstance(output, tuple):  # nothing but plain values
        children = [(Key("[{}]", number), value) for number, value in enumerate(output)]
    if children is None:
        raise _not_rows(place, count, f"a {type(output).__name__}")
    columns = [split_predictions(child, count, f"{place}{key}") for key, child in children]
    return [
        rebuild_container(output, [column[number] for column in columns]) for number in range(count)
    ]


def _not_rows(place: str, count: int, got: str) -> ConfigurationError:
    return ConfigurationError(
        "a prediction has not one row for each sample",
        where=place,
        expected=f"{count} rows: a tensor of shape ({count}, ...) or a list of {count} entries, or"
        " tuples, dicts and dataclasses of them",
        got=got,
        fix="return from predict_batch what belongs to the samples, and only that",
    )

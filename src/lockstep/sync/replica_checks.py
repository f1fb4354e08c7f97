# SPDX-License-Identifier: Apache-2.0
"""Whether all ranks hold the same model: its structure when they attach, its values later."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any, Final

from lockstep.error_texts import first_of
from lockstep.errors import LostUpdateError, ReplicasDifferError, WrongTypeError
from lockstep.hierarchical_sum import host_id
from lockstep.sync.tensor_bits import sum_of_bits

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from lockstep.group import Group
    from lockstep.sync.synced_tensors import Entry, SyncedTensors


_last_number = 0
"""The largest number that a sync of this process has got."""


def compare_structures(group: Group, found: SyncedTensors, settings: Mapping[str, Any]) -> int:
    """Compare structure and settings of all ranks; raise on every rank or on none.

    Returns:
        A number that no earlier sync of these ranks has, the same on all of them: models that look
        alike are told apart by it.

    Collective:
        Every rank. One small all-gather, where the ranks differ three. No payload has moved yet.

    Raises:
        WrongTypeError: this rank's model holds something that cannot be synchronised.
        ReplicasDifferError: the ranks differ; names the first difference and the ranks.
        LostUpdateError: a forward writes to a weight what depends on the rank's batch.
    """
    global _last_number
    mine = {"refused": found.refused, "settings": {**settings}, "structure": found.structure()}
    digest = hashlib.blake2b(json.dumps(mine).encode(), digest_size=16).hexdigest()
    told = group.exchange([_last_number, digest, host_id()])
    group.use_hosts([host for _, _, host in told])
    # Structures are long, and there are as many as ranks: they travel only to name a difference.
    are_equal = len({one for _, one, _ in told}) == 1
    everyone = [mine] if are_equal else group.exchange(mine)
    # A process that has joined later has made fewer syncs; ranks that are threads share the count.
    number: int = 1 + max(last for last, _, _ in told)
    _last_number = max(_last_number, number)
    if found.refused:
        raise WrongTypeError(
            "this model cannot be synchronised by replicate",
            where=group.place,
            got="; ".join(found.refused[:5]),
            fix="hand over the plain module, or mark what is each rank's own: lockstep.local(...)",
        )
    first = everyone[0]
    ranks = [rank for rank, other in enumerate(everyone) if other != first]
    if not ranks:
        if found.batch_dependent and group.size > 1:
            raise batch_dependent_embedding_error(found.batch_dependent)
        return number
    expected, got = _first_difference(first, everyone[ranks[0]])
    raise ReplicasDifferError(
        "the ranks did not build the same model",
        where=f"rank {', '.join(map(str, ranks))} against rank 0",
        expected=expected,
        got=got,
        cause="something in building the model depends on the rank",
        fix="build the same model on every rank, or mark what differs: lockstep.local(...)",
    )


def batch_dependent_embedding_error(names: Mapping[str, list[str]]) -> LostUpdateError:
    """The refusal of embeddings, by the option for which they are refused."""
    if "scale_grad_by_freq" in names:
        return LostUpdateError(
            "an embedding's gradient would depend on how the global batch is split",
            got=f"{', '.join(names['scale_grad_by_freq'])} with scale_grad_by_freq",
            cause="torch divides a row's gradient by how often the row is in one forward's batch:"
            " here in one part of the global batch, not in all of it",
            fix="scale_grad_by_freq=False, and where it is wanted a hook that divides by counts of"
            " all ranks: weight.register_hook(lambda grad: grad / counts.clamp(min=1)[:, None])",
        )
    return LostUpdateError(
        "each rank would write other rows of an embedding in its forward",
        got=f"{', '.join(names['max_norm'])} with max_norm",
        cause="torch scales down the rows that are in the batch, and a rank has its own rows: the"
        " ranks' weights would no longer be the same",
        fix="max_norm=None, and scale all rows in forward or after the optimizer's step:"
        " torch.renorm(weight, 2, 0, max_norm)",
    )


def compare_values(
    group: Group,
    parameters: Mapping[str, torch.Tensor],
    *,
    have_stepped: bool | None,
    shard_size: int = 1,
) -> None:
    """Compare the ranks' values by their bits.

    Args:
        group: the ranks.
        parameters: by name, the same on every rank; of shards, this rank's rows.
        shard_size: so many ranks hold different rows, and the next ones the same again.
        have_stepped: optimizers have, since the broadcast; for the error's words. None: there was
            no broadcast.

    Collective:
        Every rank. Two small all-gathers.

    Raises:
        ReplicasDifferError: on every rank; names the parameters and the ranks.
    """
    everyone = group.exchange([sum_of_bits(param) for param in parameters.values()])
    pairs = [(rank, rank % shard_size) for rank in range(len(everyone))]
    pairs = [(rank, first) for rank, first in pairs if everyone[rank] != everyone[first]]
    if not pairs:
        return
    differ = [
        f"`{name}`"
        for place, name in enumerate(parameters)
        if any(everyone[rank][place] != everyone[first][place] for rank, first in pairs)
    ]
    firsts = sorted({first for _, first in pairs})
    what, cause, fix = _TEXTS[have_stepped]
    raise ReplicasDifferError(
        what,
        where=f"rank {', '.join(str(rank) for rank, _ in pairs)} against rank"
        f" {', '.join(map(str, firsts))}",
        got=first_of(differ, 5),
        cause=cause,
        fix=fix,
    )


_TEXTS: Final = {
    None: (
        "the ranks' weights differ",
        "nothing has made them equal: a model built without a seed, or loaded on some ranks only",
        "torch.manual_seed(0) before the model is built; or send rank 0's weights to all, as"
        " lockstep.replicate(model) does",
    ),
    False: (
        "the ranks' weights differ before the first step",
        "they were changed after they had been made equal, on some ranks only: weights loaded on"
        " rank 0 after register()?",
        "load them before register(), which sends rank 0's to all; or load them on every rank",
    ),
    True: (
        "the ranks' weights differ",
        "a rank has changed gradients or weights by itself: noise or a clip of its own, a hook on"
        " one rank, a learning rate that follows a local loss, weights loaded on some ranks",
        "compute it on all ranks from the same numbers (lockstep.gather, a seed without the rank)",
    ),
}


def _first_difference(expected: dict[str, Any], got: dict[str, Any]) -> tuple[str, str]:
    if expected["refused"] != got["refused"]:
        return f"refused {expected['refused']}", f"refused {got['refused']}"
    ours, theirs = expected["settings"], got["settings"]
    for name in ours | theirs:
        if ours.get(name) != theirs.get(name):
            return f"{name}={ours.get(name)}", f"{name}={theirs.get(name)}"
    ours, theirs = expected["structure"], got["structure"]
    for one, other in zip(ours, theirs, strict=False):
        if one != other:
            return _describe(one), _describe(other)
    longer = ours if len(ours) > len(theirs) else theirs
    extra = _describe(longer[min(len(ours), len(theirs))])
    missing = "nothing more"
    return (extra, missing) if longer is ours else (missing, extra)


def _describe(entry: Entry) -> str:
    kind, name, shape, dtype, strides, requires_grad = entry
    grad = "" if requires_grad or kind == "buffer" else ", frozen"
    laid_out = strides if isinstance(strides, str) else f"strides {tuple(strides)}"
    return f"{kind} `{name}` {tuple(shape)} {dtype} {laid_out}{grad}"

# SPDX-License-Identifier: Apache-2.0
"""What `ShardedTransport` refuses: changes to a sharded model of which units take no notice."""

from __future__ import annotations

from lockstep.errors import GradientNotReducedError, NotAvailableError, UnknownParameterError


def written_error(name: str, where: str) -> NotAvailableError:
    return NotAvailableError(
        "a forward has written to a weight of a model in shards",
        where=where,
        got=f"`{name}`",
        cause="its unit frees what was written, and gathers the old weight for the backward",
        fix='write before the model is called, or in after_step; or register(shard="whole")',
    )


def assigned_error(name: str, where: str) -> NotAvailableError:
    return NotAvailableError(
        "a tensor was assigned to `.data` of a weight in shards, and is not its value",
        where=where,
        got=f"`{name}`",
        cause="a shard keeps its rows beside `.data`, and optimizers and gathers read those",
        fix="parameter.copy_(tensor) under torch.no_grad()",
    )


def assigned_gradient_error(name: str, where: str) -> NotAvailableError:
    return NotAvailableError(
        "a tensor was assigned to `.data` of a gradient in shards, and is not its value",
        where=where,
        got=f"the gradient of `{name}`",
        cause="a shard keeps its rows beside `.data`, and optimizers read those",
        fix="p.grad.copy_(tensor), or p.grad.mul_(factor)",
    )


def replaced_error(got: str, where: str) -> UnknownParameterError:
    return UnknownParameterError(
        "a parameter of a sharded model was replaced after register()",
        where=where,
        got=got,
        cause="it was assigned, tied to another one, or taken out (`pop`, a parametrization); its"
        " unit gathers the weight that it had at register()",
        fix="tie and replace before register(); load values in place: load_state_dict(state),"
        " without assign=True",
    )


def penalty_error(name: str, where: str) -> GradientNotReducedError:
    return GradientNotReducedError(
        "a gradient comes to a sharded parameter outside of its unit's forward",
        where=where,
        got=f"`{name}`",
        cause="a loss of the weights themselves (parameter.full_tensor(), a norm of them)",
        fix="compute it in the unit's forward before its output, and return it; or use the"
        " optimizer's weight_decay",
    )


def gradient_of_gradient_error(where: str) -> NotAvailableError:
    return NotAvailableError(
        "gradients of gradients are not available for a model in shards",
        where=where,
        got="torch.autograd.grad(create_graph=True)",
        fix='register(shard="whole")',
    )


def gradient_asked_error(where: str) -> NotAvailableError:
    return NotAvailableError(
        "gradients of sharded weights cannot be asked for",
        where=where,
        got="torch.autograd.grad(..., parameters of a model in shards)",
        cause="they would be of this rank's own loss, and of whole weights",
        fix="loss.backward(), or loss.backward(inputs=[...]) for some weights alone, and"
        ' `parameter.grad`; or register(shard="whole")',
    )


def unnoticed_error(where: str) -> GradientNotReducedError:
    return GradientNotReducedError(
        "a backward has brought gradients to a sharded model without its units' notice",
        where=where,
        cause="its loss was made of what a module has kept (self.aux), and of no output",
        fix="return it from forward, and add it to the loss of the model's output",
    )

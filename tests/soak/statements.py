# SPDX-License-Identifier: Apache-2.0
"""What stands around the gradients of a step, and before the loop: pieces of program text.

``{i}`` is the number of a parameter, ``{rank}`` that of a rank that behaves in another way than
its peers (in one process no rank does).
"""

from __future__ import annotations

from textwrap import dedent


def _text(text: str) -> str:
    return dedent(text).strip()


_P = "ps[{i} % len(ps)]"
_NEXT = "ps[({i} + 1) % len(ps)]"


def _post(act: str) -> str:
    return f"def act(p):\n    {act}\n\nhandle = {_P}.register_post_accumulate_grad_hook(act)"


SETUP: dict[str, str] = {
    # Hooks of the user's own on the gradient, seen before it is accumulated.
    "hook_read": f"seen = []\nhandle = {_P}.register_hook(lambda g: seen.append(g.sum().item()))",
    "hook_scale": f"handle = {_P}.register_hook(lambda g: g * 0.5)",
    "hook_decay": f"handle = {_P}.register_hook(lambda g, p={_P}: g + 0.1 * p.detach())",
    "hook_clamp": f"handle = {_P}.register_hook(lambda g: g.clamp(-0.05, 0.05))",
    "hook_normalise": f"handle = {_P}.register_hook(lambda g: g / (g.norm() + 1))",
    # Torch's own, on several tensors.
    "hooks_read": (
        "seen = []\n"
        f"handle = torch.autograd.graph.register_multi_grad_hook([{_P}, {_NEXT}], lambda gs:"
        " seen.append(sum(g.sum().item() for g in gs if g is not None)))"
    ),
    "hooks_any": (
        f"handle = torch.autograd.graph.register_multi_grad_hook([{_P}, {_NEXT}], lambda g: None,"
        " mode='any')"
    ),
    # And after.
    "post_read": "seen = []\n" + _post("seen.append(p.grad.sum().item())"),
    "post_scale": _post("p.grad.mul_(0.5)"),
    "post_decay": _post("p.grad.add_(p.detach(), alpha=0.1)"),
    "post_clamp": _post("p.grad.clamp_(-0.05, 0.05)"),
    "post_replace": _post("p.grad = p.grad * 0.5"),
    "post_step": _text(
        """
        steppers = {p: world.watch(torch.optim.SGD([p], lr=0.05)) for p in ps}

        def step_at_once(p):
            steppers[p].step()
            p.grad = None

        for p in ps:
            p.register_post_accumulate_grad_hook(step_at_once)
        """
    ),
    # On modules: gradients of one rank's rows, as they flow.
    "module_read": (
        "shapes = []\n"
        "handle = model.register_full_backward_hook(lambda m, i, o: shapes.append(o[0].shape))"
    ),
    "module_scale": ("handle = model.register_full_backward_pre_hook(lambda m, o: (o[0] * 0.5,))"),
    # The user's own memory for gradients; goes with `clearing` "flat".
    "flat": _text(
        """
        flat = torch.zeros(sum(p.numel() for p in ps), dtype=ps[0].dtype)
        for p, part in zip(ps, flat.split([p.numel() for p in ps])):
            p.grad = part.view(p.shape)
        """
    ),
    "frozen": f"{_P}.requires_grad_(False)",
}

BEFORE: dict[str, str] = {
    "evaluate": "with torch.no_grad():\n    model(world.look()[0])",
    "evaluate_inference": "with torch.inference_mode():\n    model(world.look()[0])",
    "forward_only": "loss(model(world.look()[0]), *world.look()[1:])",
    "freeze": f"{_P}.requires_grad_(False)",
    "unfreeze": f"{_P}.requires_grad_(True)",
    "remove_hook": "handle.remove()",
    "double_again": "model.double()",
    "through_float": "model.float().double()",
    "load_state": "model.load_state_dict(copy.deepcopy(model.state_dict()))",
    "load_optimizer": "optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))",
    "deepcopy_weights": "average = [p.detach().clone() for p in ps]",
    "broadcast_buffers": "sync.broadcast_buffers()",
    "caught_before": _text(
        """
        try:
            raise KeyError("a broken sample")
        except KeyError:
            pass
        """
    ),
    "caught_forward": _text(
        """
        try:
            loss(model(world.look()[0][:, :2]), *world.look()[1:])
        except RuntimeError:
            pass
        """
    ),
    "caught_in_closure": _text(
        """
        def broken():
            raise KeyError("a broken closure")

        try:
            optimizer.step(broken)
        except KeyError:
            pass
        """
    ),
    # Everywhere alike; what it leaves is cleared. How far it came is no part of the truth.
    "caught_inside": _text(
        f"""
        had = {{p for p in ps if p.grad is not None}}

        def explode(g):
            raise KeyError("a broken hook")

        fuse = {_P}.register_hook(explode)
        try:
            loss(model(world.look()[0]), *world.look()[1:]).backward()
        except KeyError:
            fuse.remove()
        optimizer.zero_grad(set_to_none={{to_none}})
        for p in ps:
            if p not in had:
                p.grad = None
            world.see(p.grad)
        """
    ),
    # In the middle of the model: some parameters have their gradient by then.
    "caught_midway": _text(
        """
        had = {p for p in ps if p.grad is not None}

        def explode(g):
            raise KeyError("a broken layer")

        def arm(layer, inputs, output):
            if isinstance(output, torch.Tensor) and output.requires_grad:
                output.register_hook(explode)

        layers = list(modules[0].modules())
        fuse = layers[{i} % len(layers)].register_forward_hook(arm)
        try:
            loss(model(world.look()[0]), *world.look()[1:]).backward()
        except KeyError:
            pass
        fuse.remove()
        optimizer.zero_grad(set_to_none={to_none})
        for p in ps:
            if p not in had:
                p.grad = None
            world.see(p.grad)
        """
    ),
    "caught_inside_one": _text(
        f"""
        had = {{p for p in ps if p.grad is not None}}

        def explode(g):
            if world.rank == {{rank}}:
                raise KeyError("a broken hook")

        fuse = {_P}.register_hook(explode)
        try:
            loss(model(world.look()[0]), *world.look()[1:]).backward()
        except KeyError:
            pass
        fuse.remove()
        optimizer.zero_grad(set_to_none={{to_none}})
        for p in ps:
            if p not in had:
                p.grad = None
            world.see(p.grad)
        """
    ),
    "new_parameter": _text(
        """
        net = modules[0]
        net.late = nn.Parameter(torch.ones(3, dtype=torch.float64))
        net.register_forward_hook(lambda m, i, o: o * m.late)
        optimizer.add_param_group({"params": [net.late]})
        ps.append(net.late)
        """
    ),
    "replaced_parameter": _text(
        """
        name, old = next(iter(modules[0].named_parameters()))
        path, _, key = name.rpartition(".")
        setattr(modules[0].get_submodule(path), key, nn.Parameter(old.detach() * 0.5))
        ps = list(modules[0].parameters())
        optimizer.param_groups[0]["params"] = ps
        """
    ),
    "tie": "modules[0][2].weight = modules[0][0].weight",
    "untie": "net = modules[0]\nnet[2].weight = nn.Parameter(net[0].weight.detach().clone())\n"
    "optimizer.add_param_group({'params': [net[2].weight]})\nps.append(net[2].weight)",
    "other_data": f"{_P}.data = {_P}.data.clone()",
    "other_shape": "ps[-1].data = ps[-1].data.repeat(1)[:1]",
    "extra_backward": _text(
        """
        if world.rank == {rank}:
            loss(model(world.look()[0]), *world.look()[1:]).backward()
        """
    ),
    "hold": "held = [p.grad for p in ps]\ncopies = [g if g is None else g.clone() for g in held]",
}

AFTER: dict[str, str] = {
    "clip_norm": "nn.utils.clip_grad_norm_(ps, 0.1)",
    # Torch raises where no parameter has a gradient, as on a rank without rows, and where one
    # is complex.
    "clip_value": _text(
        """
        real = [p for p in ps if not p.is_complex()]
        if any(p.grad is not None for p in real):
            nn.utils.clip_grad_value_(real, 0.05)
        """
    ),
    "scale_function": "for p in ps:\n    if p.grad is not None:\n        p.grad = p.grad * 0.5",
    "scale_in_place": "for p in ps:\n    if p.grad is not None:\n        p.grad.mul_(0.5)",
    "normalise": "for p in ps:\n    if p.grad is not None:\n        p.grad /= 1 + p.grad.norm()",
    "noise": _text(
        """
        noise = torch.Generator().manual_seed(3)
        for p in ps:
            if p.grad is not None:
                p.grad += 0.1 * torch.randn(p.shape, generator=noise, dtype=p.dtype)
        """
    ),
    "decay": "for p in ps:\n    if p.grad is not None:\n        p.grad.add_(p.detach(), alpha=0.1)",
    "drop_one": f"{_P}.grad = None",
    "zero_one": f"if {_P}.grad is not None:\n    {_P}.grad.zero_()",
    "swap_data": _text(
        """
        for p in ps:
            if p.grad is not None:
                p.grad.data = 0.5 * p.grad.data
        """
    ),
    "flat_scale": "flat.mul_(0.5)",
    "flat_read": "world.see(flat)",
    "see_held": "for g in held:\n    world.see(g)",
    "see_hooked": "world.see(torch.tensor(seen, dtype=torch.float64))",
}

UPDATE: dict[str, str] = {
    "step": "optimizer.step()",
    "twice": "optimizer.step()\noptimizer.step()",
    "none": "",
    "one_rank_leaves_out": "if world.rank != {rank}:\n    optimizer.step()",
}

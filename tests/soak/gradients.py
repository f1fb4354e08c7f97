# SPDX-License-Identifier: Apache-2.0
"""How the gradients of one step come about: pieces of program text.

A piece is text with lines ``BACKWARD(loss)``, which `soak.text` writes as the spec's way to run
a backward has it, and ``BATCH``, the next rows. ``BACKWARD(loss, KEEPING)`` keeps the graph.
"""

from __future__ import annotations

from textwrap import dedent

LOSS = "loss(model(x), y, w)"

_GRADS = f"torch.autograd.grad({LOSS}, live, allow_unused=True)"
_LIVE = "live = [p for p in ps if p.requires_grad]"


def _text(text: str) -> str:
    return dedent(text).strip()


GRADIENTS: dict[str, str] = {
    "plain": f"BATCH\nBACKWARD({LOSS})",
    "several": f"BATCH\nBACKWARD({LOSS})\nBATCH\nBACKWARD({LOSS})",
    "retained": f"BATCH\nvalue = {LOSS}\nBACKWARD(value, KEEPING)\nBACKWARD(value)",
    "shared_forward": (
        "BATCH\noutput = model(x)\n"
        "BACKWARD(loss(output, y, w), KEEPING)\nBACKWARD(loss(output, 0 * y, w))"
    ),
    "window": f"WINDOW\n    BATCH\n    BACKWARD({LOSS})\nBATCH\nBACKWARD({LOSS})",
    "window_of_three": (
        f"WINDOW\n    BATCH\n    BACKWARD({LOSS})\n    BATCH\n    BACKWARD({LOSS})\n"
        f"BATCH\nBACKWARD({LOSS})"
    ),
    # In one process the second backward adds to the tensor that is held.
    "window_held": (
        f"WINDOW\n    BATCH\n    BACKWARD({LOSS})\n    within = [p.grad for p in ps]\n"
        f"BATCH\nBACKWARD({LOSS})\n"
        "for g, p in zip(within, ps):\n"
        "    world.see(p.grad if g is None or world.rank is None else g)"
    ),
    "window_closed_by_hand": f"WINDOW\n    BATCH\n    BACKWARD({LOSS})\nsync.reduce_pending()",
    "window_left_open": f"WINDOW\n    BATCH\n    BACKWARD({LOSS})",
    "forgotten_window": (
        f"WINDOW\n    BATCH\n    BACKWARD({LOSS})\nworld.give_up_window()\nBATCH\nBACKWARD({LOSS})"
    ),
    "nothing": "",
    "idle": "sync.reduce_pending()",
    "threaded": _text(
        f"""
        BATCH
        with ThreadPoolExecutor(1) as threads:
            value = threads.submit(lambda: {LOSS}).result()
        BACKWARD(value)
        """
    ),
    "threaded_backward": _text(
        f"""
        BATCH
        value, trouble = {LOSS}, []

        def run():
            try:
                value.backward()
            except Exception as error:
                trouble.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        if trouble:
            raise trouble[0]
        """
    ),
    "autograd_backward": f"BATCH\ntorch.autograd.backward([{LOSS}])",
    "only_some": f"BATCH\n{LOSS}.backward(inputs=[p for p in ps[:1] if p.requires_grad])",
    "conflicting": _text(
        f"""
        BATCH
        BACKWARD({LOSS})
        first = [p.grad for p in ps]
        optimizer.zero_grad(set_to_none=True)
        BATCH
        BACKWARD({LOSS})
        for p, g in zip(ps, first):
            if p.grad is not None and g is not None:
                p.grad = p.grad + g * torch.tanh((p.grad * g).sum())
        """
    ),
    "input_penalty": _text(
        """
        BATCH
        x = x.clone().requires_grad_(True)
        slope, = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        BACKWARD(loss(model(x) + slope.square().sum(1, keepdim=True), y, w))
        """
    ),
    "learning_to_learn": _text(
        """
        BATCH
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        outputs = []
        for row, goal, one in zip(x.split(1), y.split(1), w.split(1)):
            inner = (model(row) - goal).square().sum()
            steps = torch.autograd.grad(inner, list(named.values()), create_graph=True)
            fast = {name: p - 0.1 * g for (name, p), g in zip(named.items(), steps)}
            outputs.append(torch.func.functional_call(model, fast, (row,)))
        BACKWARD(loss(torch.cat(outputs), y, w))
        """
    ),
    "scaled": _text(
        f"""
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        BATCH
        BACKWARD(scaler.scale({LOSS}))
        scaler.unscale_(optimizer)
        """
    ),
    "gradient_argument": (
        f"BATCH\nBACKWARD({LOSS}, gradient=torch.tensor(0.5, dtype=torch.float64))"
    ),
    "two_players": _text(
        """
        BATCH
        fake = model(x)
        judge_optimizer.zero_grad()
        BACKWARD(loss(judge(fake.detach()), y, w))
        judge_optimizer.step()
        BACKWARD(loss(judge(fake), 0 * y, w))
        """
    ),
    "two_players_sharing": _text(
        """
        BATCH
        fake = model(x)
        verdict = judge(fake)
        judge_optimizer.zero_grad()
        BACKWARD(loss(verdict, y, w), KEEPING)
        BACKWARD(loss(verdict, 0 * y, w))
        judge_optimizer.step()
        """
    ),
    # What has to be refused.
    "by_hand": _text(
        f"""
        BATCH
        {_LIVE}
        for p, g in zip(live, {_GRADS}):
            p.grad = g
        """
    ),
    "added_before": _text(
        f"""
        BATCH
        {_LIVE}
        for p, g in zip(live, {_GRADS}):
            p.grad = g if p.grad is None or g is None else p.grad + g
        BATCH
        BACKWARD({LOSS})
        """
    ),
    "added_after": _text(
        f"""
        BATCH
        BACKWARD({LOSS})
        BATCH
        {_LIVE}
        for p, g in zip(live, {_GRADS}):
            if g is not None and p.grad is not None:
                p.grad += g
        """
    ),
    "added_after_functionally": _text(
        f"""
        BATCH
        BACKWARD({LOSS})
        BATCH
        {_LIVE}
        for p, g in zip(live, {_GRADS}):
            if g is not None and p.grad is not None:
                p.grad = p.grad + g
        """
    ),
    "weights_by_hand": _text(
        f"""
        BATCH
        {_LIVE}
        found = {_GRADS}
        with torch.no_grad():
            for p, g in zip(live, found):
                if g is not None:
                    p -= 0.05 * g
        BATCH
        BACKWARD({LOSS})
        """
    ),
    # No optimizer steps afterwards, and nothing is reduced.
    "weights_by_hand_only": _text(
        f"""
        for _ in range(2):
            BATCH
            {_LIVE}
            found = {_GRADS}
            with torch.no_grad():
                for p, g in zip(live, found):
                    if g is not None:
                        p -= 0.05 * g
        """
    ),
    "weights_by_hand_alone": _text(
        f"""
        BATCH
        {_LIVE}
        with sync.no_sync():
            found = {_GRADS}
        with torch.no_grad():
            for p, g in zip(live, found):
                if g is not None:
                    p -= 0.05 * world.average(g)
        """
    ),
    "graph_of_gradients": _text(
        f"""
        BATCH
        {LOSS}.backward(create_graph=True)
        sum(p.grad.abs().square().sum() for p in ps if p.grad is not None).backward()
        for p in ps:
            p.grad = None if p.grad is None else p.grad.detach()
        """
    ),
    "closure": _text(
        f"""
        BATCH

        def closure():
            optimizer.zero_grad()
            BACKWARD({LOSS})
            world.note(optimizer)
            return world.average({LOSS}.detach())

        optimizer.step(closure)
        """
    ),
    "closure_of_sgd": _text(
        f"""
        BATCH

        def closure():
            optimizer.zero_grad()
            BACKWARD({LOSS})
            world.note(optimizer)

        optimizer.step(closure)
        """
    ),
}

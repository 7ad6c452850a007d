"""Training steps of which one update adds up many passes."""

import torch
from torch import nn

PASSES, ROWS, WIDTH = 10, 512, 256


class Answer(nn.Module):
    """A network that returns its loss too, as those of language models do."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, rows):
        found = self.body(rows)
        return {"found": found, "loss": found.square().mean()}


def _trained(one_pass, network=None, after=lambda: None):
    network = (network or nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout())).cuda()
    optimizer = torch.optim.Adam(network.parameters())
    criterion = nn.MSELoss()

    def step():
        for _ in range(PASSES):
            rows = torch.randn(ROWS, WIDTH, device="cuda")
            one_pass(network, rows, criterion)
        after()
        optimizer.step()
        optimizer.zero_grad()

    return step


def accumulating():
    """A loss outside the network, as most have it."""
    return _trained(
        lambda network, rows, criterion: (criterion(network(rows), rows) / PASSES).backward()
    )


def inside():
    """A loss that the network computes, under autocast and a scaler."""
    scaler = torch.amp.GradScaler("cuda")

    def one_pass(network, rows, criterion):
        with torch.autocast("cuda", torch.float16):
            found = network(rows)
        scaler.scale(found["loss"] / PASSES).backward()

    return _trained(one_pass, Answer())


def keeping():
    """All results are kept until the update."""
    kept = []

    def one_pass(network, rows, criterion):
        found = network(rows)
        criterion(found, rows).backward()
        kept.append(found.detach())

    return _trained(one_pass, after=kept.clear)


def keeping_inside():
    """What a layer inside returns is kept until the update."""
    kept = []
    network = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
    network[0].register_forward_hook(lambda layer, given, found: kept.append(found.detach()))
    return _trained(
        lambda network, rows, criterion: criterion(network(rows), rows).backward(),
        network,
        kept.clear,
    )


def together():
    """One backward pass for all."""
    losses = []

    def after():
        sum(losses).backward()
        losses.clear()

    return _trained(
        lambda network, rows, criterion: losses.append(criterion(network(rows), rows)), after=after
    )


def differing():
    """Every third batch is larger than the others."""
    sizes = []

    def one_pass(network, rows, criterion):
        sizes.append(0)
        rows = rows if len(sizes) % 3 else rows.repeat(4, 1)
        criterion(network(rows), rows).backward()

    return _trained(one_pass)


def asking():
    """Gradients that are asked for by weight."""

    def one_pass(network, rows, criterion):
        weights = list(network.parameters())
        for one, gradient in zip(
            weights, torch.autograd.grad(criterion(network(rows), rows), weights), strict=True
        ):
            one.grad = gradient if one.grad is None else one.grad + gradient

    return _trained(one_pass)


def looking():
    """A script that looks at how its network's result came about."""

    def one_pass(network, rows, criterion):
        found = network(rows)
        assert found.grad_fn.name() == "NativeDropoutBackward0"
        criterion(found, rows).backward()

    return _trained(one_pass)


def alternating():
    """A generator and a critic that sees what it made."""
    critic = nn.Linear(WIDTH, 1).cuda()
    return _trained(lambda network, rows, criterion: critic(network(rows)).mean().backward())


def own_update():
    """Weights that a script updates itself, after every fifth pass; no optimizer steps until all are over."""
    count = []

    def one_pass(network, rows, criterion):
        criterion(network(rows), rows).backward()
        count.append(1)
        if len(count) % 5 == 0:
            for one in network.parameters():
                one.data.sub_(one.grad, alpha=0.1)
                one.grad = None

    return _trained(one_pass)


def frozen_later():
    """The first layer is trained in the first passes of an update alone."""
    network = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
    count = []

    def one_pass(network, rows, criterion):
        network[0].requires_grad_(len(count) % PASSES < 5)
        count.append(1)
        criterion(network(rows), rows).backward()

    return _trained(one_pass, network)


def in_eval_later():
    """The dropout of a network is switched off on the way, but the network itself is not."""
    network = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(), nn.Linear(WIDTH, WIDTH))
    count = []

    def one_pass(network, rows, criterion):
        network[1].train(len(count) % PASSES >= 5)
        count.append(1)
        criterion(network(rows), rows).backward()

    return _trained(one_pass, network)

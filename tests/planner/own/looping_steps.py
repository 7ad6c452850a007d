"""Training steps of which a value says how often a loop goes round."""

import torch
from torch import nn

ROWS, WIDTH = 256, 64


def _trained(forward, seed=0):
    torch.manual_seed(seed)
    layer = nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.Adam(layer.parameters())

    def step():
        optimizer.zero_grad()
        forward(layer, torch.randn(ROWS, WIDTH)).square().sum().backward()
        optimizer.step()

    return step


def solved():
    """A solver whose passes go on until the values stay as they are."""

    def forward(layer, state):
        change = torch.tensor(1.0)
        while change > 1e-2:
            following = torch.tanh(0.5 * layer(state))
            change, state = (following - state).abs().mean(), following
        return state

    return _trained(forward)


def left():
    """The same loop, which is left by a condition inside."""

    def forward(layer, state):
        while True:
            following = torch.tanh(0.5 * layer(state))
            change, state = (following - state).abs().mean(), following
            if change.item() < 1e-2:
                break
        return state

    return _trained(forward)


def balanced():
    """Sinkhorn's iterations, of which there are at most some."""

    def forward(layer, state):
        costs = torch.cdist(layer(state), state)
        rows = columns = costs.new_zeros(ROWS)
        for _ in range(20):
            before = rows
            rows = -torch.logsumexp(columns - costs, 1)
            columns = -torch.logsumexp(rows[:, None] - costs, 0)
            if (rows - before).abs().mean().item() < 1e-3:
                break
        return (rows[:, None] + columns - costs).exp() * costs

    return _trained(forward)


def rejecting():
    """A solver that knows its end, and takes a step or not by an error that it computes."""

    def forward(layer, state):
        time, size = torch.tensor(0.0), torch.tensor(0.3)
        while time < 1:
            following = state + size * torch.tanh(layer(state))
            if (following - state).abs().mean() < 0.2:
                state, time = following, time + size
            else:
                size = size * 0.7
        return state

    return _trained(forward)


def counting():
    """A loop of known length that reads values on its way, more often than one is waited for that may have no end."""

    def forward(layer, state):
        count, total = torch.tensor(0), 0.0
        while count < 120:
            total += state[0, 0].item()
            count = count + 1
        return layer(state)

    return _trained(forward)


def folded(as_array=False, seed=0):
    """Rows that are padded to a multiple of a number that the layer says, as a period by its spectrum."""

    def forward(layer, state):
        found = layer(state)
        order = found.abs().mean(0).argsort(descending=True)[:2]
        period = 37 + int(order.numpy()[0] if as_array else order[0])
        left = -len(found) % period
        padded = torch.cat([found, found.new_zeros(left, WIDTH)])
        return padded.view(-1, period, WIDTH).relu()

    return _trained(forward, seed)

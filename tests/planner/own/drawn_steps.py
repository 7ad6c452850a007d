"""Training steps that hold more or less by numbers that they draw."""

import random
from types import SimpleNamespace

import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset, default_collate

ROWS, WIDTH, DEPTH = 4096, 256, 8


def _trained(forward, layers=DEPTH):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    network = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers)).to(device)
    optimizer = torch.optim.SGD(network.parameters(), 0.1)

    def step():
        forward(network, device).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def layers_left_out():
    """As many layers as Python's generator says, often none."""

    def forward(network, device):
        rows = torch.randn(ROWS, WIDTH, device=device, requires_grad=True)
        for layer in network[: random.randrange(DEPTH + 1)]:
            rows = layer(rows).relu()
        return rows

    return _trained(forward)


def one_of_three():
    """One of three networks, of which the last is the smallest."""

    def forward(network, device):
        rows = torch.randn(ROWS, WIDTH, device=device)
        for layer in network[2 * int(torch.randint(3, (1,))) + 1 :]:
            rows = layer(rows).relu()
        return rows

    return _trained(forward, 6)


class Shifted:
    """Samples that are shifted by chance, as a loader's augmentation does."""

    def __len__(self):
        return 64

    def __getitem__(self, place):
        return torch.zeros(WIDTH) + random.random()


def augmented():
    batches = iter(DataLoader(Shifted(), 16))
    return _trained(lambda network, device: network[0](next(batches).to(device)))


class Batch:
    """Samples as attributes of an object within an object, as graphs have them."""

    def __init__(self, samples):
        self.store = SimpleNamespace(tensors=default_collate(samples))


def as_many_as_read(is_object=False):
    """A size that is read from the batch, so that a plan takes its values."""
    data = TensorDataset(torch.rand(64, WIDTH), torch.randint(2, 5, (64,)))
    batches = iter(DataLoader(data, 16, collate_fn=Batch if is_object else None))

    def forward(network, device):
        batch = next(batches)
        rows, counts = batch.store.tensors if is_object else batch
        return network[0](rows.to(device).repeat(int(counts.sum()), 1))

    return _trained(forward)


def mined(is_placeholder=False):
    """Pairs that the network decides on, joined where they begin with the same sample."""
    labels = torch.zeros(48, dtype=torch.int64)

    def forward(network, device):
        places = network[0](torch.randn(48, WIDTH, device=device))
        kinds = (labels if is_placeholder else torch.randint(8, (48,))).to(device)
        is_same, is_near = kinds[:, None] == kinds, torch.cdist(places, places) < 1e3
        first, like = torch.where(is_same & is_near)
        again, other = torch.where(~is_same & is_near)
        pair, rival = torch.where(first[:, None] == again)
        return places[like[pair]] - places[other[rival]] + places[first[pair]]

    return _trained(forward, 1)


def kept_patches():
    """A quarter of the patches is kept, of which the layers hold many times as much as their selection."""

    def forward(network, device):
        kept = torch.rand(8, 512).argsort(1) < 128
        rows = torch.randn(8, 512, WIDTH, device=device)[kept.to(device)]
        for layer in network:
            rows = layer(rows).relu()
        return rows

    return _trained(forward)


class Poisson:
    """Batches of the samples that a mask selects, each with the same chance."""

    def __init__(self, samples, rate):
        self.samples, self.rate = samples, rate

    def __iter__(self):
        while True:
            mask = torch.rand(self.samples) < self.rate
            yield mask.nonzero(as_tuple=False).reshape(-1).tolist()


def sampled_by_a_mask():
    """One of eight samples in each batch, on the whole."""
    samples = TensorDataset(torch.zeros(256, 64, WIDTH))
    batches = iter(DataLoader(samples, batch_sampler=Poisson(256, 1 / 8)))

    def forward(network, device):
        (rows,) = next(batches)
        rows = rows.to(device)
        for layer in network:
            rows = layer(rows).relu()
        return rows

    return _trained(forward)


def in_any_order(count=40, is_seeded=False, has_generator=False):
    """Samples of growing length, four of them in a batch, in the order that a loader or a sampler draws."""
    if is_seeded:
        torch.manual_seed(0)
    samples = [torch.zeros(16 * length, WIDTH) for length in range(1, count + 1)]
    generator = torch.Generator().manual_seed(2) if has_generator else None
    order = RandomSampler(samples, generator=generator)
    batches = iter(DataLoader(samples, 4, sampler=order, collate_fn=nn.utils.rnn.pad_sequence))

    def forward(network, device):
        rows = next(batches).to(device)
        for layer in network:
            rows = layer(rows).relu()
        return rows

    return _trained(forward)


def chosen_weights(by="scatter", width=1536, is_known=True):
    """As many weights as an order says are trained: the places of a mask of more than 1 MiB."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    weight = torch.randn(width, width, device=device)
    order = torch.randperm(width * width)[: 4 * width].to(device)
    if by == "scatter":
        mask = torch.zeros(width, width).to(device, torch.bool).view(1, -1)
        mask = mask.scatter_(1, order[None], torch.ones_like(order[None], dtype=torch.bool))
        mask = mask.view(width, width)
    else:
        mask = torch.zeros(width, width, device=device)
        mask.view(-1)[order] = 1
    if not is_known:
        mask = mask.bool()
        mask |= torch.rand_like(weight) > 0.5
    places = torch.where(mask == 1)
    trained = nn.Parameter(torch.zeros(len(places[0]), device=device))
    optimizer = torch.optim.SGD([trained], 0.1)

    def step():
        optimizer.zero_grad()
        changed = weight.clone()
        changed[places] += trained
        (torch.randn(8, width, device=device) @ changed).square().mean().backward()
        optimizer.step()

    return step

"""Training steps on one graph, whose matrices and labels a script reads from files and has as arrays."""

import numpy
import torch
from torch import nn
from torch.nn import functional


def graph(nodes, edges):
    """The labels, and the adjacency with as many entries, of a graph."""
    numbers = numpy.random.default_rng(0)
    adjacency = numpy.zeros((nodes, nodes))
    adjacency[numpy.divmod(numbers.permutation(nodes * nodes)[:edges], nodes)] = 1.0
    names = numpy.eye(7, dtype=int)[numpy.arange(nodes) % 7]
    return torch.LongTensor(numpy.where(names)[1]), adjacency


def convolved(nodes=2708, edges=8192, device="cpu"):
    """A graph convolution: the classes are counted, and the adjacency is a sparse matrix."""
    labels, adjacency = graph(nodes, edges)
    places = torch.from_numpy(numpy.vstack(adjacency.nonzero()))
    adjacency = torch.sparse_coo_tensor(places, torch.ones(edges), (nodes, nodes)).to(device)
    coder = nn.Linear(64, labels.max().item() + 1).to(device)
    labels = labels.to(device)
    optimizer = torch.optim.SGD(coder.parameters(), lr=0.1)

    def step():
        optimizer.zero_grad()
        found = torch.spmm(adjacency, coder(torch.rand(nodes, 64, device=device)))
        functional.cross_entropy(found, labels).backward()
        optimizer.step()

    return step


def attended(nodes=1024, edges=4096, device="cpu"):
    """Features of both ends of each edge, which is read from a dense adjacency in the step."""
    adjacency = torch.FloatTensor(graph(nodes, edges)[1]).to(device)
    coder = nn.Linear(64, 64).to(device)
    optimizer = torch.optim.SGD(coder.parameters(), lr=0.1)

    def step():
        optimizer.zero_grad()
        first, second = adjacency.nonzero().t()
        found = coder(torch.rand(nodes, 64, device=device))
        torch.cat((found[first], found[second]), 1).square().mean().backward()
        optimizer.step()

    return step


class Convolution(nn.Module):
    """A layer with the adjacency as a sparse buffer."""

    def __init__(self, adjacency):
        super().__init__()
        self.coder = nn.Linear(64, 64)
        self.register_buffer("adjacency", adjacency.to_sparse())
        self.register_buffer("is_edge", (adjacency > 0).to_sparse(), persistent=False)

    def forward(self, x):
        return torch.sparse.mm(self.adjacency, self.coder(x))


def converted(nodes=1024, edges=4096, device="cpu"):
    """A convolution whose sparse adjacency is made of a dense one."""
    model = Convolution(torch.FloatTensor(graph(nodes, edges)[1])).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        optimizer.zero_grad()
        model(torch.rand(nodes, 64, device=device)).square().mean().backward()
        optimizer.step()

    return step


def adapted(device="cpu"):
    """A dense weight and trained numbers at places of a sparse one, as sparse adapters add them."""
    weight = torch.rand(256, 256, device=device)
    places = torch.randint(256, (2, 512), device=device)
    numbers = nn.Parameter(torch.zeros(512, device=device))
    optimizer = torch.optim.Adam([numbers])

    def step():
        optimizer.zero_grad()
        changed = weight + torch.sparse_coo_tensor(places, numbers * 2, (256, 256))
        (torch.rand(32, 256, device=device) @ changed.t()).square().mean().backward()
        optimizer.step()

    return step


def weighed(device="cpu"):
    """Trained numbers of a graph's edges, which are multiplied as a sparse matrix."""
    places = torch.randint(256, (2, 512), device=device)
    numbers = nn.Parameter(torch.rand(512, device=device))
    optimizer = torch.optim.Adam([numbers])

    def step():
        optimizer.zero_grad()
        matrix = torch.sparse_coo_tensor(places, numbers, (256, 256))
        torch.sparse.mm(matrix, torch.rand(256, 64, device=device)).square().mean().backward()
        optimizer.step()

    return step

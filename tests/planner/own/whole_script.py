"""A script that makes everything in its first lines, on the card by default."""

import argparse

import torch
from torch import nn

arguments = argparse.ArgumentParser()
arguments.add_argument("--rate", type=float, default=0.1)
rate = arguments.parse_args().rate

torch.set_default_device("cuda")
network = nn.Linear(256, 256)
criterion = nn.CrossEntropyLoss(weight=torch.ones(256))
optimizer = torch.optim.Adam(network.parameters(), lr=rate)


def build():
    def step():
        optimizer.zero_grad()
        labels = torch.zeros(8, dtype=torch.long)
        criterion(network(torch.rand(8, 256)), labels).backward()
        optimizer.step()

    return step

"""A training script that knows nothing of mpt: two networks updated by turns, a loader, files, a moving average."""

import argparse
import copy
import os

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset


class Trainer:
    """Holds the networks in attributes, as many scripts do."""

    def __init__(self, options):
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        wide = options.width
        blocks = (nn.Sequential(nn.Linear(wide, wide), nn.ReLU()) for _ in range(3))
        self.generator = nn.Sequential(nn.Linear(16, wide), nn.Sequential(*blocks)).to(self.device)
        self.critic = nn.Sequential(nn.Linear(wide, wide), nn.ReLU(), nn.Linear(wide, 1)).to(
            self.device
        )
        self.average = copy.deepcopy(self.generator).requires_grad_(False)
        self.generators = torch.optim.Adam(self.generator.parameters())
        self.critics = torch.optim.Adam(self.critic.parameters())

    def train(self, loader, every):
        for number, (real,) in enumerate(loader):
            real = real.to(self.device)
            self.critics.zero_grad()
            fake = self.generator(torch.randn(len(real), 16, device=self.device))
            loss = self.critic(fake.detach()).mean() - self.critic(real).mean()
            loss.backward()
            self.critics.step()
            if number % every == every - 1:
                self.generators.zero_grad()
                functional.softplus(-self.critic(fake)).mean().backward()
                self.generators.step()
                for mean, value in zip(
                    self.average.parameters(), self.generator.parameters(), strict=True
                ):
                    mean.lerp_(value.detach(), 0.1)
                torch.save(self.generator.state_dict(), "runs/generator.pt")
                with open("runs/log.txt", "a") as log:
                    log.write(f"{number} {loss.item():.3f}\n")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--samples", type=int, default=400)
    options = parser.parse_args()
    os.makedirs("runs", exist_ok=True)
    if os.path.exists("runs/old.txt"):
        os.remove("runs/old.txt")
    with open("runs/log.txt", "w") as log:
        log.write("begun\n")
    data = TensorDataset(torch.randn(options.samples, options.width))
    loader = DataLoader(data, options.batch_size, shuffle=True, num_workers=options.workers)
    Trainer(options).train(loader, options.every)


if __name__ == "__main__":
    main()

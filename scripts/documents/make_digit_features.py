"""Train the classifier behind `mpt.metrics.distances.digit_features` and write its weights into the package.

Usage: OMP_NUM_THREADS=1 python scripts/documents/make_digit_features.py
Seeded, about two seconds. The committed file is what counts: another torch version may train to slightly other weights,
and figures taken with other weights cannot be compared.
"""

from pathlib import Path

import numpy
import torch
from torch import nn

from mpt.data.digits import read_digits

STEPS, BATCH_SIZE, NOISE = 1500, 128, 0.1


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    images, labels = read_digits("train")
    inputs = images.flatten(1)
    network = nn.Sequential(
        nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)
    )
    optimizer = torch.optim.Adam(network.parameters(), lr=2e-3)
    for _ in range(STEPS):
        chosen = torch.randint(len(inputs), (BATCH_SIZE,))
        noisy = inputs[chosen] + NOISE * torch.randn(BATCH_SIZE, 64)
        loss = nn.functional.cross_entropy(network(noisy), labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    test_images, test_labels = read_digits("test")
    with torch.no_grad():
        correct = (network(test_images.flatten(1)).argmax(1) == test_labels).float().mean().item()
    layers = [network[0], network[2], network[4]]
    arrays = {f"weight{n}": layer.weight.detach().numpy() for n, layer in enumerate(layers)}
    arrays |= {f"bias{n}": layer.bias.detach().numpy() for n, layer in enumerate(layers)}
    target = Path(__file__).resolve().parents[2] / "mpt" / "metrics" / "digit_features.npz"
    numpy.savez(target, **arrays)
    print(f"{target}: test accuracy {correct:.4f}, {target.stat().st_size} bytes")


if __name__ == "__main__":
    main()

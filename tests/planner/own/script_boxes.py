"""A script whose tensors are as large as the most boxes in a picture, each picture's boxes taken by a mask."""

import argparse

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

PICTURES = 24
options = argparse.ArgumentParser()
options.add_argument("--stream", action="store_true")
options.add_argument("--lengths", action="store_true")
words = options.parse_args()


def picture(number: int) -> tuple[Tensor, Tensor]:
    """Return a picture and its boxes, 2 to 6 of them: (boxes, 4)."""
    return torch.randn(3, 32, 32), torch.rand(2 + number % 5, 4)


class Pictures(Dataset):
    def __len__(self) -> int:
        return PICTURES

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        return picture(number)


class Stream(IterableDataset):
    def __iter__(self):
        return map(picture, range(PICTURES))


def together(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return the pictures, and all boxes with the number of their picture: (boxes, 5)."""
    numbered = [
        nn.functional.pad(boxes, (1, 0), value=place) for place, (_, boxes) in enumerate(samples)
    ]
    return torch.stack([one for one, _ in samples]), torch.cat(numbered)


def padded(boxes: Tensor, count: int) -> Tensor:
    """Return each picture's boxes, with zeros behind: (pictures, most boxes, 4)."""
    if words.lengths:
        lengths = torch.bincount(boxes[:, 0].long(), minlength=count)
        owners = torch.arange(count, device=boxes.device).repeat_interleave(lengths)
        places = (
            torch.arange(len(owners), device=boxes.device) - (lengths.cumsum(0) - lengths)[owners]
        )
        found = boxes.new_zeros(count, int(lengths.max()), 4)
        found[owners, places] = boxes[:, 1:]
        return found
    numbers = boxes[:, 0]
    _, counts = numbers.unique(return_counts=True)
    found = boxes.new_zeros(count, counts.max(), 4)
    for number in range(count):
        mask = numbers == number
        if places := mask.sum():
            found[number, :places] = boxes[mask, 1:]
    return found


device = "cuda" if torch.cuda.is_available() else "cpu"
network = nn.Conv2d(3, 4, 3, stride=2).to(device)
optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
data = Stream() if words.stream else Pictures()
for pictures, boxes in DataLoader(data, batch_size=4, collate_fn=together):
    wanted = padded(boxes.to(device), len(pictures))
    found = network(pictures.to(device)).flatten(2).transpose(1, 2)
    apart = (found.unsqueeze(1) - wanted.unsqueeze(2)).square()
    inside = apart.detach().amax(3) < 1
    optimizer.zero_grad()
    (apart.sum(3) * inside).mean().backward()
    optimizer.step()

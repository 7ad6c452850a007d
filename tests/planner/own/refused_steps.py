"""Steps that end in an error with real tensors; a mask, a count of labels and states of another dtype."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch._higher_order_ops.scan import scan


def masked(device: str = "cuda", rows: int = 3) -> Any:
    """A loss over a mask of too few rows."""
    model = nn.Linear(4, 4, device=device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    batch = torch.randn(4, 4, device=device), torch.randn(rows, device=device)

    def step(batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        model(batch[0])[batch[1] > 0].sum().backward()
        optimizer.step()

    return model, optimizer, batch, step


def states(device: str = "cuda", dtype: str = "float32") -> Any:
    """An LSTM in half whose first state is in float32."""
    model = nn.LSTM(4, 4, device=device, dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    batch = torch.randn(3, 2, 4, device=device, dtype=torch.bfloat16)

    def step(batch: torch.Tensor) -> None:
        first = torch.zeros(1, 2, 4, device=device, dtype=getattr(torch, dtype))
        model(batch, (first, first))[0].sum().backward()
        optimizer.step()

    return model, optimizer, batch, step


def named_alone() -> Any:
    """A script that asks which device is the card, and puts everything on the host by name."""
    device = torch.device("cpu")
    if device.type == torch.device("cuda").type and not torch.cuda.is_available():
        device = torch.device("cpu")
    model = nn.Linear(256, 256).to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    batch = torch.randn(4, 256, device=device)

    def step(batch: torch.Tensor) -> None:
        model(batch).sum().backward()
        optimizer.step()

    return model, optimizer, batch, step


def labelled_in_bytes(device: str = "cuda") -> Any:
    """Labels and a mask of bytes, which kernels take."""
    model = nn.Linear(4, 4, device=device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    batch = torch.randn(4, 4, device=device), torch.zeros(4, dtype=torch.uint8, device=device)

    def step(batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        logits = model(batch[0])
        kept = torch.where(batch[1][:, None], logits, 0.0)
        nn.functional.cross_entropy(kept, batch[1]).backward()
        optimizer.step()

    return model, optimizer, batch, step


def counted_without_a_card() -> Any:
    """A step that names no card and counts the places of a small mask, as the gradient of a minimum does too."""
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    batch = torch.randn(4, 8)

    def step(batch: torch.Tensor) -> None:
        found = model(batch)
        assert (found > 0).sum(1).shape == (4,)
        found.amin(dim=1).sum().backward()  # torch 2.11 has no gradient of aminmax
        optimizer.step()

    return model, optimizer, batch, step


def of_functions(name: str) -> Any:
    """An operator to which functions are given."""
    model = nn.Linear(8, 8).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    batch = torch.randn(4, 8, device="cuda")

    def step(batch: torch.Tensor) -> None:
        found = model(batch)
        if name == "cond":
            found = torch.cond(found.sum() > 0, torch.sin, torch.cos, (found,))
        else:
            found = scan(lambda sums, row: (sums + row, sums * 1), found[0], found)[1]
        found.sum().backward()
        optimizer.step()

    return model, optimizer, batch, step


def asks_of_the_build() -> Any:
    """A network in bfloat16 where the build of torch is said to have it, as torch's tutorial on FSDP asks."""
    is_ready = (
        torch.version.cuda
        and torch.cuda.is_bf16_supported()
        and tuple(map(int, torch.version.cuda.split("."))) >= (11, 0)
        and torch.distributed.is_nccl_available()
        and torch.cuda.nccl.version() >= (2, 10)
    )
    dtype = torch.bfloat16 if is_ready else torch.float32
    model = nn.Linear(256, 256, device="cuda", dtype=dtype)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    batch = torch.randn(4, 256, device="cuda", dtype=dtype)

    def step(batch: torch.Tensor) -> None:
        model(batch).sum().backward()
        optimizer.step()

    return model, optimizer, batch, step

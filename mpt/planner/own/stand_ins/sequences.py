"""Packed sequences and CTC's loss in somebody's own step, whose shapes follow from lengths that a plan does not know.

A packed sequence is planned as if each had the length of the longest, which is the most that it can hold, or the
length of the padded batch if a script does not write its lengths out: cuDNN's kernels take packed data of that size as
they take a padded batch. The loss of CTC is planned for labels as long as their tensor allows; on CUDA it keeps a table
of (batch, times, 2 labels + 1) and makes another in backward (`aten/src/ATen/native/cuda/LossCTC.cu`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

RECURRENT = (torch._VF.lstm, torch._VF.gru, torch._VF.rnn_tanh, torch._VF.rnn_relu)
"""Functions that layers call; for packed data with the sizes of each time's batch in second place."""
PACK, UNPACK = torch._VF._pack_padded_sequence, torch._VF._pad_packed_sequence


class PackedSequences:
    """Packs, computes and unpacks sequences as if all were as long as the longest."""

    def __init__(self, largest: Callable[[Tensor], int | None]) -> None:
        """`largest`: returns the largest of a tensor's values, None if they are not known."""
        self.largest = largest
        self.count = 0
        """How often sequences were packed."""
        self._batches: dict[int, tuple[Tensor, int]] = {}
        """id(sizes of each time's batch) -> (those sizes, which so stay alive, samples)."""

    def handles(self, func: Any, args: tuple[Any, ...]) -> bool:
        """Return whether a call is about packed sequences."""
        if func is Tensor.__getitem__:
            return id(args[0]) in self._batches
        return func in (PACK, UNPACK) or (func in RECURRENT and id(args[1]) in self._batches)

    def call(self, func: Any, args: tuple[Any, ...]) -> Any:
        """Return the result of a call that is handled here."""
        if func is PACK:
            return self.pack(*args)
        if func is Tensor.__getitem__:  # a layer asks for the largest batch
            return torch.tensor(self._batches[id(args[0])][1])
        return self.unpack(*args) if func is UNPACK else self.recur(func, *args)

    def pack(self, padded: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
        """Return (times x samples, features) and the sizes of each time's batch."""
        by_time = padded.transpose(0, 1) if batch_first else padded
        by_time = by_time[: self.largest(lengths) or None]  # 0 is not known, too
        times, samples = by_time.shape[:2]
        sizes = torch.empty(times, dtype=torch.int64)
        self._batches[id(sizes)] = sizes, samples
        self.count += 1
        return by_time.clone(memory_format=torch.contiguous_format).flatten(0, 1), sizes

    def recur(self, layer: Any, data: Tensor, sizes: Tensor, *others: Any) -> tuple[Tensor, ...]:
        """Return (times x samples, hidden) and the last states."""
        padded = data.view(len(sizes), self._batches[id(sizes)][1], *data.shape[1:])
        result, *states = layer(padded, *others, False)
        return result.flatten(0, 1), *states

    def unpack(
        self, data: Tensor, sizes: Tensor, batch_first: bool, padding: float, total: int
    ) -> tuple[Tensor, Tensor]:
        """Return (times, samples, features), or samples first, and each one's length."""
        samples = self._batches[id(sizes)][1]
        padded = data.view(len(sizes), samples, *data.shape[1:]).clone()
        if total > len(sizes):
            missing = (0,) * (2 * padded.dim() - 1) + (total - len(sizes),)
            padded = functional.pad(padded, missing, value=padding)
        return padded.transpose(0, 1) if batch_first else padded, torch.empty(
            samples, dtype=torch.int64
        )


def most_alignments(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    *options: Any,
    **named: Any,
) -> tuple[Tensor, Tensor]:
    """Return each sample's loss (samples,) and CTC's table, from (times, samples, labels)."""
    times, samples = log_probs.shape[:2] if log_probs.dim() == 3 else (log_probs.shape[0], 1)
    longest = targets.shape[1] if targets.dim() == 2 else targets.numel()
    return log_probs.new_empty(samples), log_probs.new_empty(samples, times, 2 * longest + 1)


def alignments_gradient(
    gradient: Tensor,
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    losses: Tensor,
    table: Tensor,
    *options: Any,
) -> Tensor:
    """Return the gradient of (times, samples, labels); a second table lives as long as it is computed."""
    result = torch.empty_like(log_probs)
    torch.empty_like(table)
    return result


def counted(tensor: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """Return as many counts as a script says there are at least; without that the largest value is not known."""
    return tensor.new_empty(minlength, dtype=torch.int64 if weights is None else weights.dtype)


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    *options: Any,
    **named: Any,
) -> Tensor:
    """Call torch's with lengths on the device of the rest: for fake tensors it divides by them on their own device."""
    device = log_probs.device
    times, labels = (
        torch.as_tensor(input_lengths).to(device),
        torch.as_tensor(target_lengths).to(device),
    )
    return functional.ctc_loss(log_probs, targets, times, labels, *options, **named)

"""Packed sequences and CTC's loss in somebody's own step, whose shapes follow from lengths.

Sequences whose lengths are known are packed as torch packs them: cuDNN takes their rows as those of one sequence, and
the CPU's layers are called with the true sizes of each time's batch. Others are planned as if each had the length of
the padded batch, which is the most that they can hold. The loss of CTC is planned for labels as long as their tensor
allows; on CUDA it keeps a table of (batch, times, 2 labels + 1) and makes another in backward
(`aten/src/ATen/native/cuda/LossCTC.cu`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._mode_utils import no_dispatch
from torch.utils.weak import WeakIdKeyDictionary

from mpt.planner.device.matching_shapes import check_alignments

RECURRENT = (torch._VF.lstm, torch._VF.gru, torch._VF.rnn_tanh, torch._VF.rnn_relu)
"""Functions that layers call; for packed data with the sizes of each time's batch in second place."""
PACK, UNPACK = torch._VF._pack_padded_sequence, torch._VF._pad_packed_sequence


@dataclass(frozen=True)
class Packed:
    """The form of a packed batch of `samples` sequences."""

    rows_of: Sequence[int]
    """Of each time's batch."""
    lengths: Sequence[int]
    """Of each sequence, the longest first."""

    @property
    def samples(self) -> int:
        return len(self.lengths)


class PackedSequences:
    """Packs, computes and unpacks sequences of known lengths, or as if all were as long as the longest."""

    def __init__(
        self, lengths: Callable[[Tensor], Sequence[int] | None], bound: Callable[[Tensor], Tensor]
    ) -> None:
        """`lengths`: returns a tensor's values, None if they are not known; `bound`: notes a result at its bound."""
        self.lengths = lengths
        self.bound = bound
        self.count = 0
        """How often sequences of unknown lengths were packed."""
        self._packed: Any = WeakIdKeyDictionary()
        """The sizes of each time's batch -> its form."""

    def handles(self, func: Any, args: tuple[Any, ...]) -> bool:
        """Return whether a call is about packed sequences."""
        if func is Tensor.__getitem__:
            return self._find(args[0]) is not None
        asks = func is UNPACK or func in RECURRENT
        return func is PACK or (asks and self._find(args[1]) is not None)

    def _find(self, sizes: Any) -> Packed | None:
        return self._packed.get(sizes) if isinstance(sizes, Tensor) else None

    def call(self, func: Any, args: tuple[Any, ...]) -> Any:
        """Return the result of a call that is handled here."""
        if func is PACK:
            return self.pack(*args)
        packed: Packed = self._packed[args[0] if func is Tensor.__getitem__ else args[1]]
        if func is Tensor.__getitem__:  # a layer asks for the largest batch
            return torch.tensor(packed.rows_of)[args[1]]
        if func is UNPACK:
            return unpack(packed, args[0], *args[2:])
        return recur(packed, func, args[0], *args[2:])

    def pack(self, padded: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
        """Return (rows, features) and the sizes of each time's batch."""
        times, samples = padded.shape[:2][:: -1 if batch_first else 1]
        if lengths.numel() != samples:
            raise RuntimeError(
                f"pack_padded_sequence: {samples} samples have {lengths.numel()} lengths, and need as many"
            )
        known = self.lengths(lengths)
        is_known = known is not None and min(known) > 0  # 0 is not known, too
        held = sorted(known, reverse=True) if known and is_known else [times] * samples
        rows_of = [sum(length > time for length in held) for time in range(held[0])]
        rows: Tensor = _Rows.apply(padded, sum(rows_of))  # type: ignore[no-untyped-call]
        sizes = torch.tensor(rows_of)
        self._packed[sizes] = Packed(rows_of, held)
        if is_known:
            return rows, sizes
        self.count += 1
        return self.bound(rows), sizes


class _Rows(torch.autograd.Function):
    """Rows of a padded batch, as torch's own operator allocates them, and zeros of the batch in backward."""

    @staticmethod
    def forward(ctx: Any, padded: Tensor, count: int) -> Tensor:
        ctx.shape = padded.shape
        return padded.new_empty((count, *padded.shape[2:]))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.new_zeros(ctx.shape), None


def recur(packed: Packed, layer: Any, data: Tensor, *others: Any) -> tuple[Tensor, ...]:
    """Return (rows, hidden) and the last states."""
    if data.device.type == "cpu":
        with no_dispatch():
            sizes = torch.tensor(packed.rows_of)
        found: tuple[Tensor, ...] = layer(data, sizes, *others)
        return found
    result, *states = layer(data.unsqueeze(1), *others, False)
    return result.squeeze(1), *states


def unpack(
    packed: Packed, data: Tensor, batch_first: bool, padding: float, total: int
) -> tuple[Tensor, Tensor]:
    """Return (times, samples, features), or samples first, and each one's length."""
    times, rows = max(total, len(packed.rows_of)), iter(packed.rows_of)
    padded = data.new_full((times, packed.samples, *data.shape[1:]), padding)
    start = time = 0
    for count, equal in groupby(rows):
        end = time + len(list(equal))
        part = data[start : start + count * (end - time)]
        padded[time:end, :count].copy_(part.view(end - time, count, *data.shape[1:]))
        start, time = start + len(part), end
    return padded.transpose(0, 1) if batch_first else padded, torch.tensor(packed.lengths)


def most_alignments(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    *options: Any,
    **named: Any,
) -> tuple[Tensor, Tensor]:
    """Return each sample's loss (samples,) and CTC's table, from (times, samples, labels)."""
    check_alignments(log_probs, targets, input_lengths, target_lengths)
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
    dtype = torch.int64 if weights is None else torch.float64
    if weights is not None and weights.dtype == torch.float32:
        dtype = torch.float32
    return tensor.new_empty(minlength, dtype=dtype)


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

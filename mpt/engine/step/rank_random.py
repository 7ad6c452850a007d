"""Random numbers inside a forward (dropout, noise layers) when the batch is shared out over ranks.

Random numbers of an update for the whole batch come from one stream that all ranks have alike. Inside the forward each
rank needs numbers of its own, or all would drop the same units; and afterwards all must be at one place again, whatever
each has used. So a forward on several ranks takes its numbers from a stream made of the common one and the rank, and
the common one moves on by one number if any rank has used some. The common stream is saved, which any number of
ranks can continue with.
"""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from mpt import accelerator
from mpt.data.pictures.seeds import mix

LARGEST = 2**62


class RankRandom:
    """Changes to a rank's own stream; `go_on` returns to the common one. Streams are real even if tensors are fake."""

    @unset_fake_temporarily()
    def __init__(self, device: torch.device, rank: int) -> None:
        self.device = device
        self.common = self._states()
        peek = torch.Generator()
        peek.set_state(self.common[0])
        torch.manual_seed(mix(int(torch.randint(LARGEST, (), generator=peek)), rank))
        self.own = self._states()

    def _states(self) -> list[torch.Tensor]:
        on_device = accelerator.random_state(self.device)
        return [torch.get_rng_state(), *([] if on_device is None else [on_device])]

    @unset_fake_temporarily()
    def were_used(self) -> bool:
        """Return whether random numbers were used since."""
        return not all(
            torch.equal(now, before) for now, before in zip(self._states(), self.own, strict=True)
        )

    def go_on(self, used: bool) -> None:
        """Return to the common stream, moved on by one number if any rank has used numbers of its own."""
        torch.set_rng_state(self.common[0])
        for state in self.common[1:]:
            accelerator.set_random_state(self.device, state)
        if used:
            torch.randint(LARGEST, ())
            if self.common[1:]:
                torch.rand((), device=self.device)

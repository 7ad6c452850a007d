"""Gradients of a tensor that is used twice are planned to be added up where a card adds them up.

The recorder watches the pretend card's own backward pass: what it would plan, and what was allocated without it.
`tests/planner/trace/test_gradient_sums.py` has the same uses of a tensor on a CPU.
"""

from tests.planner.trace.test_gradient_sums import USES, planned_births, step


def test_gradients_are_added_up_in_place_where_the_card_does_so() -> None:
    from tests.cuda_rehearsal.device_memory import CardMemory

    taken: list[int] = []
    malloc = CardMemory.malloc

    def noted(self: CardMemory, key: int, size: int, stream: int) -> str:
        taken.append(size)
        return malloc(self, key, size, stream)

    CardMemory.malloc = noted  # type: ignore[method-assign]
    for name, use in USES.items():
        taken.clear()
        step(use, "cuda")
        wanted = sum(size > 512 for size in taken)
        assert planned_births(use, "cuda") == wanted, name

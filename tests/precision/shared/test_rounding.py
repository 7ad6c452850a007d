import torch
from torch import Tensor

from mpt.precision.shared import rounding
from mpt.precision.shared.rounding import BLOCK, make_table, with_remainder

TABLE = make_table(BLOCK, torch.device("cpu"))


def random_halves(count: int, key: tuple[int | str, ...], start: int) -> Tensor:
    """Return numbers from 0 to 65535."""
    filled = torch.empty(count, dtype=torch.int32)
    rounding.random_halves(TABLE, key, start, filled)
    return filled.view(torch.int16)[1::2].int() + (1 << 15)


def round_at_random(numbers: Tensor, *key: int | str) -> Tensor:
    halves = torch.empty(numbers.numel(), dtype=torch.int32)
    rounding.random_halves(TABLE, key, 0, halves)
    return rounding.round_at_random(numbers.clone(), halves)


def test_rounding_at_random_is_right_on_average_and_leaves_what_fits() -> None:
    low, high = torch.tensor([1.0, 1.0 + 2**-7]).unbind()
    numbers = low + (high - low) * torch.tensor([0.0, 0.25, 0.5, 0.75])
    rounded = torch.stack([round_at_random(numbers.repeat(64), 7, n).float() for n in range(64)])
    shares = ((rounded - low) / (high - low)).view(-1, 4).mean(0)
    assert set(rounded.unique().tolist()) == {float(low), float(high)}
    assert torch.allclose(shares, torch.tensor([0.0, 0.25, 0.5, 0.75]), atol=0.03)
    held = torch.tensor([0.0, -1.5, 3e38, 1e-38, float("inf"), float("-inf")]).bfloat16()
    assert torch.equal(round_at_random(held.float(), 1), held)


def test_what_is_not_a_number_stays_so_whatever_its_bits() -> None:
    """CUDA's NaN is 0x7FFFFFFF, to which a random number would carry into the sign: -0."""
    patterns = [0x7FFFFFFF, 0x7FC00000, 0x7F800001, 0x7FFF0000, -1, -(1 << 22), -(1 << 23) + 1]
    numbers = torch.tensor(patterns, dtype=torch.int32).repeat_interleave(4096).view(torch.float32)
    assert numbers.isnan().all()
    assert round_at_random(numbers, 1).isnan().all()
    whole = torch.stack([numbers, torch.ones_like(numbers)], 1).view(-1)
    assert round_at_random(whole, 2).view(-1, 2).isnan().all(0).tolist() == [True, False]


def test_negative_numbers_are_rounded_as_their_mirror_images() -> None:
    numbers = torch.linspace(1, 2, 1000)
    assert torch.equal(round_at_random(numbers, "sign"), -round_at_random(-numbers, "sign"))


def chi_squared(halves: Tensor) -> list[float]:
    counts = [torch.bincount(byte, minlength=256).double() for byte in (halves >> 8, halves & 255)]
    expected = len(halves) / 256
    return [float(((count - expected) ** 2 / expected).sum()) for count in counts]


def test_the_random_numbers_are_uniform_and_independent_of_place_and_key() -> None:
    count = 1 << 16
    key, other = (0, "net", 3, "exp_avg"), (0, "net", 4, "exp_avg")
    halves, later = random_halves(count, key, 0), random_halves(count, other, 0)
    elsewhere, beyond = random_halves(count, key, 300_001), random_halves(count, key, 5 * BLOCK + 7)
    for some in (halves, later, elsewhere, beyond):
        assert some.min() >= 0
        assert some.max() < 1 << 16
        assert max(chi_squared(some)) < 340  # 255 degrees of freedom, p = 0.0003
    for first, second in (
        (halves[1:], halves[:-1]),
        (halves, later),
        (halves, elsewhere),
        (halves, beyond),
    ):
        assert (
            abs(float(torch.corrcoef(torch.stack([first.double(), second.double()]))[0, 1])) < 0.02
        )


def test_the_random_numbers_of_one_place_are_uniform_over_updates() -> None:
    for place in (0, 1, 77_777):
        halves = torch.cat(
            [random_halves(1, (0, "net", step, ""), place) for step in range(1 << 13)]
        )
        assert max(chi_squared(halves)) < 340
        assert (
            abs(
                float(
                    torch.corrcoef(torch.stack([halves[1:].double(), halves[:-1].double()]))[0, 1]
                )
            )
            < 0.05
        )


def test_a_part_gets_the_numbers_of_its_place() -> None:
    start = BLOCK - 500
    whole = random_halves(1000, (5,), start)
    assert torch.equal(whole[400:], random_halves(600, (5,), start + 400))


def test_a_number_and_its_remainder_hold_sixteen_bits() -> None:
    numbers = torch.rand(1000, generator=torch.Generator().manual_seed(0)) + 1
    nearest, rest = with_remainder(numbers)
    assert nearest.dtype == torch.bfloat16
    assert float((nearest.float() + rest.bfloat16().float() - numbers).abs().max()) <= 2**-17

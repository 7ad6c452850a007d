import torch
from torch import Tensor

from mpt.precision import rounding
from mpt.precision.rounding import make_key, random_bits, stream, with_remainder

CPU = torch.device("cpu")


def random_halves(count: int, key: tuple[int, int], start: int, device: torch.device, number: int = 0) -> Tensor:
    return stream(random_bits(count, key, start, device), number)


def round_at_random(numbers: Tensor, key: tuple[int, int]) -> Tensor:
    return rounding.round_at_random(numbers.clone(), random_halves(numbers.numel(), key, 0, CPU))


def test_rounding_at_random_is_right_on_average_and_leaves_what_fits() -> None:
    low, high = torch.tensor([1.0, 1.0 + 2**-7]).unbind()
    numbers = low + (high - low) * torch.tensor([0.0, 0.25, 0.5, 0.75])
    rounded = torch.stack([round_at_random(numbers.repeat(64), make_key(7, n)).float() for n in range(64)])
    shares = ((rounded - low) / (high - low)).view(-1, 4).mean(0)
    assert set(rounded.unique().tolist()) == {float(low), float(high)}
    assert torch.allclose(shares, torch.tensor([0.0, 0.25, 0.5, 0.75]), atol=0.03)
    held = torch.tensor([0.0, -1.5, 3e38, 1e-38, float("inf"), float("-inf")]).bfloat16()
    assert torch.equal(round_at_random(held.float(), make_key(1)), held)
    assert round_at_random(torch.tensor([float("nan")]), make_key(1)).isnan().all()


def test_negative_numbers_are_rounded_as_their_mirror_images() -> None:
    numbers = torch.linspace(1, 2, 1000)
    key = make_key("sign")
    assert torch.equal(round_at_random(numbers.clone(), key), -round_at_random(-numbers, key))


def test_the_random_numbers_are_uniform_and_independent_of_place_and_key() -> None:
    key, other = make_key(0, "net", 3, 1, "weight"), make_key(0, "net", 4, 1, "weight")
    streams = [random_halves(1 << 16, key, 0, CPU, number) for number in range(3)]
    for halves in streams:
        assert halves.min() >= 0
        assert halves.max() < 1 << 16
        for byte in (halves >> 8, halves & 255):
            counts = torch.bincount(byte, minlength=256).double()
            assert float(((counts - 256) ** 2 / 256).sum()) < 340  # chi squared of 255 degrees, p = 0.0003
    halves = streams[0]
    later = random_halves(1 << 16, other, 0, CPU)
    for first, second in ((halves[1:], halves[:-1]), (halves, later), (halves, streams[1]), (halves, streams[2])):
        assert abs(float(torch.corrcoef(torch.stack([first.double(), second.double()]))[0, 1])) < 0.02


def test_a_part_gets_the_numbers_of_its_place() -> None:
    key = make_key(5)
    whole = random_halves(1000, key, 0, CPU)
    assert torch.equal(whole[400:], random_halves(600, key, 400, CPU))


def test_a_number_and_its_remainder_hold_sixteen_bits() -> None:
    numbers = torch.rand(1000, generator=torch.Generator().manual_seed(0)) + 1
    nearest, rest = with_remainder(numbers)
    assert nearest.dtype == rest.dtype == torch.bfloat16
    assert float((nearest.float() + rest.float() - numbers).abs().max()) <= 2**-17

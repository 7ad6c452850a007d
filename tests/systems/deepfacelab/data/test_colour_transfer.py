import numpy as np
import pytest

from mpt.systems.deepfacelab.data.colour_transfer import from_lab, to_lab, transfer


def pictures():
    numbers = np.random.default_rng(0)
    image = (0.2 + 0.3 * numbers.random((24, 24, 3))).astype(np.float32)
    reference = (np.array([0.6, 0.3, 0.4]) + 0.2 * numbers.random((24, 24, 3)) * [1, 0.5, 1]).astype(np.float32)
    return image, reference


@pytest.mark.parametrize("mode", ["rct", "lct", "mkl", "idt", "sot"])
def test_the_mean_colour_becomes_the_references(mode):
    image, reference = pictures()
    result = transfer(mode, image, reference, np.random.default_rng(1))
    assert result.dtype == np.float32
    before, after = (np.abs(x.mean((0, 1)) - reference.mean((0, 1))).max() for x in (image, result))
    assert after < before / (2 if mode == "idt" else 5)  # idt goes two thirds of the way


@pytest.mark.parametrize("mode", ["lct", "mkl"])
def test_covariances_are_matched(mode):
    image, reference = pictures()
    result = transfer(mode, image, reference, np.random.default_rng(1))
    np.testing.assert_allclose(np.cov(result.reshape(-1, 3).T), np.cov(reference.reshape(-1, 3).T), atol=3e-4)


@pytest.mark.parametrize("mode", ["rct", "lct", "mkl", "idt", "sot"])
def test_a_picture_given_its_own_colours_stays(mode):
    image, _ = pictures()
    result = transfer(mode, image, image, np.random.default_rng(1))
    np.testing.assert_allclose(result, image, atol=0.02)


@pytest.mark.parametrize("mode", ["idt", "sot"])
def test_random_ways_depend_on_their_generator_alone(mode):
    results = [transfer(mode, *pictures(), np.random.default_rng(seed)) for seed in (1, 1, 2)]
    np.testing.assert_array_equal(results[0], results[1])
    assert (results[0] != results[2]).any()


def test_lab_is_opencvs_and_comes_back():
    cv2 = pytest.importorskip("cv2")
    image, _ = pictures()
    np.testing.assert_allclose(to_lab(image), cv2.cvtColor(image, cv2.COLOR_RGB2LAB), atol=0.5)
    np.testing.assert_allclose(from_lab(to_lab(image)), image, atol=1e-4)

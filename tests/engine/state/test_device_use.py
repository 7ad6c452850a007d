"""Device utilisation is asked of the driver seldom, through torch, and its absence has a reason."""

import sys
import types

import pytest
import torch

from mpt.engine.state.device_use import DeviceUse

pytestmark = pytest.mark.tier("fast")
CARD = torch.device("cuda", 0)


class Driver(types.ModuleType):
    """What `torch.cuda.utilization` uses of pynvml, with a clock that a question moves on."""

    class NVMLError(Exception):
        pass

    class NVMLError_DriverNotLoaded(NVMLError):
        pass

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.now, self.seconds, self.answers, self.asked = 0.0, 0.0, [], 0

    def nvmlInit(self):
        pass

    def nvmlDeviceGetHandleByIndex(self, index):
        assert index == 2  # the first visible card, as the driver counts
        return index

    def nvmlDeviceGetUtilizationRates(self, handle):
        self.asked += 1
        self.now += self.seconds
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return types.SimpleNamespace(gpu=answer, memory=1)


@pytest.fixture
def driver(monkeypatch):
    made = Driver()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    monkeypatch.setitem(sys.modules, "pynvml", made)
    monkeypatch.setattr(torch.cuda, "pynvml", made, raising=False)
    monkeypatch.setattr(torch.cuda, "_HAS_PYNVML", True)
    return made


def test_samples_make_a_mean(driver):
    use = DeviceUse(CARD, lambda: driver.now)
    driver.answers = [30, 90]
    found = [use.look()]
    driver.now = 1.5
    found.append(use.look())
    assert found == [{"device_utilization": 0.3}, {"device_utilization": 0.9}]
    assert use.to_record() == {"mean": pytest.approx(0.6), "samples": 2}


def test_the_driver_is_asked_once_a_second_however_often_lines_are_written(driver):
    use = DeviceUse(CARD, lambda: driver.now)
    driver.answers = [50] * 1000
    for line in range(1000):  # ten seconds, a line every 10 ms
        driver.now = line / 100
        use.look()
    assert driver.asked == 10


def test_a_driver_that_answers_slowly_is_asked_for_a_hundredth_of_the_time(driver):
    use = DeviceUse(CARD, lambda: driver.now)
    driver.answers, driver.seconds = [50] * 1000, 0.2
    while driver.now < 1000:
        use.look()
        driver.now += 0.5
    assert 0.009 < driver.asked * 0.2 / driver.now <= 0.01 + 0.2 / 1000


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (Driver.NVMLError("Not Supported"), "the driver has no figure: Not Supported"),
        (255, "it answers 255 %"),
    ],
)
def test_a_driver_that_has_no_figure_is_asked_once(driver, answer, reason):
    use = DeviceUse(CARD, lambda: driver.now)
    driver.answers = [answer]
    assert use.look() == {}
    driver.now = 100.0
    assert use.look() == {}
    assert driver.asked == 1
    assert reason in use.to_record()["not_measured"]


def test_a_driver_that_stops_answering_leaves_the_mean(driver):
    use = DeviceUse(CARD, lambda: driver.now)
    driver.answers = [40, Driver.NVMLError("Unknown Error")]
    use.look()
    driver.now = 2.0
    assert use.look() == {}
    assert use.to_record() == {"mean": pytest.approx(0.4), "samples": 1}


def test_without_the_library_the_reason_names_the_extra(monkeypatch):
    monkeypatch.setattr(torch.cuda, "_HAS_PYNVML", False)
    monkeypatch.setattr(torch.cuda, "_PYNVML_ERR", None, raising=False)
    use = DeviceUse(CARD)
    assert use.look() == {}
    assert "pip install 'mpt-trainer[nvidia]'" in use.to_record()["not_measured"]


def test_a_cpu_is_not_asked(driver):
    use = DeviceUse(torch.device("cpu"))
    assert (use.look(), driver.asked) == ({}, 0)
    assert use.to_record() == {"not_measured": "no driver counts it for cpu"}

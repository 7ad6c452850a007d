"""Tests here run in a process that has pretend CUDA cards: by default one RTX 3060, or those of `@pytest.mark.cards`.

Fixtures are made by pytest's own process and handed over, so they must be things that can be pickled, such as
`tmp_path`. Without a compiler the tests are skipped with that reason, but in CI (`CI` in the environment) they fail.
With torch's CUDA build they are skipped: there is no place in it for a pretended device.
"""

from __future__ import annotations

import os

import pytest

from tests.cuda_rehearsal import build
from tests.cuda_rehearsal.cards import Machine
from tests.cuda_rehearsal.server import Server


class _Servers:
    """The server of this pytest process, started when the first rehearsal needs it."""

    now: Server | None = None


def pytest_sessionfinish() -> None:
    if _Servers.now is not None:
        _Servers.now.stop()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test on its machine instead of here, unless it is marked `here`."""
    if pyfuncitem.get_closest_marker("here"):
        return None
    cards = pyfuncitem.get_closest_marker("cards")
    machine = Machine(tuple(cards.args), cards.kwargs.get("memory_bytes")) if cards else Machine()
    server = _server()
    names = pyfuncitem._fixtureinfo.argnames
    arguments = {name: pyfuncitem.funcargs[name] for name in names}
    try:
        outcome = server.run(
            pyfuncitem.module.__name__, pyfuncitem.originalname, arguments, machine
        )
    except BaseException:  # a time limit: the rehearsal goes on, and its server waits for it
        server.stop()
        _Servers.now = None
        raise
    print(outcome.printed)
    if outcome.kind == "skipped":
        pytest.skip(outcome.text)
    if outcome.kind != "passed":
        pytest.fail(outcome.text, pytrace=False)
    return True


def _server() -> Server:
    if _Servers.now is None:
        try:
            build.check()
        except build.CannotBuild as error:
            if os.environ.get("CI") and not isinstance(error, build.HasCuda):
                pytest.fail(str(error), pytrace=False)
            pytest.skip(str(error))
        _Servers.now = Server.start()
    return _Servers.now

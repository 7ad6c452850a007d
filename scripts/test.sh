#!/usr/bin/env bash
# Installs mpt with its development tools into .venv-test and runs the checks: ruff, mypy --strict, pytest with coverage.
# Further arguments go to pytest: `bash scripts/test.sh -m slow`.
set -euo pipefail
cd "$(dirname "$0")/.."
python3 -m venv .venv-test
. .venv-test/bin/activate
python -m pip install --quiet --upgrade pip
python -m pip install --quiet -e '.[dev]'
ruff check .
ruff format --check .
mypy
export OMP_NUM_THREADS=1  # two tiny networks with two threads each on two cores are many times slower than with one
python -c 'import sys; sys.exit(sys.version_info < (3, 12))' && export COVERAGE_CORE=sysmon  # counts for next to nothing
floor=()
[ $# -gt 0 ] || floor=(--cov-fail-under=85)  # of the whole suite; processes that tests start are counted
python -m pytest -n auto --cov --cov-report=term:skip-covered --durations=15 "${floor[@]}" "$@"

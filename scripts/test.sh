#!/usr/bin/env bash
# Installs mpt with its development tools into .venv-test and runs the checks: ruff, mypy --strict, the
# site of the documentation (a warning is an error), pytest.
# Further arguments go to pytest: `bash scripts/test.sh -m slow`. `bash scripts/test.sh --cov` counts covered lines too,
# which takes about twice the processor's time (docs/decisions/removed.md): before a release, not on every push.
# Without a GPU a fresh .venv-test gets the torch of scripts/torch_without_gpu.txt, elsewhere the newest that
# pyproject.toml allows, as with MPT_TEST_TORCH=newest.
set -euo pipefail
cd "$(dirname "$0")/.."
python3 -m venv .venv-test
. .venv-test/bin/activate
python -m pip install --quiet --upgrade pip
constraint=()
if [ "${MPT_TEST_TORCH:-}" != newest ] && ! nvidia-smi -L >/dev/null 2>&1 && ! python -m pip show --quiet torch 2>/dev/null; then
    constraint=(--constraint scripts/torch_without_gpu.txt)
fi
python -m pip install --quiet -e '.[dev,docs]' "${constraint[@]}"
ruff check .
ruff format --check .
# The site and mypy take one core each; pytest begins alongside them, and waits for nothing.
NO_MKDOCS_2_WARNING=1 python -m mkdocs build --strict --quiet --site-dir .venv-test/site &
site=$!
mypy >.venv-test/mypy.txt 2>&1 &
types=$!
export OMP_NUM_THREADS=1  # two tiny networks with two threads each on two cores are many times slower than with one
options=()
if [ "${1:-}" = --cov ]; then
    python -c 'import sys; sys.exit(sys.version_info < (3, 12))' && export COVERAGE_CORE=sysmon  # counts for next to nothing
    options=(--cov-report=term:skip-covered)
    [ $# -gt 1 ] || options+=(--cov-fail-under=85)  # of the whole suite; processes that tests start are counted
fi
failed=0
python -m pytest -n auto --durations=15 "${options[@]}" "$@" || failed=$?
wait "$site" || failed=1
wait "$types" || failed=1
cat .venv-test/mypy.txt
exit "$failed"

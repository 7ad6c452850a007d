#!/usr/bin/env bash
# Runs the fast tests with the oldest and the newest torch of the supported range, on Python 3.11 to 3.13, and with
# torch's CUDA wheel on a machine without a GPU. Each row in a virtual environment of its own under build/matrix, kept
# between runs. Prints a table; exits with 1 if a row failed. Pythons are looked for on the path, among pyenv's and uv's;
# one that is not there is a skipped row.
#
#   bash scripts/test_matrix.sh              # all rows
#   bash scripts/test_matrix.sh slice        # the oldest torch alone, on the tests that depend on torch's insides
#   bash scripts/test_matrix.sh rows 3.12:newest:cpu 3.11:2.11:cu130
#
# The wheel `pypi` is what the ordinary package index has (on Linux a CUDA build), for where PyTorch's own index cannot be
# reached. MATRIX_TESTS="tests/run tests/planner" runs these tests in place of a row's own.
set -uo pipefail
cd "$(dirname "$0")/.."
ALL=(3.11:2.11:cpu 3.12:2.11:cpu 3.13:2.11:cpu 3.11:2.12:cpu 3.11:2.13:cpu 3.12:2.13:cpu 3.13:2.13:cpu
    3.11:2.14:cpu 3.11:2.15:cpu 3.12:2.15:cpu 3.13:2.15:cpu 3.11:2.15:pypi)
declare -A VISION=([2.11]=0.26 [2.12]=0.27 [2.13]=0.28 [2.14]=0.29 [2.15]=0.29)
# What reads torch's insides: autocast's lists, dispatch, checkpoints, the planner's fakes, the pretend device.
INSIDES=(tests/planner tests/precision tests/memory tests/engine tests/cuda_rehearsal/test_device.py)
tests=()
case ${1:-all} in
    slice) rows=(3.11:2.11:cpu) tests=("${INSIDES[@]}") ;;
    rows) shift; rows=("$@") ;;
    all) rows=("${ALL[@]}") ;;
    *) sed -n 2,13p "$0"; exit 2 ;;
esac
[ -n "${MATRIX_TESTS:-}" ] && read -ra tests <<<"$MATRIX_TESTS"
find_python() {
    local candidate
    for candidate in "python$1" "$HOME"/.pyenv/versions/"$1".*/bin/"python$1" \
        "$(uv python find --no-python-downloads "$1" 2>/dev/null)"; do
        # pyenv puts a name on the path for each version that it has, chosen or not: only running it tells.
        "$candidate" -c pass 2>/dev/null && command -v "$candidate" && return
    done
    return 1
}
export OMP_NUM_THREADS=1
failed=0 table=""
for row in "${rows[@]}"; do
    IFS=: read -r python torch wheel <<<"$row"
    [ "$torch" = newest ] && torch=2.15
    if ! interpreter=$(find_python "$python"); then
        table+="| $python | $torch | $wheel | skipped: python$python is not installed |"$'\n'
        continue
    fi
    env=build/matrix/$python-$torch-$wheel log=build/matrix/$python-$torch-$wheel.log
    mkdir -p build/matrix
    index=()
    [ "$wheel" = pypi ] || index=(--extra-index-url "https://download.pytorch.org/whl/$wheel")
    if { [ -x "$env/bin/python" ] || "$interpreter" -m venv "$env"; } &&
        "$env/bin/python" -m pip install --quiet "torch==$torch.*" "torchvision==${VISION[$torch]}.*" "${index[@]}" &&
        "$env/bin/python" -m pip install --quiet -e '.[dev]' "torch==$torch.*" "torchvision==${VISION[$torch]}.*" &&
        CUDA_VISIBLE_DEVICES="" "$env/bin/python" -m pytest -q -n auto -p no:cacheprovider "${tests[@]}"; then
        result=passed
    else
        result="FAILED, see $log" failed=1
    fi >"$log" 2>&1
    version=$("$env/bin/python" -c 'import torch; print(torch.__version__)' 2>/dev/null)
    table+="| $python | ${version:-$torch} | $wheel | $result: $(tail -n 1 "$log") |"$'\n'
done
printf '| Python | torch | wheel | fast tests |\n|---|---|---|---|\n%s' "$table"
exit "$failed"

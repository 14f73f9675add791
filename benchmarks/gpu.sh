#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# All that needs a GPU, in five stages. Each takes less than ten minutes, and is of use when the next one never runs.
#
#     benchmarks/gpu.sh [--quick] [--device cuda|cpu] [--out DIR] [STAGE ...]
#
#     correct    every op on the device against float64 and against the reference, in captured graphs, on streams, and
#                with more than 2^31 elements
#     bandwidth  device time of every op beside the device's best rates, and the FedLF step
#     sanitize   compute-sanitizer's four tools on a small program that calls every path of every kernel
#     train      every method for three rounds against the CPU, and rounds of W1 and W2 against a loop written by hand
#     profile    Nsight Compute on the two ops that are the farthest from what is possible; after bandwidth
#
# Without names all run, in this order. Outcomes go to DIR (default benchmarks/results) as they come, with device, driver,
# versions and date: gpu.md. Kernels that do not load, or none, are built first, which takes minutes.
# Installs nothing: PYTHON (default .venv/bin/python, else python3) must have torch and the test extra's packages.
# --device cpu tries the stages where there is no GPU; --quick takes the smallest problems.
# shellcheck disable=SC2329  # stages are called by their names
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

stop() {
  echo "gpu.sh: $1" >&2
  exit 1
}

ALL=(correct bandwidth sanitize train profile)
usage="benchmarks/gpu.sh [--quick] [--device cuda|cpu] [--out DIR] [${ALL[*]}]"
quick=0 device=cuda out=benchmarks/results stages=()
while (($#)); do
  case $1 in
    --quick) quick=1 ;;
    --device | --out)
      (($# > 1)) || stop "$1 needs a value: $usage"
      if [[ $1 == --out ]]; then out=$2; else device=$2; fi
      shift
      ;;
    correct | bandwidth | sanitize | train | profile) stages+=("$1") ;;
    *) stop "unknown argument '$1': $usage" ;;
  esac
  shift
done
((${#stages[@]})) || stages=("${ALL[@]}")
[[ $device == cuda || $device == cpu ]] || stop "--device must be cuda or cpu, found '$device'"

if [[ -z ${PYTHON-} ]]; then
  PYTHON=python3
  [[ -x .venv/bin/python ]] && PYTHON=$PWD/.venv/bin/python
fi
command -v "$PYTHON" >/dev/null || stop "there is no $PYTHON; set PYTHON to an interpreter with torch"
"$PYTHON" -c 'import torch' 2>/dev/null || stop "$PYTHON has no torch; set PYTHON to an interpreter that has it"
missing=$("$PYTHON" -c 'from importlib.util import find_spec as f
print(*(n for n in ("lightning", "torchmetrics", "torchvision", "pytest", "pytest_timeout", "hypothesis", "scipy") if f(n) is None))')
[[ -z $missing ]] || stop "$PYTHON lacks $missing; install the extra 'test'"
if [[ $device == cuda ]]; then
  found=$("$PYTHON" -W ignore - <<'END'
import torch

if torch.version.cuda is None:
    print("torch", torch.__version__, "is a build without CUDA; install one with CUDA")
elif not torch.cuda.is_available():
    print("torch finds no CUDA device; run this on a machine with a GPU and its driver, or try it with --device cpu")
END
  )
  [[ -z $found ]] || stop "$found"
fi

# CUDA's tools often lie beside each other, outside of PATH.
PATH=$PATH:${CUDA_HOME:-/usr/local/cuda}/bin
export PATH PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" PYTHONUNBUFFERED=1
export FL_LIGHTNING_TEST_DEVICE=$device

logs=build/gpu-$device
mkdir -p "$logs" "$out"
report=$out/gpu.md
failed=0 small=() running=()
((quick)) && small=(--quick)

# Runs a command or one of the functions below for so many seconds at most, its output in a log; adds a line to the
# report: stage, name, outcome, seconds, and the last line that matches a pattern.
step() {
  local name=$1 limit=$2 pattern=$3 start=$SECONDS outcome=passed status=0
  local log=$logs/$stage-${name// /-}.log
  shift 3
  echo "$stage: $name ..."
  timeout -k 10 "$limit" "$@" >"$log" 2>&1 || status=$?
  ((status == 0)) || { outcome=failed failed=1; }
  ((status == 124 || status == 137)) && outcome="stopped after $limit s"
  local summary
  summary=$(grep -E -- "$pattern" "$log" | tail -n 1 | sed -e 's/^[= ]*//' -e 's/[= ]*$//' -e 's/|/\\|/g')
  line "$name" "$outcome" "$((SECONDS - start))" "${summary:-no summary; the log is $log}"
  ((status == 0)) || tail -n 15 "$log"
  return "$status"
}
# The same while the next steps run. What is timed has the device to itself: together waits for all of these first.
beside() {
  step "$@" &
  running+=($!)
}
together() {
  local pid
  for pid in "${running[@]}"; do wait "$pid" || failed=1; done
  running=()
}
line() { echo "| $stage | $1 | $2 | $3 | $4 |" | tee -a "$report"; }
left_out() {
  line "$1" "not run" 0 "$2"
  [[ $device == cpu ]] || failed=1
}

{
  printf '# Stages on %s\n\n' "$device"
  "$PYTHON" -W ignore -m benchmarks._gpu.facts --device "$device"
  printf '\n| Stage | Step | Outcome | Seconds | Summary |\n|---|---|---|---|---|\n'
} >"$logs/head.md" || stop "the package does not import: see $logs/head.md"
# A later stage goes below the earlier ones of the same machine and versions, whatever the minute.
if ! [[ -s $report ]] || [[ $(grep -v '^- date' "$logs/head.md") != "$(grep -v '^- date' "$report" | head -n "$(($(wc -l <"$logs/head.md") - 1))")" ]]; then
  cp "$logs/head.md" "$report"
fi

stage=build
if [[ $device == cuda ]] && ! "$PYTHON" -W ignore -c 'from fl_lightning import ops
raise SystemExit(ops.backend()["layer_gram"].implementation != "cuda")'; then
  step build 900 '^fl-lightning:|error:' env FORCE_CUDA=1 "$PYTHON" setup.py build_ext --inplace --force || {
    stop "the kernels do not build: see $logs/build-build.log"
  }
fi

# What other versions of torch and Lightning warn of is for the suite without a GPU to find.
pytest=("$PYTHON" -m pytest -q -p no:cacheprovider -W ignore)
# Several processes share the GPU where pytest-xdist is installed.
parallel=()
if [[ $device == cuda ]] && "$PYTHON" -c 'import xdist' 2>/dev/null; then parallel=(-n 6 --dist worksteal); fi
counts='(passed|failed|error).* in '

correct() {
  local which='cuda or graph' seeded='gpu'
  [[ $device == cpu ]] && which='compiled or graph'
  ((quick)) && which='(compiled and same_bits_again and not threads and combine) or (graph and combine and bfloat16)'
  beside 'ops' 330 "$counts" "${pytest[@]}" "${parallel[@]}" -m 'not slow and not process' -k "$which" tests/ops
  if ((!quick)); then
    beside 'random generators' 60 "$counts" "${pytest[@]}" -k "$seeded" tests/core/test_seeding.py
    beside 'more than 2^31 elements' 200 "$counts" "${pytest[@]}" -m slow -k "more_elements and $which" tests/ops/test_kernel_runs.py
  fi
  together
}

bandwidth() {
  local clients=()
  ((quick)) && clients=(--clients 3)
  step 'every op' 360 'targets are met' "$PYTHON" -m benchmarks.device_bandwidth --device "$device" --out "$out" "${small[@]}" "${clients[@]}"
  step 'FedLF step' 120 'target' "$PYTHON" -m benchmarks.device_step --device "$device" --out "$out" "${small[@]}"
}

# Without torch's caching allocator every tensor ends where its memory ends.
sanitize() {
  local program=("$PYTHON" -m benchmarks._gpu.every_path --device "$device") tool ours watched
  local summary='ERROR SUMMARY|RACECHECK SUMMARY|[Ee]rror'
  export PYTORCH_NO_CUDA_MEMORY_CACHING=1
  beside 'no tool' 60 '^called' "${program[@]}"
  for tool in memcheck racecheck synccheck initcheck; do
    if [[ $device == cpu ]]; then
      left_out "$tool" 'there is no GPU'
    elif ! command -v compute-sanitizer >/dev/null; then
      left_out "$tool" 'there is no compute-sanitizer'
    else
      # initcheck must see torch's kernels too: they write what ours read. Calls of CUDA that fail are torch's business:
      # it asks for some that a driver may lack, and ours are checked where they are made.
      ours=(--kernel-name kns=fl_lightning)
      [[ $tool == initcheck ]] && ours=()
      [[ $tool == memcheck ]] && ours+=(--report-api-errors no)
      watched=(compute-sanitizer --tool "$tool" --error-exitcode 9 --print-limit 20 "${ours[@]}" "${program[@]}")
      # It takes four times as long as the others, most of it on the host: each number of rows has a process of its own.
      [[ $tool == racecheck ]] && watched=(bash -c 'seq 14 | xargs -P 14 -I {} "$@" --part {}/14' parts "${watched[@]}")
      beside "$tool" 300 "$summary" "${watched[@]}"
    fi
  done
  together
  unset PYTORCH_NO_CUDA_MEMORY_CACHING
}

train() {
  local which='fit'
  ((quick)) && which='fit and (FedLF or FedBN)'  # the latter has a network of its own
  step 'every method' 200 "$counts" "${pytest[@]}" "${parallel[@]}" -k "$which" tests/fit/test_gpu.py
  step 'rounds' 280 '^\|.*(yes|no)' "$PYTHON" -m benchmarks.device_rounds --device "$device" --out "$out" "${small[@]}"
}

profile() {
  local name=device-bandwidth-$device results program
  ((quick)) && name=$name-quick
  results=$out/$name.json
  [[ -s $results ]] || results=benchmarks/results/$name.json  # of an earlier run
  [[ -s $results ]] || { left_out 'the two worst ops' "there is no $name.json; run bandwidth first"; return; }
  program=("$PYTHON" -m benchmarks._gpu.one_call "$results" --device "$device" "${small[@]}")
  if [[ $device == cpu ]]; then
    step 'no tool' 60 '^called' "${program[@]}"
  elif ! command -v ncu >/dev/null; then
    left_out 'the two worst ops' 'there is no ncu'
  else
    step 'the two worst ops' 240 'called|==ERROR==' ncu --profile-from-start off --clock-control none --set detailed \
      --kernel-name-base function --page details --print-summary per-kernel "${program[@]}"
    cp "$logs/profile-the-two-worst-ops.log" "$out/gpu-profile.txt"
  fi
}

for stage in "${stages[@]}"; do "$stage"; done
echo "Report: $report"
exit "$failed"

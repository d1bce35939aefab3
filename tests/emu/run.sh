#!/bin/sh
# The operators' Python tests with their CUDA kernels on the emulated GPU: as Hopper, and, where that decides which kernel
# runs, as a chip without clusters and bulk copies.
#     run.sh <build folder> <python> <jobs>
set -eu
build=$(cd "$1" && pwd)
python=$2
jobs=$3
here=$(cd "$(dirname "$0")/../.." && pwd)
export BASTILE_LIBRARY="$build/libbastile.so" BASTILE_EMULATED=1 PYTHONPATH="$here/python"
export BASTILE_EMU_CACHE="$build/kernels" LD_PRELOAD="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libstdc++.so.6)"
# libstdc++ early: AddressSanitizer looks for its __cxa_throw when it starts. Python itself is not free of leaks, and PyTorch's allocator aligns for itself.
export ASAN_OPTIONS=detect_leaks=0:abort_on_error=1 UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1
# The operators' own files, one a row of ops.def.
files() { # of these operators
    sed -n 's/^BST_OP(\(.*\))$/\1/p' "$here/src/ops.def" | grep -E "$1" |
        sed "s/^linear_cross_entropy$/fused_&/; s|.*|$here/tests/py/test_*&.py|"
}
emulated() { # as this chip, these operators
    echo "emulated sm_$1"
    # shellcheck disable=SC2046
    BASTILE_EMU_ARCH=$1 "$python" -m pytest $(files "$2") -n "$jobs"
}
emulated 90 .
# On other chips the rest runs the same kernels in the same shape.
emulated 80 'norm|cross_entropy|logprobs'
# Whether warming up finds every kernel of a whole model: one chip will do.
BASTILE_EMU_ARCH=90 "$python" -m pytest "$here/tests/py/test_warmup.py" -n "$jobs"

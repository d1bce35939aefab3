#!/bin/sh
# The operators' Python tests with their CUDA kernels on the emulated GPU: as Hopper, and as a chip without clusters.
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
files=$(sed -n 's/^BST_OP(\(.*\))$/\1/p' "$here/src/ops.def" | sed "s/^linear_cross_entropy$/fused_&/; s|.*|$here/tests/py/test_*&.py|")
for arch in 90 80; do
    echo "emulated sm_$arch"
    # shellcheck disable=SC2086
    BASTILE_EMU_ARCH=$arch "$python" -m pytest $files -n "$jobs"
done
# Whether warming up finds every kernel of a whole model: one chip will do.
BASTILE_EMU_ARCH=90 "$python" -m pytest "$here/tests/py/test_warmup.py" -n "$jobs"

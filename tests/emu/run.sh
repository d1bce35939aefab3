#!/bin/sh
# The operators' Python tests with their CUDA kernels on the emulated GPU: as Hopper, and those whose launches depend on
# the chip as one without bulk copies.
#     run.sh <build folder> <python> <jobs>
set -eu
build=$(cd "$1" && pwd)
python=$2
jobs=$3
here=$(cd "$(dirname "$0")/../.." && pwd)
export BASTILE_LIBRARY="$build/libbastile.so" BASTILE_EMULATED=1 PYTHONPATH="$here/python"
# Each kernel runs with all checks in the C tests.
export BASTILE_EMU_QUICK=1
export BASTILE_EMU_CACHE="$build/kernels" LD_PRELOAD="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libstdc++.so.6)"
# libstdc++ early: AddressSanitizer looks for its __cxa_throw when it starts. Python itself is not free of leaks. Where
# memory was allocated, Python's traceback says; to keep a trace of each allocation takes a fifth of a process's time.
export ASAN_OPTIONS=detect_leaks=0:abort_on_error=1:malloc_context_size=1:quarantine_size_mb=64 UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1
# The operators' own files, one a row of ops.def, of those of which a source says one of these words.
files_of() {
    for op in $(sed -n 's/^BST_OP(\(.*\))$/\1/p' "$here/src/ops.def"); do
        grep -qrE "$1" "$here/src/ops/$op" || continue
        [ "$op" != linear_cross_entropy ] || op=fused_$op
        echo "$here"/tests/py/test_*"$op".py
    done | tr ' ' '\n' | sort -u
}
for arch in 90 80; do
    echo "emulated sm_$arch"
    # One object file serves all chips here (emu/compile.c): what differs is what the host launches.
    # shellcheck disable=SC2046
    BASTILE_EMU_ARCH=$arch "$python" -m pytest $(files_of "$([ $arch = 90 ] && echo . || echo 'chip->arch')") -n "$jobs"
done
# Whether warming up finds every kernel of a whole model: one chip will do.
BASTILE_EMU_ARCH=90 "$python" -m pytest "$here/tests/py/test_warmup.py" -n "$jobs"

#!/usr/bin/env bash
# Resolves cpu.in to cpu.txt and gpu.in to gpu.txt from package metadata (nothing is installed; seconds).
#
#   envs/lock.sh                              packages that are pinned keep their version if it still fits
#   envs/lock.sh --upgrade                    the newest versions that fit
#   envs/lock.sh --upgrade-package NAME       the newest version of one package
#
# The comment block at the top of each list is kept. Both lists are for Python 3.11 on x86-64 Linux.
# A changed cpu.txt must be tried out (make demo, make test) before it is committed.
set -euo pipefail

uv_version=0.13.9
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf -- "$work"' EXIT
cd -- "$here"

echo "Getting uv $uv_version into a temporary environment (some seconds)"
"$python" -m venv "$work/uv"
if ! "$work/uv/bin/python" -m pip install -q --disable-pip-version-check "uv==$uv_version" 2> "$work/pip.log"; then
    cat "$work/pip.log" >&2
    echo "lock.sh: cannot install uv $uv_version: is the package index reachable?" >&2
    exit 1
fi

# header FILE: its comment lines up to the first other line. pins FILE: its pins.
header() { awk '!/^#/ {exit} {print}' "$1"; }
pins() { grep -v -e '^#' -e '^[[:space:]]*$' "$1"; }

# compile NAME [UV OPTION...]: resolve NAME.in; $work/NAME.txt holds the versions to prefer and is rewritten
compile() {
    local name=$1
    shift
    echo "Resolving $name.in"
    "$work/uv/bin/uv" pip compile "$name.in" --output-file "$work/$name.txt" --quiet \
        --overrides overrides.txt --excludes excludes.txt \
        --python-version 3.11 --python-platform x86_64-manylinux_2_28 \
        --no-header --no-annotate --no-emit-index-url --no-emit-find-links "$@" > "$work/$name.out"
    if grep -n '://' "$work/$name.txt" >&2; then
        echo "lock.sh: an address got into the list $name.txt; nothing was changed" >&2
        exit 1
    fi
}

pins cpu.txt > "$work/cpu.txt"
compile cpu --excludes excludes-cpu.txt "$@"

# The GPU list follows the CPU list where its own requirements allow, then its own earlier pins.
cp "$work/cpu.txt" "$work/gpu.txt"
if [ -s gpu.txt ]; then
    awk -F== 'NR == FNR {seen[$1]; next} !($1 in seen)' "$work/cpu.txt" <(pins gpu.txt) >> "$work/gpu.txt"
fi
compile gpu "$@"

for name in cpu gpu; do
    { header "$name.txt"; cat "$work/$name.txt"; } > "$work/$name.new"
    if cmp -s "$work/$name.new" "$name.txt"; then
        echo "$name.txt: unchanged ($(wc -l < "$work/$name.txt") packages)"
    else
        diff <(pins "$name.txt") "$work/$name.txt" || true
        cp "$work/$name.new" "$name.txt"
        echo "$name.txt: rewritten ($(wc -l < "$work/$name.txt") packages)"
    fi
done

#!/usr/bin/env bash
# Makes the Python environment of this project: envs/install.sh VENV_DIR
#
# Silent and quick when VENV_DIR is up to date (a stamp file in it says so). PYTHON=... names the Python to use.
# An interrupted installation is started anew; a changed cpu.txt or install.sh updates the environment in place.
set -euo pipefail

torch=torch==2.13.0+cpu
torch_index=https://download.pytorch.org/whl/cpu
need_gb=6

if [ $# -ne 1 ] || [ -z "$1" ]; then
    echo "usage: ${0##*/} VENV_DIR" >&2
    exit 2
fi
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
shown=$1
case $1 in
    /*) venv=$1 ;;
    *) venv=$PWD/$1 ;;
esac
while [ "${venv%/}" != "$venv" ]; do venv=${venv%/}; done
pins=$here/cpu.txt
stamp=$venv/.installed-$(cat -- "$pins" "$here/install.sh" | sha256sum | cut -c 1-12)
unfinished=$venv/.installing # there while the content of the environment may be half written
log=$venv/install.log
lock=$venv.lock
bin=$venv/bin

up_to_date() { [ -f "$stamp" ] && [ -x "$bin/python" ]; }
if up_to_date; then exit 0; fi

say() { printf '%s\n' "$*"; }
die() {
    printf 'install.sh: %s\n' "$1" >&2
    shift
    if [ $# -gt 0 ]; then printf '  %s\n' "$@" >&2; fi
    exit 1
}

# --- what must be there before anything is changed

if [ "$(uname -sm)" != "Linux x86_64" ]; then
    die "this environment is for Linux on x86-64; this machine is $(uname -sm)."
fi

version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2> /dev/null || true; }
python=
found=
for candidate in ${PYTHON:+"$PYTHON"} python3.11 python3; do
    version=$(version_of "$candidate")
    if [ "$version" = 3.11 ]; then
        python=$candidate
        break
    fi
    if [ -n "$version" ]; then found="$found $candidate is $version;"; fi
done
if [ -z "$python" ]; then
    die "Python 3.11 is needed, and no other version works (the pinned packages are for 3.11)." \
        "Found here:${found:- no Python 3 at all}" \
        "Install Python 3.11 (for example with pyenv or conda), or name it: PYTHON=/path/to/python3.11 make ..."
fi
if ! "$python" -c 'import venv, ensurepip' 2> /dev/null; then
    die "$python has no venv module; on Debian and Ubuntu: apt-get install python3.11-venv"
fi

if ! command -v flock > /dev/null; then die "the command flock is missing (package util-linux)"; fi

# --- one installation at a time; the lock file is removed at the end

mkdir -p -- "$venv" || die "cannot make the folder $venv"
while :; do
    exec 9> "$lock"
    if ! flock -n 9; then
        say "Another installation into $shown is running; waiting for it."
        flock 9
    fi
    if [ "$lock" -ef /proc/self/fd/9 ]; then break; fi # else its owner has removed it: take the new one
done
trap 'rm -f -- "$lock"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP
if up_to_date; then exit 0; fi

if [ -n "$(ls -A -- "$venv")" ] && [ ! -e "$venv/pyvenv.cfg" ] && [ ! -e "$unfinished" ]; then
    die "$shown holds files, but is no Python environment: it is left alone. Name another folder."
fi

free_mb=$(df -Pm -- "$venv" | awk 'NR == 2 {print $4}')
used_mb=$(du -sm -- "$venv/" | cut -f 1)
if [ $((free_mb + used_mb)) -lt $((need_gb * 1024)) ]; then
    die "too little disk space for $shown: $need_gb GB are needed (4 GB stay), $((free_mb / 1024)) GB are free." \
        "Free some space, or put the environment on another disk: make ... VENV=/path/on/it"
fi

# --- the steps

# failed STEP: names it, shows the end of the log and what to try
failed() {
    {
        say "install.sh: FAILED at: $1"
        say "The last lines of the log:"
        tail -n 5 -- "$log" | cut -c 1-300 | sed 's/^/    /'
        say "What to try:"
        say "  - network: can pip reach its package index? (torch may also come from $torch_index)"
        say "  - disk: $need_gb GB are needed; free now: $(df -Pm -- "$venv" | awk 'NR == 2 {printf "%.1f", $4 / 1024}') GB for $shown, $(df -Pm -- "${TMPDIR:-/tmp}" | awk 'NR == 2 {printf "%.1f", $4 / 1024}') GB for ${TMPDIR:-/tmp}"
        say "  - Python: 3.11 is needed, and $python is used, version $("$python" -V 2>&1 | cut -d ' ' -f 2)"
        say "Then give the same command again. The whole log: $log"
    } >&2
    exit 1
}

# pip_install ARG...: into the log. When pip stops before it changes anything, the environment is not half written.
pip_install() {
    local start
    start=$(wc -l < "$log")
    say "\$ pip install $*" >> "$log"
    : >> "$unfinished"
    if ! "$bin/python" -m pip install --no-deps --no-input --progress-bar off --disable-pip-version-check "$@" \
        >> "$log" 2>&1; then
        if ! tail -n "+$((start + 1))" -- "$log" | grep -q '^Installing collected packages'; then
            rm -f -- "$unfinished"
        fi
        return 1
    fi
    rm -f -- "$unfinished"
}

export PIP_USER=0
unset PYTHONPATH PYTHONHOME
SECONDS=0
count=$(grep -c '^[^#].*==' "$pins")
rm -f -- "$venv"/.installed-*

if [ -e "$unfinished" ] || [ "$(version_of "$bin/python")" != 3.11 ] \
    || ! "$bin/python" -m pip --version > /dev/null 2>&1; then
    say "Installing the Python environment into $shown (once; 3 to 5 minutes, 4 GB on disk)"
    say "  1/4 make an empty environment ($("$python" -V)): about 10 s"
    : >> "$unfinished"
    find "$venv/" -mindepth 1 ! -name .installing -delete
    : > "$log"
    "$python" -m venv "$venv" >> "$log" 2>&1 || failed "make an empty environment"
    rm -f -- "$unfinished"
else
    say "Bringing the Python environment in $shown up to date (20 s to 5 minutes)"
    say "  1/4 the environment itself is there"
    : > "$log"
fi

say "  2/4 install ${torch/==/ }: 0.5 to 1 minute"
if ! pip_install "$torch"; then
    say "      not in pip's own sources; trying PyTorch's CPU index"
    pip_install --index-url "$torch_index" "$torch" || failed "install $torch"
fi

say "  3/4 install the other $count packages: 2 to 3 minutes, more on a busy machine"
pip_install -r "$pins" || failed "install the packages of envs/cpu.txt"

say "  4/4 check it: import the main packages, about 20 s"
if ! HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 "$bin/python" -I - "$pins" "$torch" "$bin" >> "$log" 2>&1 << 'PY'
import importlib
import os
import sys
from importlib.metadata import PackageNotFoundError, version

pins, torch_pin, bin_dir = sys.argv[1:]
wrong = []
with open(pins, encoding="utf-8") as lines:
    wanted = [line.strip() for line in lines if "==" in line and not line.startswith("#")]
for pin in [torch_pin, *wanted]:
    name, wanted_version = pin.split("==")
    try:
        have = version(name)
    except PackageNotFoundError:
        have = "nothing"
    if have != wanted_version:
        wrong.append(f"{name}: {wanted_version} is wanted, {have} is installed")
for name in ["torch", "transformers", "vllm", "speculators", "hs_connectors", "snakemake"]:
    importlib.import_module(name)
for name in ["guidellm", "snakemake"]:
    if not os.access(os.path.join(bin_dir, name), os.X_OK):
        wrong.append(f"the command {name} is missing")
sys.exit("\n".join(wrong) or 0)
PY
then
    : >> "$unfinished" # something is damaged: the next call starts anew
    failed "check the environment"
fi

say "ok" > "$stamp"
say "Done in $SECONDS s: $shown"

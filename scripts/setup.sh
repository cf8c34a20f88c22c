#!/usr/bin/env bash
# Makes a virtual environment and installs Octavo into it, editable. Usage: setup.sh FOLDER WHAT ('.' or '.[test]').
# pyproject.toml says what is installed. Environment: PYTHON, PIP_ARGS.
set -uo pipefail

venv=$1 what=$2

say() { printf 'octavo: %s\n' "$*" >&2; }
fail() { say "error: $*"; exit 2; }

is_supported() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; }

find_python() {
    local name
    for name in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
        if is_supported "$name"; then echo "$name"; return; fi
    done
    name=${PYTHON:-python3}
    fail "Python 3.11, 3.12 or 3.13 is needed, but $name is $("$name" --version 2>&1 | tail -1); install one, or name it: make PYTHON=/path/to/python3.12"
}

make_venv() {
    local python log
    python=$(find_python) || exit 2
    say "creating $venv with $("$python" --version)"
    if log=$("$python" -m venv --clear "$venv" 2>&1); then return; fi
    # Debian has ensurepip in a separate package; an installed pip can install itself into the environment.
    if log=$("$python" -m venv --clear --without-pip "$venv" 2>&1 && "$python" -m pip --python "$venv/bin/python" install pip 2>&1); then return; fi
    rm -rf "$venv"
    if ! "$python" -c 'import ensurepip' 2>/dev/null; then
        fail "neither pip nor Python's ensurepip is installed: sudo apt install $("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')"
    fi
    fail "cannot create $venv: $(tail -1 <<<"$log")"
}

# What pyproject.toml lists for $what, line by line.
requirements() {
    "$venv/bin/python" - "$what" <<'END'
import sys
import tomllib

with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
print(*project["dependencies"], sep="\n")
for extra in filter(None, sys.argv[1].partition("[")[2].rstrip("]").split(",")):
    print(*project["optional-dependencies"][extra], sep="\n")
END
}

# pip's output goes to a log; on a terminal one line shows its progress. Arguments: what to install.
install() {
    local log=$venv/install.log show='1 == 0'
    [ -t 2 ] && show='/^ *(Collecting|Downloading|Building|Installing)/'
    # shellcheck disable=SC2086  # PIP_ARGS is a list of words
    "$venv/bin/python" -m pip install --disable-pip-version-check ${PIP_ARGS:-} "$@" 2>&1 \
        | tee -a "$log" | awk "$show"' { gsub(/^ +/, ""); printf "\r\033[K  %s", substr($0, 1, 76) > "/dev/stderr"; fflush() }'
    local code=${PIPESTATUS[0]}
    [ -t 2 ] && printf '\r\033[K' >&2
    if [ "$code" -ne 0 ]; then
        grep -iE '^ *error' "$log" | head -5 >&2
        fail "pip could not install Octavo; see $log"
    fi
}

if ! is_supported "$venv/bin/python" || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    make_venv
fi
if "$venv/bin/python" -c 'import torch' 2>/dev/null; then
    say "installing what changed into $venv"
else
    say "installing Octavo and what it needs into $venv (this takes minutes: torch is large)"
fi
# The kernels are compiled while pip installs what Octavo needs, and before it installs Octavo: it then finds them compiled, and would
# hide the progress and the errors.
: >"$venv/install.log"
"$venv/bin/python" -P octavo/kernels/cpu/build.py &
build=$!
trap 'kill "$build" 2>/dev/null' EXIT
requirements >"$venv/requirements.txt" || fail "cannot read pyproject.toml"
install --requirement "$venv/requirements.txt"
wait "$build"
trap - EXIT
# A plain path entry (compat): the default import hook loses to a folder named octavo next to the caller's script.
install --config-settings editable_mode=compat --editable "$what"

#!/bin/sh
# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
#
# Builds the virtual environment in which the Makefile's commands run, from the lock file.
#
# usage: tools/setup.sh [FOLDER [newest|oldest]]     (.venv and the newest JAX unless said otherwise)
#
# A stamp, written last, holds the checksum of all that was installed: with it a second call costs a
# fraction of a second; without it the folder was interrupted and is built again. uv is used where it
# is on PATH, else venv and pip. PYTHON names the interpreter to use; CUDA=0 or 1 overrides what is
# installed for a GPU.
set -eu
cd "$(dirname "$0")/.."
venv=${1:-.venv}
kind=${2:-newest}
stamp=$venv/tpjax-stamp

say() { printf 'tpjax: %s\n' "$*" >&2; }

has_uv() { command -v uv >/dev/null 2>&1; }

# Prints the path of an interpreter that runs, is new enough and, where pip must be used, can make an
# environment with pip inside. A name on PATH proves nothing: pyenv's shims exist and fail when run.
find_python() {
    needed='sys, venv, ensurepip'
    if has_uv; then needed=sys; fi
    pyenv_root=${PYENV_ROOT:-$HOME/.pyenv}
    for candidate in "${PYTHON:-}" python3.12 python3.13 python3.14 python3 python \
        "$pyenv_root"/versions/3.12.*/bin/python "$pyenv_root"/versions/3.1[3-9]*/bin/python; do
        if [ -n "$candidate" ] && command -v "$candidate" >/dev/null 2>&1 && "$candidate" -c \
            "import $needed; print(sys.executable) if sys.version_info >= (3, 12) else sys.exit(1)" \
            2>/dev/null; then
            return 0
        fi
    done
    return 1
}

lock=requirements.lock
if [ "$kind" = newest ] && [ "${CUDA:-$(nvidia-smi -L >/dev/null 2>&1 && echo 1)}" = 1 ]; then
    lock=requirements-cuda.lock
fi
oldest=$(sed -n 's/^ *"jax>=\([^,]*\),.*/\1/p' pyproject.toml)
version=$(sed -n 's/^__version__ = "\(.*\)"/\1/p' tpjax/__init__.py)
want="$kind $version $lock $PWD $(cat pyproject.toml "$lock" tools/setup.sh | cksum)"

probe='
import importlib.util, sys
needed = ("jax", "jaxlib", "numpy", "flax", "optax", "orbax", "absl", "pytest", "tpjax")
sys.exit(not all(map(importlib.util.find_spec, needed)))
'
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want" ] \
    && "$venv/bin/python" -c "$probe" >/dev/null 2>&1; then
    exit 0
fi

if has_uv; then
    install() { uv pip install --quiet --compile-bytecode --python "$venv/bin/python" "$@"; }
else
    install() { "$venv/bin/python" -m pip install -qq "$@"; }
fi
# The lock decides: what a machine's own configuration adds or caps is for its other projects.
export PIP_CONSTRAINT=/dev/null PIP_USER=0 PIP_REQUIRE_HASHES=0 PIP_DISABLE_PIP_VERSION_CHECK=1
unset PIP_TARGET PIP_PREFIX PIP_ROOT UV_CONSTRAINT UV_OVERRIDE UV_SYSTEM_PYTHON VIRTUAL_ENV

create() {
    if [ -e "$venv" ]; then say "$venv is not complete; building it again"; fi
    rm -rf "$venv"
    if ! python=$(find_python); then
        if has_uv && uv venv --quiet --seed --no-project --python 3.12 "$venv" 2>/dev/null; then
            return 0
        fi
        say "Python 3.12 or newer (with its venv module) was not found on PATH nor in pyenv;" \
            "install it, or name one: make PYTHON=/path/to/python3.12"
        exit 1
    fi
    say "making $venv with $python"
    if has_uv; then
        uv venv --quiet --seed --no-project --python "$python" "$venv"
    else
        "$python" -m venv "$venv"
    fi
}

fill() {
    say "installing from $lock into $venv (a minute or two, once)"
    pins=$venv/requirements.txt
    case $kind in
    newest) cp "$lock" "$pins" ;;
    oldest) sed "s/^jax==[^ ]*/jax==$oldest/; s/^jaxlib==[^ ]*/jaxlib==$oldest/" "$lock" >"$pins" ;;
    *) say "setup.sh: newest or oldest; got $kind"; exit 2 ;;
    esac
    install -r "$pins" && install --no-deps -e . && "$venv/bin/python" -c "$probe"
}

usable() {
    [ -f "$stamp" ] && "$venv/bin/python" -c 'import pip' >/dev/null 2>&1
}

if usable; then
    rm -f "$stamp"
    fill || { create; fill; } || exit 1
else
    create
    fill || { say "the installation failed (see above); the next call starts afresh"; exit 1; }
fi
printf '%s\n' "$want" >"$stamp"

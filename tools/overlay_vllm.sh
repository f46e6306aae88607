#!/usr/bin/env bash
# Makes a folder that, on PYTHONPATH, is another vLLM release on the CPU: its Python, with the kernels of the CPU build that
# is installed. For a release that has no CPU build yet; its own kernels are not tried.
#
#   tools/overlay_vllm.sh 0.33.0 FOLDER && PYTHONPATH=FOLDER make test
set -euo pipefail
version=${1:?a release of vLLM} folder=${2:?a folder to make}
[ -e "$folder" ] && { echo "overlay: $folder is there already: remove it, or name another" >&2; exit 1; }
python=$(cd "$(dirname "$0")/.." && pwd)/.venv/bin/python
kernels=$("$python" -c 'import importlib.util as u; print(*u.find_spec("vllm").submodule_search_locations)')
wheels=$(mktemp -d)
trap 'rm -r "$wheels"' EXIT
"$python" -m pip download -q --no-deps --only-binary=:all: -d "$wheels" "vllm==$version"
mkdir -p "$folder"
"$python" - "$wheels"/*.whl "$folder" <<'PYTHON'
import sys, zipfile
wheel = zipfile.ZipFile(sys.argv[1])
wheel.extractall(sys.argv[2], [name for name in wheel.namelist() if not name.endswith(".so")])
PYTHON
cp "$kernels"/*.so "$folder/vllm/"
# It is by "cpu" in the version that vLLM takes itself for a CPU build.
sed -i "s/^Version: .*/Version: $version+cpu/" "$folder/vllm-$version.dist-info/METADATA"

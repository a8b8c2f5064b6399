#!/usr/bin/env bash
# The engine's tests for aarch64 (NEON) on a machine of another kind, by emulation: compiled here, linked by zig,
# run by QEMU. Programs are static, so that QEMU needs no libraries of the other machine.
#
#   runs/aarch64.sh [CARGO TEST ARGUMENTS]     by default the whole engine: --package elmur-engine
#
# Needs rustup, python3 (a virtual environment in target/zig gets zig's linker) and qemu-aarch64 or
# qemu-aarch64-static (Debian: qemu-user-static); QEMU names it elsewhere.
set -euo pipefail
cd "$(dirname "$0")/.."
QEMU=${QEMU:-$(command -v qemu-aarch64 || command -v qemu-aarch64-static || true)}
if [ -z "$QEMU" ]; then
  echo "no qemu-aarch64; install QEMU for user programs (Debian: qemu-user-static), or set QEMU" >&2
  exit 2
fi
rustup target add aarch64-unknown-linux-musl
if ! [ -x target/zig/bin/cargo-zigbuild ]; then
  python3 -m venv target/zig
  target/zig/bin/pip install --quiet --disable-pip-version-check cargo-zigbuild ziglang
fi
[ $# -gt 0 ] || set -- --package elmur-engine
export PATH="$PWD/target/zig/bin:$PATH" CARGO_TARGET_AARCH64_UNKNOWN_LINUX_MUSL_RUNNER="$QEMU"
cargo-zigbuild test --target aarch64-unknown-linux-musl "$@"

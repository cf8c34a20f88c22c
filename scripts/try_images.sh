#!/usr/bin/env bash
# Runs the steps of deploy/docker/Dockerfile.KIND without Docker, in roots made by debootstrap, tests the result as the image's user, and sums
# the sizes. Needs root, debootstrap, and the wheels of `make release` in dist/ (others beside them, such as a CPU build of torch, come first).
# Usage: try_images.sh [cpu|cuda]. Environment: WORK (a folder for the roots), MIRROR (of Debian), PIP_ARGS, KEEP=1 (keep the roots), OCTAVO_PORT.
set -euo pipefail
cd "$(dirname "$0")/.."
kind=${1:-cpu}
work=${WORK:-build/images}
mirror=${MIRROR:-http://deb.debian.org/debian}
steps=deploy/docker/steps

say() { printf 'try-images: %s\n' "$*" >&2; }
[ "$(id -u)" = 0 ] || { say "this needs root, for chroot"; exit 2; }
command -v debootstrap >/dev/null || { say "debootstrap is not installed (Debian, Ubuntu: apt install debootstrap)"; exit 2; }
compgen -G "dist/octavo-*.whl" >/dev/null || { say "dist/ has no wheel: run make release first"; exit 2; }
mkdir -p "$work"
work=$(cd "$work" && pwd)

unmount() {
    for root in build run; do
        for place in dev proc; do
            mountpoint -q "$work/$root/$place" && umount "$work/$root/$place"
        done
    done
    return 0
}
finish() {
    unmount
    [ -n "${KEEP:-}" ] || rm -rf "${work:?}/build" "${work:?}/run"
}
trap finish EXIT

# What debian:bookworm-slim has: the minimal system without documents and translations.
if [ ! -d "$work/base" ]; then
    say "making the base"
    debootstrap --variant=minbase bookworm "$work/base.part" "$mirror" >"$work/debootstrap.log"
    rm -rf "$work"/base.part/usr/share/{doc,man,info,locale}/* "$work"/base.part/var/lib/apt/lists/* "$work"/base.part/var/cache/apt/archives/*.deb
    mv "$work/base.part" "$work/base"
fi
unmount
rm -rf "$work/build" "$work/run"

# A root with what a build has of its host: names, certificates and settings of pip.
open_root() {
    cp -a "$work/base" "$work/$1"
    cp /etc/resolv.conf "$work/$1/etc/resolv.conf"
    mkdir -p "$work/$1/steps" "$work/$1/host"
    cp "$steps"/*.sh "$work/$1/steps/"
    mount -t proc proc "$work/$1/proc"
    mount --bind /dev "$work/$1/dev"
}
inside() { # ROOT COMMAND…
    local root=$1; shift
    chroot "$work/$root" /usr/bin/env -i PATH=/opt/octavo/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin "$@"
}

say "build stage of the $kind image"
open_root build
inside build /steps/tools.sh
if [ -f /etc/ssl/certs/ca-certificates.crt ]; then cp /etc/ssl/certs/ca-certificates.crt "$work/build/host/"; fi
mkdir -p "$work/build/dist"
cp dist/*.whl "$work/build/dist/"
inside build PIP_ARGS="${PIP_ARGS:-}" PIP_CERT=/host/ca-certificates.crt /steps/install.sh "$kind"

say "final stage"
open_root run
base=$(du -sxm --exclude=proc --exclude=dev "$work/base" | cut -f1)
inside run /steps/runtime.sh "$kind"
packages=$(du -sxm --exclude=proc --exclude=dev "$work/run" | cut -f1)
cp -a "$work/build/opt/octavo" "$work/run/opt/octavo"
octavo=$(du -sxm "$work/run/opt/octavo" | cut -f1)
torch=$(du -sxm "$work"/run/opt/octavo/lib/python3.*/site-packages/torch | cut -f1)

say "as the image's user"
# The embedded model comes from the host's cache where it is there, as from a volume; else it is fetched.
model=${OCTAVO_CACHE:-$HOME/.cache/octavo}/SmolLM2-135M-Instruct.Q4_1.gguf
if [ -f "$model" ]; then install -o 10001 -g 10001 "$model" "$work/run/var/cache/octavo/"; fi
chroot --userspec=10001:10001 "$work/run" /usr/bin/env -i PATH=/opt/octavo/bin:/usr/local/bin:/usr/bin:/bin HOME=/var/cache/octavo \
    OCTAVO_CACHE=/var/cache/octavo HF_HOME=/var/cache/octavo/huggingface OCTAVO_PORT="${OCTAVO_PORT:-8000}" /steps/try.sh

say "MB: base $base, packages $((packages - base)), Octavo and Python packages $((octavo - torch)), torch $torch; image $((packages + octavo))"

#!/bin/sh
# Final stage: what Octavo needs to run, and its user. Usage: runtime.sh cpu|cuda.
set -eu
packages="python3 ca-certificates"
# Triton compiles its launcher against Python's headers when it first runs.
[ "$1" = cuda ] && packages="$packages gcc libc6-dev python3-dev"
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
# shellcheck disable=SC2086  # a list of words
apt-get install -y -qq --no-install-recommends $packages >/dev/null
rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin /var/log/apt /var/log/dpkg.log /var/cache/debconf/*-old /usr/share/doc/* /usr/share/man/*

groupadd --gid 10001 octavo
useradd --uid 10001 --gid octavo --no-create-home --home-dir /var/cache/octavo --shell /usr/sbin/nologin octavo
install -d -o octavo -g octavo -m 0750 /var/cache/octavo /var/lib/octavo

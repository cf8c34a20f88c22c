#!/bin/sh
# Build stage: what installs Octavo's wheel. Nothing of it reaches the image.
set -eu
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends python3 python3-venv ca-certificates >/dev/null
rm -rf /var/lib/apt/lists/*

#!/bin/sh
# Build stage: installs the wheel of /dist into /opt/octavo. Usage: install.sh cpu|cuda. Environment: PIP_ARGS.
# /dist may also hold other wheels, a CPU build of torch for example: they come before those of an index.
set -eu
kind=$1
python3 -m venv /opt/octavo
# shellcheck disable=SC2086  # PIP_ARGS is a list of words
/opt/octavo/bin/python -m pip install --quiet --no-cache-dir --disable-pip-version-check ${PIP_ARGS:-} \
    --find-links /dist --prefer-binary octavo

found=$(/opt/octavo/bin/python -c 'import torch; print("cuda" if torch.version.cuda else "cpu")')
if [ "$found" != "$kind" ]; then
    echo "install.sh: torch is a $found build, and this is the $kind image: name an index that has the other with" \
        "--build-arg PIP_ARGS='--extra-index-url …', or put its wheel into dist/" >&2
    exit 1
fi

# Headers, tools and tests of torch: serving needs none of them.
packages=$(/opt/octavo/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
rm -rf "$packages"/torch/share "$packages"/torch/test
# flashinfer, where an image based on this one adds it, compiles against them.
[ "$kind" = cuda ] || rm -rf "$packages"/torch/include
find "$packages"/torch/bin -type f ! -name torch_shm_manager -delete
find "$packages" -name '*.a' -delete
for package in numpy sympy networkx mpmath; do
    find "$packages/$package" -type d -name tests -prune -exec rm -rf {} +
done

/opt/octavo/bin/python -c 'import torch' # still works without them
/opt/octavo/bin/octavo --version

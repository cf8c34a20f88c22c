"""Adapters: train a few (train), compare answers with PEFT (compare), and measure what they cost on a CPU (speed), beside llama.cpp (llama) and on a GPU
(gpu).

    python -m benchmarks.adapters train --model FOLDER --out FOLDER
    python -m benchmarks.adapters compare --model FOLDER --adapters FOLDER
    python -m benchmarks.adapters speed [--model MODEL] [--rounds 3]
    python -m benchmarks.adapters replay [--library FILE.so] [--cases 8qv]
    python -m benchmarks.adapters llama --llama-server PROGRAM [--adapter FOLDER] [--rounds 3]
    python -m benchmarks.adapters many [--parts stall,zipf] [--rounds 3]
    python -m benchmarks.adapters gpu [--parts speed,stall,zipf] [--rounds 3] [--result FILE.json]

train and compare need `peft` and `transformers`; FOLDER is a model in Hugging Face layout. train makes three adapters (q and v; all seven
matrices; all seven with rsLoRA) in a few minutes on a CPU. compare takes the greedy tokens of Octavo in float32 and asks PEFT, with the adapter not
merged, for the logprobs of the same tokens: alone, mixed in one batch, preempted, and continued by another engine. They must be within
1e-4, and Octavo's equal in all four, to the bit.

speed: tokens per second of decoding with random rank-16 adapters, beside the base in the same engine and beside an engine without
--enable-lora, in turn; the medians of the ratios of a round. It prints what the adapters' bytes and products must cost: the limit.

replay: the operations of one decode step, with and without adapters in turn, without Python between them; by this library of native kernels, and
by others beside it.

llama: tokens per second of `octavo serve` and of llama.cpp's server on a CPU, both with the same adapters as GGUF files in float16, in turn: the base,
one adapter for all clients, and a different one for each.

many: on a CPU, a model of SmolLM2's shape with random weights: what loading 40 MB adds to the time between other requests' tokens, and 1,000
registered adapters (q, k, v, o; 3.7 MB each) with Zipf traffic and a budget for 100, beside a budget for all.

gpu: an 8B model with random weights and 64 rows: 8 adapters on all matrices, 64 different ones on q, k, v and o, and
the flag unused, beside the base; what loading 40 MB adds to the time between other requests' tokens; and 1,000
registered adapters of 27 MB with Zipf traffic and a budget for 100. `--tiny` tries it on a CPU.

The registered adapters have 50 files of weights (`--files`; 0: one for each) and a scale of their own. An engine reads, checks, hashes and holds each of
them by itself; what they share is the system's page cache and the disk."""

import argparse
import sys

from benchmarks.adapters import compare, gpu, llama, replay, speed, train
from octavo.errors import ConfigError


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.adapters", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    train.add_options(commands.add_parser("train"))
    compare.add_options(commands.add_parser("compare"))
    speed.add_options(commands.add_parser("speed"))
    replay.add_options(commands.add_parser("replay"))
    llama.add_options(commands.add_parser("llama"))
    gpu.add_cpu_options(commands.add_parser("many"))
    gpu.add_options(commands.add_parser("gpu"))
    options = parser.parse_args()
    try:
        return int(options.run(options))
    except ConfigError as error:
        sys.exit(error.message)


if __name__ == "__main__":
    sys.exit(main())

"""Speculation: that it changes no token (identity), and what it gains on a CPU (cpu) and on a GPU (gpu).

    python -m benchmarks.speculation identity --model stories260K.gguf --requests 10000
    python -m benchmarks.speculation identity --model small --device cuda --requests 1000 --deterministic
    python -m benchmarks.speculation identity --model small-mtp --device cuda --requests 250 --count
    python -m benchmarks.speculation cpu --model qwen2.5-coder-0.5b.gguf --rounds 3
    python -m benchmarks.speculation cpu --model qwen2.5-coder-1.5b.gguf --draft-model qwen2.5-coder-0.5b.gguf \\
        --sides none,draft_model --works code --clients 1
    python -m benchmarks.speculation llama-cpp --server llama-server --model qwen2.5-coder-0.5b.gguf --works copy,chat
    python -m benchmarks.speculation gpu --result speculation.json

identity: random requests (greedy, seeded, penalties, bias, grammars, stop strings and ids, n > 1, logprobs, predictions) through the
engine, without speculation and with each drafter, among others, preempted, continued by other engines, and replayed from a recording.
Tokens, logprobs and ends must be equal, to the bit. The models small and small-mtp are made with random weights; where a head drafts,
three of four requests want two tokens, so that it is right now and then.

cpu: copy and edit work, chat and JSON answers at 1, 8 and 32 clients, with --speculative-config auto and none, in turn. Both engines
live in one process. --works again --sides none,suffix,recent asks for much the same in each round; recent drafts from the answers of earlier
rounds (suffix_decoding_max_cached_requests). Tokens per second are medians over rounds, and the ratio is of the two sides of a round.

llama-cpp: the same works by llama.cpp's server, without its drafts and with them.

gpu: one engine with the shape of Llama-3.1-8B, random weights and an acceptance by a made-up rule: what a verifying step costs, tokens
per second of one stream and of 256, with drafts and without in turn, what the host takes, and a draft model of the shape of Qwen3-0.6B.
With --model FOLDER --rows 4 --tokens 32 it is a rehearsal on a CPU."""

import argparse
import sys

from benchmarks.speculation import cpu, gpu, identity, llama_cpp


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speculation", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    identity.add_options(commands.add_parser("identity"))
    cpu.add_options(commands.add_parser("cpu"))
    gpu.add_options(commands.add_parser("gpu"))
    llama_cpp.add_options(commands.add_parser("llama-cpp"))
    options = parser.parse_args()
    return int(options.run(options))


if __name__ == "__main__":
    sys.exit(main())

"""Speculation: that it changes no token (identity), and what it gains on a CPU (cpu).

    python -m benchmarks.speculation identity --model stories260K.gguf --requests 10000
    python -m benchmarks.speculation cpu --model qwen2.5-coder-0.5b.gguf --rounds 3
    python -m benchmarks.speculation cpu --model qwen2.5-coder-1.5b.gguf --draft-model qwen2.5-coder-0.5b.gguf \\
        --sides none,draft_model --works code --clients 1

identity: random requests (greedy, seeded, penalties, bias, grammars, stop strings and ids, n > 1, logprobs, predictions) through the
engine, without speculation and with each drafter, among others, preempted, continued by other engines, and replayed from a recording.
Tokens, logprobs and ends must be equal, to the bit.

cpu: copy and edit work, chat and JSON answers at 1, 8 and 32 clients, with --speculative-config auto and none, in turn. Both engines
live in one process; tokens per second are medians over rounds, and the ratio is of the two sides of a round."""

import argparse
import sys

from benchmarks.speculation import cpu, identity


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speculation", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    identity.add_options(commands.add_parser("identity"))
    cpu.add_options(commands.add_parser("cpu"))
    options = parser.parse_args()
    return int(options.run(options))


if __name__ == "__main__":
    sys.exit(main())

"""`octavo bench latency`: measures the time of one batch of equal requests, from submission to the last token."""

import argparse
import sys

from tqdm import tqdm

from octavo.cli.bench import report
from octavo.cli.bench.offline import Subject


def run(arguments: argparse.Namespace) -> int:
    report.check_writable(arguments.result)
    subject = Subject(arguments, arguments.batch_size)
    for _ in range(arguments.num_iters_warmup):
        subject.time_together()
    rounds = tqdm(range(arguments.num_iters), unit="batch", file=sys.stderr, disable=not sys.stderr.isatty())
    seconds = [subject.time_together() for _ in rounds]
    spread = report.spread(seconds)
    per_token = report.spread([second / arguments.output_len for second in seconds])
    facts = subject.describe()
    print(
        f"{facts['model']} on {facts['device']}, {facts['dtype']}: {arguments.batch_size} requests, "
        f"{arguments.input_len} tokens in, {arguments.output_len} out, {arguments.num_iters} times\n"
    )
    print("\n".join(report.show_spreads({"batch": spread, "batch / output token": per_token})))
    lengths = {name: getattr(arguments, name) for name in ("batch_size", "input_len", "output_len", "num_iters")}
    report.write(arguments.result, {"engine": facts, "settings": lengths, "latency_ms": spread, "seconds": seconds})
    return 0

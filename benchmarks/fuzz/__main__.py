"""`make fuzz ARGS="--only gguf,regex --cases 50000"`: fuzz the parsers and print what was found. Exits with 1 if there is a fault."""

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from benchmarks.fuzz import answers, chats, files, grammars, requests, state
from benchmarks.fuzz.campaign import Report, as_json, campaign, run_child

TARGETS = {**requests.TARGETS, **files.TARGETS, **grammars.TARGETS, **answers.TARGETS, **chats.TARGETS, **state.TARGETS}


def main() -> int:
    parser = argparse.ArgumentParser(prog="make fuzz ARGS=…", description=__doc__)
    parser.add_argument("--only", default="", help="targets, separated by commas; empty: all of them")
    parser.add_argument("--cases", type=int, default=50_000, help="cases for each target")
    parser.add_argument("--jobs", type=int, default=1, help="targets at the same time")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--corpus", type=Path, default=Path(".fuzz"), help="folder of the cases that found new code")
    parser.add_argument("--json", type=Path, help="file for the whole report, with every fault's bytes")
    parser.add_argument("--list", action="store_true", help="print the targets' names")
    parser.add_argument("--replay", nargs=2, metavar=("TARGET", "HEX"), help="run one case, without limits")
    parser.add_argument("--child", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        name, cases, seed, folder, scratch = options.child
        print(as_json([run_child(TARGETS[name](), int(cases), int(seed), Path(folder), Path(scratch))]).strip()[1:-1])
        return 0
    if options.list:
        print("\n".join(TARGETS))
        return 0
    if options.replay:
        TARGETS[options.replay[0]]().run(bytes.fromhex(options.replay[1]))
        return 0
    names = options.only.split(",") if options.only else list(TARGETS)
    if unknown := [name for name in names if name not in TARGETS]:
        parser.error(f"no target {unknown[0]!r}; there are {', '.join(TARGETS)}")
    reports: list[Report] = []
    print(
        f"{'target':32} {'cases':>7} {'refused':>8} {'arcs':>6} {'corpus':>6} {'slowest':>8} {'seconds':>8}  faults",
        flush=True,
    )
    with ThreadPoolExecutor(options.jobs) as pool:
        runs = [
            pool.submit(campaign, name, options.cases, options.seed, _folder(options.corpus, name)) for name in names
        ]
        for run in as_completed(runs):
            reports.append(run.result())
            _print(reports[-1])
            if options.json:
                options.json.write_text(as_json(reports))
    return 1 if any(report.faults for report in reports) else 0


def _folder(corpus: Path, name: str) -> Path:
    return corpus / name.strip("/").replace("/", "-")


def _print(report: Report) -> None:
    print(
        f"{report.target:32} {report.num_cases:7,} {report.num_refused:8,} {report.num_arcs:6,} {report.num_corpus:6,} "
        f"{report.slowest:6.2f} s {report.seconds:6.0f} s  {len(report.faults) or 'none'}",
        flush=True,
    )
    hit, known = (sum(pair[at] for pair in report.lines.values()) for at in (0, 1))
    if known:
        print(f"{'':32} {hit} of {known} lines of the functions entered, in {len(report.lines)} files")
    for fault in report.faults[:20]:
        print(f"    {fault.kind}: {fault.what}\n      {fault.case[:200]}{'…' if len(fault.case) > 200 else ''}")


if __name__ == "__main__":
    sys.exit(main())

"""`octavo replay`: shows what a recording contains, whether its plans are reproduced, and what other settings would have changed.
The modules in replay/ do the work."""

import time
from pathlib import Path
from typing import Any

import msgspec

from octavo.errors import ConfigError
from octavo.messages import StepPlan
from octavo.recording.format import Aborted, Arrived, Recording, Ticked, read
from octavo.replay.recompute import Findings, Recomputation
from octavo.replay.replay import ReplayedCommit, ReplayedPlan
from octavo.replay.simulate import SimulatedRun
from octavo.replay.stats import RunStats, at
from octavo.replay.what_if import Learned, ScheduleSettings, learn, pace_of
from octavo.schedule.request import Request
from octavo.schedule.step_costs import StepCosts

EXIT_DIFFERS = 1
_NAMES = 6  # requests named in one line


def run(
    path: str,
    *,
    model: str | None,
    steps: str | None,
    request: str | None,
    what_if: list[str],
    as_json: bool,
) -> int:
    """Run the command. `model`: also compute the tokens, with this model or ("") with the recorded one; None: only plans."""
    recording = read(Path(path))
    first, last = _steps(steps)
    changed = ScheduleSettings.of(recording).changed(what_if) if what_if else None
    lines: list[str] = []
    narrator = _Narrator(lines, first, last, request)
    learned = learn(recording, narrator.describe)
    narrator.describe_next(learned)
    if request is not None and not narrator.has_found:
        raise ConfigError(f"--request {request}: there is no such request in {path}")
    findings = Recomputation(recording, model).run() if model is not None else None
    report = _report(path, recording, learned, findings)
    if changed is not None:
        report["what_if"] = _compare(recording, learned, changed)
    if as_json:
        report["story"] = lines
        print(msgspec.json.encode(report).decode())
    else:
        _print(report, lines)
    differs = report["plans"]["same"] < report["plans"]["steps"] or (
        findings is not None and findings.num_same < findings.num_tokens
    )
    return EXIT_DIFFERS if differs else 0


def _steps(text: str | None) -> tuple[int, int]:
    """Parse A:B, A:, :B or A to (first, last); an empty range if there is no text."""
    if text is None:
        return 0, -1
    start, colon, end = text.partition(":")
    if not all(part.isdecimal() or not part for part in (start, end)) or text in ("", ":"):
        raise ConfigError(f"--steps {text}: give A:B, two step numbers, or one step number")
    first = int(start or 0)
    return first, int(end) if end else (2**62 if colon else first)


# ── one step, one request ───────────────────────────────────────────────────────────────────────────


class _Narrator:
    """Describes what happens in the chosen steps, or to the chosen request, in lines of text."""

    def __init__(self, lines: list[str], first: int, last: int, request: str | None) -> None:
        self._lines, self._first, self._last, self._request = lines, first, last, request
        self.has_found = False
        self._outputs = 0
        self.next: tuple[StepPlan, list[Request]] | None = None

    def describe_next(self, learned: Learned) -> None:
        """Describe the next plan if the recording ends in the middle of work."""
        replay = learned.replay
        if replay.num_same == replay.num_steps and not replay.scheduler.is_idle:
            self.next = replay.next_plan()
            if self.next is not None:
                plan, requests = self.next
                if self._request is None and self._first <= self._last:
                    self._lines.append(
                        f"{describe_plan(plan, requests)}; not recorded: the engine was about to execute it"
                    )

    def describe(self, happening: object) -> None:
        match happening:
            case ReplayedPlan():
                self._planned(happening)
            case Arrived() if happening.id == self._request:
                self.has_found = True
                begun = sum(length or 0 for length in happening.begun_len)
                more = f", {begun} output tokens from an earlier engine" if begun else ""
                self._lines.append(f"arrived: {happening.prompt_len} prompt tokens{more}")
            case Aborted() if happening.id == self._request:
                which = "" if happening.index < 0 else f" choice {happening.index}"
                why = "a stop string was found" if happening.reason == "stop" else "the client disconnected"
                self._lines.append(f"aborted{which}: {why}")
            case ReplayedCommit() if self._request is not None:
                self._committed(happening)

    def _planned(self, happening: ReplayedPlan) -> None:
        plan = happening.plan
        if not happening.is_same:
            self._lines.append(f"{describe_plan(plan, happening.requests)}; the recorded plan is different")
            return
        if self._request is None:
            if self._first <= plan.step <= self._last and not plan.is_empty:
                self._lines.append(f"{describe_plan(plan, happening.requests)}; {describe_changes(happening)}")
            return
        for request in happening.admitted:
            if request.id == self._request:
                self.has_found = True
                self._lines.append(f"step {plan.step}: enters row {request.row}")
        for returned in happening.returned:
            if returned.request.id == self._request:
                how = "swapped out" if returned.is_swapped else "to be recomputed"
                self._lines.append(f"step {plan.step}: preempted, {returned.num_computed} tokens {how}")
        for request, start, count in zip(happening.requests, plan.starts, plan.counts, strict=True):
            if request.id == self._request:
                self.has_found = True
                if count > 1 or start < request.prompt_len - 1:
                    self._lines.append(f"step {plan.step}: {name_of(request)} computes {start}…{start + count - 1}")

    def _committed(self, happening: ReplayedCommit) -> None:
        for delta in happening.deltas:
            if delta.request_id == self._request:
                self._outputs += len(delta.token_ids)
                if self._outputs == len(delta.token_ids) > 0:
                    self._lines.append(f"step {happening.plan.step}: first token")
                if delta.finish is not None:
                    self._lines.append(
                        f"step {happening.plan.step}: choice {delta.index} ends ({delta.finish.reason}); {self._outputs} output "
                        f"tokens, {delta.finish.num_cached_tokens} prompt tokens from the prefix cache, preempted "
                        f"{delta.finish.num_preemptions} times"
                    )


def name_of(request: Request) -> str:
    return f"{request.id}[{request.index}]" if request.params.n > 1 else request.id


def describe_plan(plan: StepPlan, requests: list[Request]) -> str:
    """Describe what each request computes in a step."""
    prompts, decodes = [], []
    for request, start, count in zip(requests, plan.starts, plan.counts, strict=True):
        if count > 1 or start < request.prompt_len - 1:
            prompts.append(f"{name_of(request)} {start}…{start + count - 1}")
        else:
            decodes.append(name_of(request))
    parts = [f"step {plan.step}: {len(plan.rows)} rows, {sum(plan.counts)} tokens"]
    parts += [f"computes {_listed(prompts)}"] if prompts else []
    parts += [f"decodes {_listed(decodes)}"] if decodes else []
    return "; ".join(parts)


def describe_changes(happening: ReplayedPlan) -> str:
    plan = happening.plan
    entered = [f"{name_of(request)} in row {request.row}" for request in happening.admitted]
    returned = [name_of(each.request) for each in happening.returned]
    parts = [f"enters {_listed(entered)}"] if entered else []
    parts += [f"preempts {_listed(returned)}"] if returned else []
    parts += [f"frees rows {_listed([str(row) for row in plan.leaves])}"] if plan.leaves else []
    parts += [f"moves {len(plan.moves)} pages"] if plan.moves else []
    return "; ".join(parts) or "no request enters or leaves"


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _NAMES} more" if len(names) > _NAMES else ""
    return ", ".join(names[:_NAMES]) + more


# ── the report ──────────────────────────────────────────────────────────────────────────────────────


def _report(path: str, recording: Recording, learned: Learned, findings: Findings | None) -> dict[str, Any]:
    header, replay, tally = recording.header, learned.replay, learned.tally
    last = recording.records[-1] if recording.records else None
    report: dict[str, Any] = {
        "file": path,
        "model": header.model,
        "version": header.version,
        "engine": header.engine,
        "begins": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(header.wall)),
        "seconds": last.micros / 1e6 - header.clock if last is not None and not isinstance(last, Ticked) else 0.0,
        "settings": msgspec.to_builtins(ScheduleSettings.of(recording)),
        "page_size": header.report.page_size,
        "with_tokens": header.with_tokens,
        "requests": len(learned.requests),
        "notes": recording.notes,
        "plans": {"steps": replay.num_steps, "same": replay.num_same},
        "totals": totals(tally),
    }
    if findings is not None:
        first = findings.first
        report["tokens"] = {"compared": findings.num_tokens, "same": findings.num_same}
        report["tokens"]["first_difference"] = first._asdict() if first is not None else None
    return report


def totals(tally: RunStats) -> dict[str, Any]:
    return {
        "steps": tally.num_steps,
        "seconds computing": tally.seconds,
        "output tokens": tally.num_output,
        "output tokens a second of computing": tally.num_output / tally.seconds if tally.seconds else 0.0,
        "rows a step, mean": tally.num_rows / tally.num_steps if tally.num_steps else 0.0,
        "first token, steps, median": at(tally.first_steps, 0.5),
        "first token, steps, p99": at(tally.first_steps, 0.99),
        "first token, s, median": at(tally.first_seconds, 0.5),
        "first token, s, p99": at(tally.first_seconds, 0.99),
        **{
            f"waits for {reason}, requests × steps": tally.waits[reason]
            for reason in ("rows", "pages", "budget", "streams", "order", "turn")
        },
        "preemptions": tally.preemptions,
        "prompt tokens found cached": tally.hit_tokens,
        "pages in use, most": tally.most_pages,
        "requests refused": tally.num_refused,
    }


def _compare(recording: Recording, learned: Learned, changed: ScheduleSettings) -> dict[str, Any]:
    """Compare the recorded run with two simulated ones: with the recorded settings and with the changed ones."""
    pace, settings = pace_of(learned.samples), ScheduleSettings.of(recording)
    if changed.enable_prefix_caching and not settings.enable_prefix_caching and not recording.header.with_tokens:
        raise ConfigError(
            "--what-if enable_prefix_caching: the recording has neither token ids nor page keys; record with --record-tokens"
        )
    same = SimulatedRun(learned, settings, pace).run()
    other = SimulatedRun(learned, changed, pace).run()
    differs = {name for name in settings.__struct_fields__ if getattr(settings, name) != getattr(changed, name)}
    return {
        "settings": {name: [getattr(settings, name), getattr(changed, name)] for name in sorted(differs)},
        "pace": msgspec.structs.asdict(pace),
        "recorded": totals(learned.tally),
        "as recorded, estimated": totals(same),
        "what if, estimated": totals(other),
    }


def _print(report: dict[str, Any], lines: list[str]) -> None:
    settings, plans, total = report["settings"], report["plans"], report["totals"]
    recorded = "with" if report["with_tokens"] else "without"
    caching = "on" if settings["enable_prefix_caching"] else "off"
    _line("recording", f"engine {report['engine']} of octavo {report['version']}, model {report['model']}")
    _line("begins", f"{report['begins']}, {report['seconds']:.1f} s long; {recorded} token ids")
    _line(
        "settings",
        f"{settings['max_num_seqs']} rows, {settings['max_num_batched_tokens']} tokens a step, {settings['num_pages']} pages of "
        f"{report['page_size']} tokens, {settings['num_host_pages']} on the host, prefix caching {caching}, {settings['scheduling_policy']}",
    )
    _line(
        "holds",
        f"{total['steps']} steps, {total['seconds computing']:.2f} s of computing, {report['requests']} requests, "
        f"{total['output tokens']} output tokens",
    )
    for note in report["notes"]:
        _line("note", note)
    for line in lines:
        print(line)
    same, steps = plans["same"], plans["steps"]
    _line(
        "plans",
        f"identical, step by step: {same} of {steps}"
        if same == steps
        else f"{same} of {steps} identical, the next differs",
    )
    if "tokens" in report:
        tokens = report["tokens"]
        _line("tokens", f"identical: {tokens['same']} of {tokens['compared']}")
        if (first := tokens["first_difference"]) is not None:
            _line(
                "",
                "first difference: step {step}, {request}[{choice}]: {recorded} recorded, {computed} computed".format(
                    **first
                ),
            )
    if "what_if" in report:
        _print_what_if(report["what_if"])


def _print_what_if(compared: dict[str, Any]) -> None:
    names = ("recorded", "as recorded, estimated", "what if, estimated")
    changes = ", ".join(f"{name} {old} → {new}" for name, (old, new) in compared["settings"].items())
    _line("what if", changes or "nothing changes")
    print(f"{'':42}{'recorded':>12}{'estimated':>12}{'what if':>12}")
    for row in compared["recorded"]:
        cells = [_cell(compared[name][row]) for name in names]
        print(f"{row:42}" + "".join(f"{cell:>12}" for cell in cells))
    pace = StepCosts(**compared["pace"])
    print(
        f"Times of the last two columns are estimates: {pace.step * 1e3:.3f} ms a step, {pace.row * 1e3:.4f} ms a row, "
        f"{pace.token * 1e3:.4f} ms a prompt token, {pace.context * 1e6:.3f} ms for 1,000 tokens of context, fitted to the recorded steps. The difference between the first two columns "
        "shows how far to trust the third."
    )


def _cell(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.3f}" if isinstance(value, float) else f"{value:,}"


def _line(name: str, text: str) -> None:
    print(f"{name:10}{text}")

"""The memory budget in words and bytes, as printed at start.
Knows nothing of how the sizes were found."""

from octavo.messages import EngineReport


def budget_lines(report: EngineReport) -> list[str]:
    kv_bytes = report.num_pages * report.page_bytes
    num_tokens = report.num_pages * report.page_size
    full_length = num_tokens // report.max_model_len
    lines = [
        f"device {report.device}, {report.dtype}",
        f"weights {report.weights_bytes:,} bytes",
        f"KV pages {kv_bytes:,} bytes: {report.num_pages:,} pages of {report.page_size} tokens = {num_tokens:,} tokens, "
        f"or {full_length:,} requests of the full {report.max_model_len:,} tokens",
    ]
    if report.num_host_pages:
        lines.append(
            f"swap space {report.num_host_pages * report.page_bytes:,} bytes: {report.num_host_pages:,} host pages"
        )
    lines.append(
        f"at most {report.max_num_seqs:,} at a time run, a step computes at most {report.max_num_batched_tokens:,} tokens"
    )
    return lines + list(report.notes)

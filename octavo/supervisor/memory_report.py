"""The memory budget that is logged at start, in bytes."""

from octavo.cache.span import pages_of
from octavo.messages import DeviceMemory, EngineReport


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _device_memory(memory: DeviceMemory, kv_bytes: int) -> str:
    """Break the GPU's memory down into parts that add up to the total."""
    parts = [f"{memory.other:,} other processes"] if memory.other else []
    parts += [
        f"{memory.own:,} this process (weights, tables, context)",
        f"{memory.working:,} workspace of a step",
        f"{memory.reserve:,} reserve (graphs, libraries)",
        f"{kv_bytes:,} KV pages",
        f"{memory.for_pages - kv_bytes:,} left free",
    ]
    return f"GPU memory {memory.total:,} bytes = {' + '.join(parts)}"


def _held(report: EngineReport) -> str:
    """Token capacity of the pages. Empty with sliding windows: it then depends on the lengths of the requests."""
    if any(report.windows):
        return ""
    return f"{_count(report.num_pages * report.page_size, 'token')}, or "


def _labels(count: int) -> str:
    return f", a classification head with {_count(count, 'label')}" if count else ""


def budget_lines(report: EngineReport) -> list[str]:
    if not report.can_generate:
        return [
            f"device {report.device}, {report.dtype}",
            f"weights {report.weights_bytes:,} bytes",
            f"encoder: embeddings of {report.hidden_size:,} numbers{_labels(report.num_labels)}, no KV pages",
            f"in a step: up to {_count(report.max_num_batched_tokens, 'token')} of up to {_count(report.max_num_seqs, 'prompt')}",
            *report.notes,
        ]
    kv_bytes = report.num_pages * report.page_bytes
    full_length = report.num_pages // pages_of(
        report.max_model_len, report.page_size, report.windows, report.max_num_batched_tokens
    )
    lines = [
        f"device {report.device}, {report.dtype}",
        f"weights {report.weights_bytes:,} bytes",
        f"KV pages {kv_bytes:,} bytes: {_count(report.num_pages, 'page')} of {_count(report.page_size, 'token')} "
        f"= {_held(report)}{_count(full_length, 'request')} of the full {report.max_model_len:,} tokens",
    ]
    if report.memory is not None:
        lines.append(_device_memory(report.memory, kv_bytes))
    if report.num_host_pages:
        lines.append(
            f"swap space {report.num_host_pages * report.page_bytes:,} bytes: {report.num_host_pages:,} host pages"
        )
    lines.append(
        f"at once: up to {_count(report.max_num_seqs, 'request')}; in a step: up to {_count(report.max_num_batched_tokens, 'token')}"
    )
    return lines + list(report.notes)

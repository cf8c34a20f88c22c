"""Attributes of vLLM's LLM and AsyncLLM that are not here, with what to use instead."""

_ADAPTERS = "pass lora_request to generate: adapters are loaded when they are used"
_CONFIG = "the options are in .config, what was loaded in .report"
_HEALTH = "check_health() raises EngineDead where the engine has ended"
_LATER = "generate takes any number of prompts; AsyncLLM runs requests as they come"
_POOLED = "embed, classify and score give what a model pools"
_PROFILER = "there is no profiler"
_SLEEP = "close() frees the memory"
_WORKERS = "callers' code does not run in workers"
MISSING = {
    "llm_engine": _CONFIG,
    "model_config": _CONFIG,
    "vllm_config": _CONFIG,
    "get_model_config": _CONFIG,
    "sleep": _SLEEP,
    "wake_up": _SLEEP,
    "encode": _POOLED,
    "reward": _POOLED,
    "collective_rpc": _WORKERS,
    "apply_model": _WORKERS,
    "start_profile": _PROFILER,
    "stop_profile": _PROFILER,
    "get_metrics": "engine_stats() of an LLM has the counts of its engine",
    "preprocess_chat": "get_tokenizer().apply_chat_template renders a conversation",
    "set_tokenizer": "the option tokenizer names another one",
    "enqueue": _LATER,
    "wait_for_completion": _LATER,
    "add_lora": _ADAPTERS,
    "remove_lora": _ADAPTERS,
    "list_loras": _ADAPTERS,
    "pin_lora": _ADAPTERS,
    "is_running": _HEALTH,
    "is_stopped": _HEALTH,
    "errored": _HEALTH,
    "dead_error": _HEALTH,
    "do_log_stats": "there is no periodic log line of statistics",
}


def missing(of: object, name: str) -> AttributeError:
    """The error for an attribute that `of` does not have."""
    hint = f": {MISSING[name]}" if name in MISSING else ""
    return AttributeError(f"{type(of).__name__!r} object has no attribute {name!r}{hint}", name=name, obj=of)

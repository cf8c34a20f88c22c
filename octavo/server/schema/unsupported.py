"""Tables of fields that no schema honours: known and not supported, labels, without effect; and why. fields.py reads them.

A nested field goes by its path (tools[].function.strict), and applies wherever a dialect has the object that holds it.
"""

Harmless = tuple[object, ...]
"""Values that ask for nothing beyond the default behaviour, so that clients that send their defaults work. null always does."""

# Known fields that are not supported: any value that is not harmless is refused by name, or, where WITHOUT_EFFECT has it, accepted
# and listed in the answer.
NOT_OFFERED: dict[str, Harmless] = {
    # OpenAI
    "service_tier": ("auto", "default"),
    "store": (False,),
    # vLLM: sampling
    "thinking_token_budget": (),
    "watermarking": (False,),
    # structured output
    "grammar_lazy": (False,),
    "grammar_triggers": ([],),
    "guided_decoding_backend": (),
    # vLLM: engine
    "kv_transfer_params": (),
    "prompt_embeds": (),
    "request_id": (),
    "return_prompt_text": (False,),
    "return_token_offsets": (False,),
    "session_id": (),
    "vllm_xargs": ({},),
}

NOT_OFFERED_WITHIN: dict[str, Harmless] = {
    "messages[].annotations": ([],),
    "messages[].audio": (),
    "messages[].function_call": ({}, ""),
    "messages[].prefix": (False,),
    "messages[].thinking_blocks": ([],),
    "structured_outputs.backend": (),
    "structured_outputs.disable_fallback": (False,),
    "tools[].allowed_callers": ([], ["direct"]),
    "tools[].defer_loading": (False,),
}

LABELS: dict[str, str] = {
    "user": "a label for the caller's own use",
    "metadata": "a label for the caller's own use",
    "safety_identifier": "a label for the caller's own use",
    # in messages that clients send back as they, or their libraries, had them from an earlier answer
    "messages[].parsed": "parsed from content by the client's library",
    "messages[].provider_specific_fields": "private data of the client's library",
    "messages[].content[].caller": "only the model calls tools",
    "messages[].content[].citations": "chat templates have no place for citations",
    "messages[].content[].content[].citations": "chat templates have no place for citations",
    "messages[].content[].signature": "reasoning is plain text here and needs no signature",
    "messages[].content[].toolset_name": "calls use the tool's own name",
    "messages[].tool_calls[].index": "calls are read in the order of the list",
    "messages[].tool_calls[].function.parsed_arguments": "parsed from arguments by the client's library",
    "system[].citations": "chat templates have no place for citations",
    "tools[].eager_input_streaming": "arguments are sent in one piece, once they are complete",
    # of the Responses API
    "input[].caller": "only the model calls tools",
    "input[].namespace": "calls use the tool's own name",
    "input[].parsed_arguments": "parsed from arguments by the client's library",
    "input[].phase": "chat templates have no place for it",
    "input[].status": "items are accepted with any status",
    "input[].content[].annotations": "chat templates have no place for annotations",
    "input[].content[].logprobs": "logprobs of input text are not used",
    "input[].content[].parsed": "parsed from text by the client's library",
    "input[].content[].prompt_cache_breakpoint": "equal prefixes are shared automatically",
    "input[].output[].prompt_cache_breakpoint": "equal prefixes are shared automatically",
    "input[].prompt_cache_breakpoint": "equal prefixes are shared automatically",
    # of what an answer must look like
    "response_format.json_schema.description": "only the schema constrains the output",
    "response_format.json_schema.name": "only the schema constrains the output",
    "response_format.json_schema.strict": "a schema is always enforced",
    "text.format.description": "only the schema constrains the output",
    "text.format.name": "only the schema constrains the output",
    "text.format.strict": "a schema is always enforced",
}
"""Fields that ask for nothing: accepted silently, and why that is right."""

HINTS: tuple[str, ...] = (
    "messages[].cache_control",
    "messages[].content[].cache_control",
    "messages[].content[].content[].cache_control",
    "system[].cache_control",
    "tools[].cache_control",
    "tools[].function.cache_control",
)
"""Members that every dialect takes where it has the object that holds them, whether or not its own schema names them: they ask for pages to stay
(server/generate/retention.py)."""

_AT_START = "it is decided when the server starts"

WITHOUT_EFFECT: dict[str, str] = {
    "guided_decoding_backend": "there is only one backend",
    "kv_transfer_params": "KV pages are not transferred between servers",
    "mm_processor_kwargs": "images and audio are not supported",
    "media_io_kwargs": "images and audio are not supported",
    "messages[].annotations": "chat templates have no place for annotations",
    "messages[].thinking_blocks": "earlier reasoning is read from reasoning_content",
    "reasoning_effort": "this model has no such setting",
    "request_id": "the header X-Request-Id sets the request's id",
    "return_prompt_text": "the prompt's text is not returned",
    "return_token_offsets": "offsets are not returned",
    "service_tier": "there is only one service tier",
    "session_id": "requests are not bound to sessions",
    "store": "responses are not stored",
    "structured_outputs.backend": "there is only one backend",
    "structured_outputs.disable_fallback": "there is only one backend and no fallback",
    "thinking_token_budget": "max_tokens is the only limit",
    "tools[].allowed_callers": "only the model calls tools",
    "tools[].defer_loading": "all tools are in the prompt from the start",
    "tools[].function.strict": "schemas of calls are enforced only where tool_choice requires a call",
    "verbosity": "this model has no such setting",
    "vllm_xargs": "there are no extensions that read it",
    # of the Responses API
    "include.reasoning.encrypted_content": "reasoning is returned and accepted as plain text",
    "context_management": "the context is not edited",
    "prompt_cache_options": "equal prefixes are shared automatically",
    "prompt_cache_retention": "cached prefixes stay until their pages are needed",
    "reasoning.context": "the chat template decides which earlier reasoning the model sees",
    "reasoning.generate_summary": "reasoning is returned in full",
    "reasoning.mode": "there is only one mode",
    "reasoning.summary": "reasoning is returned in full",
    "stream_options.include_obfuscation": "events are not padded",
    "text.verbosity": "this model has no such setting",
    # of Anthropic's
    "diagnostics": "prompts are not compared with earlier ones",
    "inference_geo": "all computation runs on this server",
    "speed": "there is only one speed",
    "thinking": "this model has no reasoning",
    "thinking.budget_tokens": "max_tokens is the only limit",
    "thinking.display": "reasoning is returned in full",
    # of Ollama's
    "insecure": "the server's HF_ENDPOINT decides how models are fetched",
    "keep_alive": "the model stays loaded while the server runs",
    "options.f16_kv": _AT_START,
    "options.logits_all": "the fields logprobs and top_logprobs ask for logits' logprobs",
    "options.low_vram": _AT_START,
    "options.main_gpu": _AT_START,
    "options.num_batch": _AT_START,
    "options.num_ctx": "the context has the size with which the server was started (--max-model-len)",
    "options.num_gpu": _AT_START,
    "options.num_gqa": "the model's file has it",
    "options.num_keep": "the context is not shifted: an answer ends where it is full",
    "options.num_thread": _AT_START,
    "options.numa": _AT_START,
    "options.penalize_newline": "a newline is a token as any other",
    "options.repeat_last_n": "penalties count the whole prompt and answer",
    "options.use_mlock": _AT_START,
    "options.use_mmap": _AT_START,
    "options.vocab_only": _AT_START,
    "options.embedding_only": _AT_START,
    "shift": "the context is not shifted: an answer ends where it is full",
    "think": "this model has no reasoning",
    # of llama.cpp's
    "cache_prompt": "equal prefixes are shared automatically",
    "dry_allowed_length": "there is no DRY sampler",
    "dry_base": "there is no DRY sampler",
    "dry_penalty_last_n": "there is no DRY sampler",
    "dry_sequence_breakers": "there is no DRY sampler",
    "dynatemp_exponent": "the temperature is not dynamic",
    "id_slot": "rows of the batch are not bound to clients, and cached prefixes are shared by all rows",
    "min_keep": "samplers keep at least one token",
    "mirostat_eta": "there is no Mirostat sampler",
    "mirostat_tau": "there is no Mirostat sampler",
    "n_cache_reuse": "equal prefixes are shared automatically",
    "n_discard": "the context is not shifted: an answer ends where it is full",
    "n_indent": "lines are not cut by their indentation",
    "n_keep": "the context is not shifted: an answer ends where it is full",
    "penalize_nl": "a newline is a token as any other",
    "repeat_last_n": "penalties count the whole prompt and answer",
    "response_fields": "answers have all their fields",
    "samplers": "samplers have a fixed order",
    "sse_ping_interval": "the server's --sse-keep-alive-interval decides it",
    "t_max_predict_ms": "answers end at n_predict; deadline_ms limits the whole request",
    "t_max_prompt_ms": "prompts are computed to their end; deadline_ms limits the whole request",
    "xtc_threshold": "there is no XTC sampler",
    "verbose": "the vocabulary is not listed",
}
"""Fields that are not supported and may be ignored, and why: listed in the answer, and refused in strict mode. All other fields that
are not supported are refused in every mode: they say what the answer must be (its shape, its tokens, what it is made from)."""

INSTEAD: dict[str, str] = {
    "function_call": "tool_choice, its newer form",
    "functions": "tools, its newer form",
    "messages[].function_call": "tool_calls, its newer form",
    "messages[].prefix": "continue_final_message",
}
"""Fields that are not supported, and the field to use instead."""

BY_FLAG: dict[str, tuple[str, str]] = {
    "chat_template": ("trust_request_chat_template", "--trust-request-chat-template"),
}
"""Fields that are honoured only with a server flag: the flag's name in the config, and on the command line."""

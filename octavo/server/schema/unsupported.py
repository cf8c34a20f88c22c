"""Tables of fields that no schema honours: known and not offered, labels, without effect; and why. fields.py reads them.

A nested field goes by its path (tools[].function.strict), and applies wherever a dialect has the object that holds it.
"""

Harmless = tuple[object, ...]
"""Values that ask for nothing beyond the default behaviour, so that clients that send their defaults work. null always does."""

# Known fields that are not offered: any value that is not harmless is refused by name, or, where WITHOUT_EFFECT has it, passed
# over and named back.
NOT_OFFERED: dict[str, Harmless] = {
    # OpenAI
    "service_tier": ("auto", "default"),
    "store": (False,),
    # vLLM: sampling
    "logprob_token_ids": ([],),
    "thinking_token_budget": (),
    "truncation_side": ("left",),
    "watermarking": (False,),
    # vLLM: engine
    "cache_salt": (),
    "kv_transfer_params": (),
    "prompt_embeds": (),
    "request_id": (),
    "return_prompt_text": (False,),
    "return_token_offsets": (False,),
    "return_tokens_as_token_ids": (False,),
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
    "cache_control": "equal prefixes are shared without it",
    "user": "a label for the caller's own books",
    "metadata": "a label for the caller's own books",
    "prompt_cache_key": "equal prefixes are shared without it",
    "safety_identifier": "a label for the caller's own books",
    # in messages that clients send back as they, or their libraries, had them from an earlier answer
    "messages[].cache_control": "equal prefixes are shared without it",
    "messages[].parsed": "what a client's library read out of content",
    "messages[].provider_specific_fields": "a client's library keeps its own notes there",
    "messages[].content[].cache_control": "equal prefixes are shared without it",
    "messages[].content[].caller": "calls are the model's own",
    "messages[].content[].citations": "no template has a place for where words come from",
    "messages[].content[].content[].cache_control": "equal prefixes are shared without it",
    "messages[].content[].content[].citations": "no template has a place for where words come from",
    "messages[].content[].signature": "thoughts are plain text here, and taken back unsigned",
    "messages[].content[].toolset_name": "calls go by the tool's own name",
    "messages[].tool_calls[].index": "calls are taken in the order of the list",
    "messages[].tool_calls[].function.parsed_arguments": "what a client's library read out of arguments",
    "system[].cache_control": "equal prefixes are shared without it",
    "system[].citations": "no template has a place for where words come from",
    "tools[].cache_control": "equal prefixes are shared without it",
    "tools[].eager_input_streaming": "arguments are streamed as they come, always",
    "tools[].function.cache_control": "equal prefixes are shared without it",
    # of the Responses API
    "input[].caller": "calls are the model's own",
    "input[].namespace": "calls go by the tool's own name",
    "input[].parsed_arguments": "what a client's library read out of arguments",
    "input[].phase": "no template has a place for it",
    "input[].status": "an item is taken as it is",
    "input[].content[].annotations": "no template has a place for notes on a text",
    "input[].content[].logprobs": "a text that is sent is taken as it is",
    "input[].content[].parsed": "what a client's library read out of text",
    "input[].content[].prompt_cache_breakpoint": "equal prefixes are shared without it",
    "input[].output[].prompt_cache_breakpoint": "equal prefixes are shared without it",
    "input[].prompt_cache_breakpoint": "equal prefixes are shared without it",
    # of what an answer must look like
    "response_format.json_schema.description": "the schema alone says what an answer must be",
    "response_format.json_schema.name": "the schema alone says what an answer must be",
    "response_format.json_schema.strict": "a schema is always kept to",
    "text.format.description": "the schema alone says what an answer must be",
    "text.format.name": "the schema alone says what an answer must be",
    "text.format.strict": "a schema is always kept to",
}
"""Fields that ask for nothing: accepted silently, and why that is right."""

WITHOUT_EFFECT: dict[str, str] = {
    "kv_transfer_params": "KV pages stay in this server",
    "mm_processor_kwargs": "there are no images or sounds to process",
    "media_io_kwargs": "there are no images or sounds to read",
    "messages[].annotations": "no template has a place for notes on an earlier answer",
    "messages[].thinking_blocks": "reasoning is taken back as reasoning_content",
    "prediction": "nothing is guessed ahead from it",
    "reasoning_effort": "this model has no such dial",
    "request_id": "the header X-Request-Id names a request",
    "return_prompt_text": "the prompt's text is not sent back",
    "return_token_offsets": "offsets are not sent back",
    "service_tier": "there is one tier",
    "session_id": "no request is bound to a session",
    "store": "answers are not stored",
    "structured_outputs.backend": "there is one",
    "structured_outputs.disable_fallback": "there is one backend, and none to fall back on",
    "thinking_token_budget": "max_tokens is the one limit",
    "tools[].allowed_callers": "tools are called by the model alone",
    "tools[].defer_loading": "the model is told of every tool at once",
    "tools[].function.strict": "calls are kept to their schemas where tool_choice requires them, not where they are free",
    "verbosity": "this model has no such dial",
    "vllm_xargs": "there is no extension that would read it",
    # of the Responses API
    "include.reasoning.encrypted_content": "reasoning is given as plain text, and taken back as such",
    "context_management": "nothing is edited out of a context",
    "prompt_cache_options": "equal prefixes are shared without it",
    "prompt_cache_retention": "cached prefixes stay until others need their room",
    "reasoning.context": "the template says which reasoning a model sees again",
    "reasoning.generate_summary": "reasoning is given in full",
    "reasoning.mode": "there is one mode",
    "reasoning.summary": "reasoning is given in full",
    "stream_options.include_obfuscation": "events are not padded",
    "text.verbosity": "this model has no such dial",
    # of Anthropic's
    "diagnostics": "there is nothing to compare a prompt with",
    "inference_geo": "everything is computed here",
    "speed": "there is one speed",
    "thinking": "this model does not think before it answers",
    "thinking.budget_tokens": "max_tokens is the one limit",
    "thinking.display": "reasoning is given in full",
}
"""Fields that are not offered and may be ignored, and why: listed in the answer, and refused in strict mode. All other fields that
are not offered are refused in every mode: they say what the answer must be (its shape, its tokens, what it is made from)."""

INSTEAD: dict[str, str] = {
    "function_call": "tool_choice, its newer form",
    "functions": "tools, its newer form",
    "messages[].function_call": "tool_calls, its newer form",
    "messages[].prefix": "continue_final_message",
}
"""Fields that are not offered, and the field to use instead."""

BY_FLAG: dict[str, tuple[str, str]] = {
    "chat_template": ("trust_request_chat_template", "--trust-request-chat-template"),
}
"""Fields that are honoured only with a server flag: the flag's name in the config, and on the command line."""

"""Chat templates that render the documented formats of published models, including what they change in earlier turns.

They are written for the tests from the formats, and are not the texts of the published templates. Each has the
behaviour of the published one on the conversations of `conversations.py`.
"""

from __future__ import annotations

# Qwen: ChatML. Results of tools that follow each other share a user turn.
_TOOL_RESULT = (
    "{%- elif m.role == 'tool' %}"
    "{%- if i == 0 or messages[i - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\n<tool_response>\n' ~ body ~ '\n</tool_response>' }}"
    "{%- if loop.last or messages[i + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
)
_JSON_TOOLS = (
    "{{ '# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with "
    "function signatures within <tools></tools> XML tags:\n<tools>' }}"
    "{%- for t in tools %}{{ '\n' ~ t | tojson }}{% endfor %}"
    "{{ '\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n'
    "</tool_call>' }}"
)
# The index of the last message of a user. Reasoning of assistant turns before it is forgotten.
_LAST_USER = (
    "{%- set ns = namespace(last=-1) %}"
    "{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
)
_THOUGHT = (
    "{%- set thought = '' %}"
    "{%- if m.reasoning_content is string %}{% set thought = m.reasoning_content %}"
    "{%- elif '</think>' in body %}"
    "{%- set parts = body.split('</think>') %}"
    "{%- set thought = ((parts | first).split('<think>') | last).strip('\n') %}"
    "{%- set body = (parts | last).lstrip('\n') %}"
    "{%- endif %}"
)

QWEN25 = (
    "{{ '<|im_start|>system\n' }}"
    "{%- if messages[0].role == 'system' %}{{ messages[0].content }}"
    "{%- else %}{{ 'You are Qwen, created by Alibaba Cloud. You are a helpful assistant.' }}{% endif %}"
    "{%- if tools %}{{ '\n\n' }}" + _JSON_TOOLS + "{% endif %}{{ '<|im_end|>\n' }}"
    "{%- for m in messages %}{% set i = loop.index0 %}{% set body = m.content %}"
    "{%- if m.role == 'assistant' %}{{ '<|im_start|>assistant' }}"
    "{%- if body or not m.tool_calls %}{{ '\n' ~ body }}{% endif %}"
    "{%- for c in m.tool_calls %}"
    '{{ \'\n<tool_call>\n{"name": "\' ~ c.function.name ~ \'", "arguments": \' ~ c.function.arguments | tojson }}'
    "{{ '}\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}" + _TOOL_RESULT + "{%- elif m.role == 'user' or i > 0 %}"
    "{{ '<|im_start|>' ~ m.role ~ '\n' ~ body ~ '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_QWEN3 = (
    "{%- set told = messages[0].role == 'system' %}"
    "{%- if tools %}{{ '<|im_start|>system\n' }}{% if told %}{{ messages[0].content ~ '\n\n' }}{% endif %}"
    + _JSON_TOOLS
    + "{{ '<|im_end|>\n' }}"
    "{%- elif told %}{{ '<|im_start|>system\n' ~ messages[0].content ~ '<|im_end|>\n' }}{% endif %}"
    + _LAST_USER
    + "{%- for m in messages %}{% set i = loop.index0 %}{% set body = m.content if m.content is string else '' %}"
    "{%- if m.role == 'user' or (m.role == 'system' and i > 0) %}"
    "{{ '<|im_start|>' ~ m.role ~ '\n' ~ body ~ '<|im_end|>\n' }}"
    "{%- elif m.role == 'assistant' %}"
    + _THOUGHT
    # The last message shows a block even without reasoning.
    + "{%- if i > ns.last and (loop.last or thought) %}"
    "{{ '<|im_start|>assistant\n<think>\n' ~ thought.strip('\n') ~ '\n</think>\n\n' ~ body.lstrip('\n') }}"
    "{%- else %}{{ '<|im_start|>assistant\n' ~ body }}{% endif %}"
    "{%- for c in m.tool_calls %}{% if body or not loop.first %}{{ '\n' }}{% endif %}"
    '{{ \'<tool_call>\n{"name": "\' ~ c.function.name ~ \'", "arguments": \' ~ c.function.arguments | tojson }}'
    "{{ '}\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}" + _TOOL_RESULT + "{% endif %}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}OPENS{% endif %}"
)
QWEN3 = _QWEN3.replace("OPENS", "{% if enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}")
QWEN3_THINKING = _QWEN3.replace("OPENS", "{{ '<think>\n' }}")

_QWEN35 = (
    "{%- set told = messages[0].role == 'system' %}"
    "{%- if tools %}{{ '<|im_start|>system\n# Tools\n\nYou have access to the following functions:\n\n<tools>' }}"
    "{%- for t in tools %}{{ '\n' ~ t | tojson }}{% endfor %}"
    "{{ '\n</tools>\n\nIf you choose to call a function ONLY reply in the following format with NO suffix:\n\n"
    "<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>\nvalue_1\n</parameter>\n"
    "<parameter=example_parameter_2>\nThis is the value for the second parameter\nthat can span\nmultiple lines\n"
    "</parameter>\n</function>\n</tool_call>\n\n<IMPORTANT>\nReminder:\n- Function calls MUST follow the specified "
    "format: an inner <function=...></function> block must be nested within <tool_call></tool_call> XML tags\n"
    "- Required parameters MUST be specified\n- You may provide optional reasoning for your function call in natural "
    "language BEFORE the function call, but NOT after\n- If there is no function call available, answer the question "
    "like normal with your current knowledge and do not tell the user about function calls\n</IMPORTANT>' }}"
    "{%- if told %}{{ '\n\n' ~ messages[0].content | trim }}{% endif %}{{ '<|im_end|>\n' }}"
    "{%- elif told %}{{ '<|im_start|>system\n' ~ messages[0].content | trim ~ '<|im_end|>\n' }}{% endif %}"
    + _LAST_USER
    + "{%- for m in messages %}{% set i = loop.index0 %}{% set body = m.content | trim %}"
    "{%- if m.role == 'user' %}{{ '<|im_start|>user\n' ~ body ~ '<|im_end|>\n' }}"
    "{%- elif m.role == 'assistant' %}" + _THOUGHT + "{{ '<|im_start|>assistant\n' }}"
    "{%- if i > ns.last %}{{ '<think>\n' ~ thought | trim ~ '\n</think>\n\n' }}{% endif %}{{ body }}"
    "{%- for c in m.tool_calls %}"
    "{{ '\n' if not loop.first else '\n\n' if body else '' }}{{ '<tool_call>\n<function=' ~ c.function.name ~ '>\n' }}"
    "{%- for key, value in c.function.arguments | items %}{{ '<parameter=' ~ key ~ '>\n' }}VALUE"
    "{{ '\n</parameter>\n' }}"
    "{%- endfor %}{{ '</function>\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}"
    + _TOOL_RESULT
    + "{% endif %}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{{ '<think>\n' if THINKS else '<think>\n\n</think>\n\n' }}{% endif %}"
)
_AS_TEXT = "{{ value | tojson if value is mapping or (value is iterable and value is not string) else value | string }}"
_AS_JSON = "{{ value if value is string else value | tojson }}"
_UNLESS_OFF, _IF_ON = "enable_thinking is not false", "enable_thinking is true"
QWEN35 = _QWEN35.replace("VALUE", _AS_TEXT).replace("THINKS", _UNLESS_OFF)
QWEN35_NOTHINK = _QWEN35.replace("VALUE", _AS_TEXT).replace("THINKS", _IF_ON)
QWEN36 = _QWEN35.replace("VALUE", _AS_JSON).replace("THINKS", _UNLESS_OFF)

# Every assistant turn loses its reasoning, also the last one. No tools, and after results of tools no new turn begins.
DEEPSEEK_R1 = (
    "{{ bos_token }}{{ messages | selectattr('role', 'equalto', 'system') | map(attribute='content') | join('\n\n') }}"
    "{%- set ns = namespace(after_tool=false) %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'user' %}{% set ns.after_tool = false %}{{ '<｜User｜>' ~ m.content }}"
    "{%- elif m.role == 'assistant' %}"
    "{%- set body = m.content if ns.after_tool else (m.content.split('</think>') | last) %}"
    "{{ ('' if ns.after_tool else '<｜Assistant｜>') ~ body }}{% set ns.after_tool = false %}"
    "{%- for c in m.tool_calls %}{{ '<｜tool▁calls▁begin｜>' if loop.first else '\n' }}"
    "{{ '<｜tool▁call▁begin｜>' ~ c.type ~ '<｜tool▁sep｜>' ~ c.function.name ~ '\n```json\n' }}"
    "{{ c.function.arguments + '\n```<｜tool▁call▁end｜>' }}"
    "{{ '<｜tool▁calls▁end｜>' if loop.last else '' }}{% endfor %}{{ '<｜end▁of▁sentence｜>' }}"
    "{%- elif m.role == 'tool' %}{{ '' if ns.after_tool else '<｜tool▁outputs▁begin｜>' }}"
    "{%- set ns.after_tool = true %}"
    "{{ '<｜tool▁output▁begin｜>' ~ m.content ~ '<｜tool▁output▁end｜>' }}"
    "{{ '' if loop.nextitem is defined and loop.nextitem.role == 'tool' else '<｜tool▁outputs▁end｜>' }}{% endif %}"
    "{%- endfor %}{% if add_generation_prompt and not ns.after_tool %}{{ '<｜Assistant｜><think>\n' }}{% endif %}"
)

LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|start_header_id|>' ~ m.role ~ '<|end_header_id|>\n\n' ~ m.content | trim ~ '<|eot_id|>' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
# Content beside a call is dropped, a call stands alone, and the result of a tool is written as JSON.
LLAMA31 = (
    "{%- set told = messages[0].role == 'system' %}{% set others = messages[1:] if told else messages %}"
    "{{ bos_token ~ '<|start_header_id|>system<|end_header_id|>\n\n' }}"
    "{%- if tools %}{{ 'Environment: ipython\n' }}{% endif %}"
    "{{ 'Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n' }}"
    "{%- if told %}{{ messages[0].content | trim }}{% endif %}{{ '<|eot_id|>' }}"
    "{%- for m in others %}"
    "{%- set role = 'ipython' if m.role == 'tool' else m.role %}"
    "{{ '<|start_header_id|>' ~ role ~ '<|end_header_id|>\n\n' }}"
    "{%- if tools and loop.first %}"
    "{{ 'Given the following functions, please respond with a JSON for a function call with its proper arguments that "
    'best answers the given prompt.\n\nRespond in the format {"name": function name, "parameters": dictionary of '
    "argument name and its value}.Do not use variables.\n\n' }}"
    "{%- for t in tools %}{{ t | tojson(indent=4) ~ '\n\n' }}{% endfor %}{% endif %}"
    "{%- if m.tool_calls and m.tool_calls | length > 1 %}{{ raise_exception('one call at a time') }}"
    "{%- elif m.tool_calls %}{% set f = m.tool_calls[0].function %}"
    "{{ '{\"name\": \"' ~ f.name ~ '\", \"parameters\": ' ~ f.arguments | tojson ~ '}' }}"
    "{%- elif role == 'ipython' %}{{ m.content | tojson }}{% else %}{{ m.content | trim }}{% endif %}"
    "{{ '<|eot_id|>' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)

GEMMA = (
    "{%- set told = messages[0].role == 'system' %}{% set others = messages[1:] if told else messages %}"
    "{{ bos_token }}{% for m in others %}"
    "{%- if (m.role == 'user') != (loop.index0 is even) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ '<start_of_turn>' ~ ('model' if m.role == 'assistant' else m.role) ~ '\n' }}"
    "{%- if told and loop.first %}{{ messages[0].content ~ '\n\n' }}{% endif %}"
    "{{ m.content | trim ~ '<end_of_turn>\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)

# The system message stands before the last message if this is of the user, and the tools at the last user message.
_MISTRAL = (
    "{%- set told = messages[0].role == 'system' %}{% set others = messages[1:] if told else messages %}"
    "{%- set users = others | selectattr('role', 'equalto', 'user') | list %}"
    "{{ bos_token }}{% for m in others %}"
    "{%- if m.role == 'user' %}"
    "{%- if tools and m == users[-1] %}{{ '[AVAILABLE_TOOLS]GAP[' }}"
    '{%- for t in tools %}{{ \'{"type": "function", "function": \' ~ t.function | tojson ~ \'}\' }}'
    "{{ '' if loop.last else ', ' }}{% endfor %}{{ '][/AVAILABLE_TOOLS]' }}{% endif %}"
    "{{ '[INST]GAP' }}{% if told and loop.last %}{{ messages[0].content ~ '\n\n' }}{% endif %}"
    "{{ m.content ~ '[/INST]' }}"
    "{%- elif m.tool_calls %}{{ '[TOOL_CALLS]GAP[' }}"
    "{%- for c in m.tool_calls %}{{ (c.function | tojson)[:-1] ~ ', \"id\": \"' ~ c.id ~ '\"}' }}"
    "{{ '' if loop.last else ', ' }}{% endfor %}{{ ']' ~ eos_token }}"
    "{%- elif m.role == 'tool' %}{{ '[TOOL_RESULTS]GAP{\"content\": ' ~ m.content }}"
    "{{ ', \"call_id\": \"' ~ m.tool_call_id ~ '\"}[/TOOL_RESULTS]' }}"
    "{%- else %}{{ 'GAP' ~ TRIMMED ~ eos_token }}{% endif %}{% endfor %}"
)
MISTRAL = _MISTRAL.replace("GAP", " ").replace("TRIMMED", "m.content | trim")
MISTRAL_NEMO = _MISTRAL.replace("GAP", "").replace("TRIMMED", "m.content")

# Assistant turns have no end token: the next message begins with it. Reasoning before the last user message is dropped.
GLM45 = (
    "{%- set off = enable_thinking is defined and not enable_thinking %}{{ '[gMASK]<sop>' }}"
    "{%- if tools %}{{ '<|system|>\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n' }}"
    "{%- for t in tools %}{{ t | tojson ~ '\n' }}{% endfor %}"
    "{{ '</tools>\n\nFor each function call, output the function name and arguments within the following XML format:\n"
    "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n<arg_value>{arg-value-1}</arg_value>\n"
    "<arg_key>{arg-key-2}</arg_key>\n<arg_value>{arg-value-2}</arg_value>\n...\n</tool_call>' }}{% endif %}"
    + _LAST_USER
    + "{%- for m in messages %}{% set i = loop.index0 %}{% set body = m.content %}"
    "{%- if m.role == 'system' %}{{ '<|system|>\n' ~ body }}"
    "{%- elif m.role == 'user' %}{{ '<|user|>\n' ~ body }}"
    "{%- if off and not body.endswith('/nothink') %}{{ '/nothink' }}{% endif %}"
    "{%- elif m.role == 'tool' %}{% if messages[i - 1].role != 'tool' %}{{ '<|observation|>' }}{% endif %}"
    "{{ '\n<tool_response>\n' ~ body ~ '\n</tool_response>' }}"
    "{%- else %}" + _THOUGHT + "{{ '<|assistant|>\n<think>' ~ (thought | trim if i > ns.last else '') ~ '</think>' }}"
    "{%- if body | trim %}{{ '\n' ~ body | trim }}{% endif %}"
    "{%- for c in m.tool_calls %}{{ '\n<tool_call>' ~ c.function.name ~ '\n' }}"
    "{%- for key, value in c.function.arguments | items %}"
    "{{ '<arg_key>' ~ key ~ '</arg_key>\n<arg_value>' ~ (value if value is string else value | tojson) }}"
    "{{ '</arg_value>\n' }}{% endfor %}{{ '</tool_call>' }}{% endfor %}{% endif %}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% if off %}{{ '\n<think></think>' }}{% endif %}{% endif %}"
)

# Only the last answer shows its analysis and ends with <|return|>. A call shows its analysis until an answer follows.
# Further calls of a turn are dropped.
GPT_OSS = (
    "{{ '<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\n"
    "Knowledge cutoff: 2024-06\nCurrent date: ' ~ strftime_now('%Y-%m-%d') ~ '\n\nReasoning: medium\n\n"
    "# Valid channels: analysis, commentary, final. Channel must be included for every message.' }}"
    "{%- if tools %}{{ '\nCalls to these tools must go to the commentary channel: ' }}{{ \"'functions'.\" }}{% endif %}"
    "{{ '<|end|>' }}"
    "{%- set told = messages[0].role == 'system' %}{% set others = messages[1:] if told else messages %}"
    "{%- if told or tools %}{{ '<|start|>developer<|message|>' }}"
    "{%- if told %}{{ '# Instructions\n\n' ~ messages[0].content ~ '\n\n' }}{% endif %}"
    "{%- if tools %}{{ '# Tools\n\n## functions\n\nnamespace functions {\n\n' }}{% for t in tools %}"
    "{{ '// ' ~ t.function.description ~ '\ntype ' ~ t.function.name ~ ' = (_: {\n' }}"
    "{%- for key, value in t.function.parameters.properties | items %}"
    "{{ key ~ ('' if key in (t.function.parameters.required or []) else '?') ~ ': ' ~ value.type ~ ',\n' }}{% endfor %}"
    "{{ '}) => any;\n\n' }}{% endfor %}{{ '} // namespace functions' }}{% endif %}{{ '<|end|>' }}{% endif %}"
    "{%- set opens, ns = '<|start|>assistant', namespace(name='') %}"
    "{%- for m in others %}{% set later = others[loop.index0 + 1:] | rejectattr('tool_calls', 'defined') %}"
    "{%- if m.role == 'user' %}{{ '<|start|>user<|message|>' ~ m.content ~ '<|end|>' }}"
    "{%- elif m.role == 'tool' %}{{ '<|start|>functions.' ~ ns.name }}"
    "{{ ' to=assistant<|channel|>commentary<|message|>' ~ m.content | tojson ~ '<|end|>' }}"
    "{%- elif m.tool_calls %}{% set f = m.tool_calls[0].function %}{% set ns.name = f.name %}"
    "{%- if m.content and m.thinking %}{{ raise_exception('two analyses') }}"
    "{%- elif (m.content or m.thinking) and not later | selectattr('role', 'equalto', 'assistant') | list %}"
    "{{ opens ~ '<|channel|>analysis<|message|>' ~ (m.content or m.thinking) ~ '<|end|>' }}{% endif %}"
    "{{ opens ~ ' to=functions.' ~ f.name ~ '<|channel|>commentary json<|message|>' ~ f.arguments | tojson }}"
    "{{ '<|call|>' }}"
    "{%- elif loop.last and not add_generation_prompt %}"
    "{%- if 'thinking' in m %}{{ opens ~ '<|channel|>analysis<|message|>' ~ m.thinking ~ '<|end|>' }}{% endif %}"
    "{{ opens ~ '<|channel|>final<|message|>' ~ m.content ~ '<|return|>' }}"
    "{%- else %}{{ opens ~ '<|channel|>final<|message|>' ~ m.content ~ '<|end|>' }}{% endif %}{% endfor %}"
    "{%- if add_generation_prompt %}{{ opens }}{% endif %}"
)

# The thinking model shows reasoning only in calls after the last answer, so never in an answer.
_KIMI_K2 = (
    "{%- if tools %}{{ '<|im_system|>tool_declare<|im_middle|>' ~ tools | tojson ~ '<|im_end|>' }}{% endif %}"
    "{%- if messages[0].role != 'system' %}"
    "{{ '<|im_system|>system<|im_middle|>You are Kimi, an AI assistant created by Moonshot AI.<|im_end|>' }}{% endif %}"
    "{%- set ns = namespace(last=-1) %}{% for m in messages %}"
    "{%- if m.role == 'assistant' and not m.tool_calls %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{%- for m in messages %}"
    "{%- set mark = {'user': 'user', 'assistant': 'assistant'}.get(m.role, 'system') %}"
    "{{ '<|im_' ~ mark ~ '|>' ~ m.role ~ '<|im_middle|>' }}"
    "{%- if m.role == 'assistant' %}THOUGHT"
    "{%- elif m.role == 'tool' %}{{ '## Return of ' ~ m.tool_call_id ~ '\n' }}{% endif %}{{ m.content }}"
    "{%- if m.tool_calls %}{{ '<|tool_calls_section_begin|>' }}{% for c in m.tool_calls %}"
    "{{ '<|tool_call_begin|>' ~ c.id ~ '<|tool_call_argument_begin|>' ~ c.function.arguments | tojson }}"
    "{{ '<|tool_call_end|>' }}{% endfor %}{{ '<|tool_calls_section_end|>' }}{% endif %}{{ '<|im_end|>' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_assistant|>assistant<|im_middle|>' }}{% endif %}"
)
KIMI_K2 = _KIMI_K2.replace("THOUGHT", "")
KIMI_K2_THINKING = _KIMI_K2.replace(
    "THOUGHT", "{{ '<think>' ~ (m.reasoning_content or '' if loop.index0 > ns.last else '') ~ '</think>' }}"
)

# Tool calls, tools and reasoning fields are dropped. The system message has no end token.
SMOLLM3 = (
    "{%- set thinks = enable_thinking is not defined or enable_thinking %}"
    "{%- set block = '' if thinks else '<think>\n\n</think>\n' %}"
    "{{ '<|im_start|>system\n## Metadata\n\nKnowledge Cutoff Date: June 2025\nToday Date: ' }}"
    "{{ strftime_now('%d %B %Y') ~ '\nReasoning Mode: ' ~ ('/think' if thinks else '/no_think') }}"
    "{{ '\n\n## Custom Instructions\n\n' }}"
    "{%- if messages[0].role == 'system' %}{{ messages[0].content.rstrip() }}"
    "{%- else %}{{ 'You are a helpful AI assistant named SmolLM, trained by Hugging Face.' }}{% if thinks %}"
    "{{ ' Your role as an assistant involves thoroughly exploring questions through a systematic thinking process"
    " before providing the final precise and accurate solutions. This requires engaging in a comprehensive cycle "
    "of analysis, summarizing, exploration, reassessment, reflection, backtracking, and iteration to develop "
    "well-considered thinking process. Please structure your response into two main sections: Thought and "
    "Solution using the specified format: <think> Thought section </think> Solution section. In the Thought "
    "section, detail your reasoning process in steps. Each step should include detailed considerations such as "
    "analysing questions, summarizing relevant findings, brainstorming new ideas, verifying the accuracy of the "
    "current steps, refining any errors, and revisiting previous steps. In the Solution section, based on various"
    " attempts, explorations, and reflections from the Thought section, systematically present the final solution"
    " that you deem correct. The Solution section should be logical, accurate, and concise and detail necessary "
    "steps needed to reach the conclusion.' }}"
    "{% endif %}{% endif %}{{ '\n\n' }}"
    "{%- for m in messages %}"
    "{%- if m.role == 'assistant' %}{% generation %}"
    "{{ '<|im_start|>assistant\n' ~ block ~ m.content.lstrip('\n') ~ '<|im_end|>\n' }}{% endgeneration %}"
    "{%- elif m.role != 'system' %}{{ '<|im_start|>user\n' ~ m.content ~ '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' ~ block }}{% endif %}"
)

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# By the name of the built-in template.
ORIGINALS = {
    "chatml": CHATML,
    "llama3": LLAMA3,
    "qwen2.5": QWEN25,
    "qwen3": QWEN3,
    "qwen3-thinking": QWEN3_THINKING,
    "qwen3.5": QWEN35,
    "qwen3.5-nothink": QWEN35_NOTHINK,
    "qwen3.6": QWEN36,
    "llama3.1": LLAMA31,
    "deepseek-r1": DEEPSEEK_R1,
    "gemma": GEMMA,
    "mistral": MISTRAL,
    "mistral-nemo": MISTRAL_NEMO,
    "glm4.5": GLM45,
    "gpt-oss": GPT_OSS,
    "kimi-k2": KIMI_K2,
    "kimi-k2-thinking": KIMI_K2_THINKING,
    "smollm3": SMOLLM3,
}
SPECIAL = {
    "llama3": {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
    "llama3.1": {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
    "deepseek-r1": {"bos_token": "<｜begin▁of▁sentence｜>", "eos_token": "<｜end▁of▁sentence｜>"},
    "gemma": {"bos_token": "<bos>", "eos_token": "<eos>"},
}

"""Chat templates with tools, or reasoning, written for these tests in the ways that published models have: the markers,
variables and message fields are theirs, the protocol_format is not."""

CHATML_TOOLS = """{%- if tools %}{{ '<|im_start|>system\\nTools:' }}
{%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}
{{- '\\nCall one with <tool_call>\\n{"name": <name>, "arguments": <object>}\\n</tool_call><|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}{{ '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- else %}{{ '<|im_start|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}{% endfor %}{% endif %}{{ '<|im_end|>\\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

HERMES = CHATML_TOOLS + (
    "{% if add_generation_prompt and enable_thinking is defined and not enable_thinking %}"
    "{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
)

HERMES_TEXT = HERMES.replace("(call.function.arguments | tojson) + '}", "call.function.arguments + '}")
"""Needs the arguments of calls as text."""

LLAMA = """{{- bos_token }}{% if not date_string is defined %}{% set date_string = "26 Jul 2024" %}{% endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday: ' + date_string }}
{%- if tools is defined and tools is not none %}{{ '\\nEnvironment: ipython\\n' }}
{{- 'Answer {"name": function name, "parameters": dictionary of argument name and its value}.\\n' }}
{%- for tool in tools %}{{ tool | tojson(indent=4) }}{% endfor %}{% endif %}{{ '<|eot_id|>' }}
{%- for message in messages %}
{%- if message.role == 'tool' %}{{ '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + message.content | tojson }}
{%- elif 'tool_calls' in message %}
{%- if message.tool_calls | length != 1 %}{{ raise_exception('This model only supports single tool-calls at once!') }}
{%- endif %}{% set call = message.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
{{- call.arguments | tojson }}{{ '}' }}
{%- else %}{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content }}{% endif %}
{{- '<|eot_id|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

MISTRAL = """{{- bos_token }}{% for message in messages %}
{%- if message.role == 'user' %}
{%- if tools is not none and loop.last %}{{ '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}
{{- '[INST] ' + message.content + '[/INST]' }}
{%- elif message.tool_calls is defined and message.tool_calls is not none %}{{ '[TOOL_CALLS] [' }}
{%- for call in message.tool_calls %}
{%- if not call.id is defined or call.id | length != 9 %}
{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}
{{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' + (', ' if not loop.last else ']') }}{% endfor %}
{{- eos_token }}
{%- elif message.role == 'tool' %}{{ '[TOOL_RESULTS] ' + message.content + '[/TOOL_RESULTS]' }}
{%- else %}{{ ' ' + message.content + eos_token }}{% endif %}{% endfor %}"""

QWEN3 = """{%- for message in messages %}{% set content = message.content %}{% set reasoning = '' %}
{%- if message.role == 'assistant' %}
{%- if message.reasoning_content is string %}{% set reasoning = message.reasoning_content %}
{%- elif '</think>' in content %}
{%- set reasoning = content.split('</think>')[0].split('<think>')[-1] %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}
{%- if loop.last %}{% set content = '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content %}{% endif %}
{%- endif %}{{ '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}
{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}"""

QWEN3_THINKING = QWEN3.partition("{% if add_generation_prompt %}")[0] + (
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"
)

SMOLLM3 = """{%- if enable_thinking is not defined -%}{% set enable_thinking = true %}{% endif -%}
{%- set mode = '/think' if enable_thinking else '/no_think' -%}
{{- '<|im_start|>system\\nReasoning Mode: ' + mode + '<|im_end|>\\n' -}}
{%- for message in messages -%}{% set content = message.content %}
{%- if message.role == 'assistant' and mode == '/no_think' %}
{%- set content = '<think>\\n\\n</think>\\n' + content.split('</think>')[-1].lstrip('\\n') %}{% endif %}
{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}{% endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' + ('' if mode == '/think' else '<think>\\n\\n</think>\\n') }}{% endif %}"""

R1 = """{{- bos_token }}{% for message in messages %}{% set content = message.content %}
{%- if message.role == 'assistant' %}
{%- if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}
{{- '<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>' }}
{%- else %}{{ '<｜User｜>' + content }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<｜Assistant｜><think>\\n' }}{% endif %}"""

MAGISTRAL = """{{- bos_token }}{% for message in messages %}
{%- if message.role == 'user' %}{{ '[INST]' + message.content + '[/INST]' }}
{%- elif message.content is not string %}{% for part in message.content %}
{{- '[THINK]' + part.thinking + '[/THINK]' if part.type == 'thinking' else part.text }}{% endfor %}{{ eos_token }}
{%- else %}{{ message.content + eos_token }}{% endif %}{% endfor %}"""

MISTRAL_NAMES = MISTRAL.partition("{{ '[TOOL_CALLS] [' }}")[0] + (
    "{% for call in message.tool_calls %}{{ '[TOOL_CALLS]' + call.function.name }}"
    "{{- '[ARGS]' + call.function.arguments | tojson }}{% endfor %}{{ eos_token }}{% endif %}{% endfor %}"
)
MISTRAL_IDS = MISTRAL_NAMES.replace("call.function.name }}", "call.function.name + '[CALL_ID]' + call.id }}")

GRANITE = """{%- for message in messages %}{%- if tools and loop.first %}
{{- "<|start_of_role|>tools<|end_of_role|>" + (tools | tojson) + "\\nCall with <|tool_call|>.\\n" }}{% endif %}
{{- '<|start_of_role|>' + message.role + '<|end_of_role|>' + message.content + '<|end_of_text|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start_of_role|>assistant<|end_of_role|>' }}{% endif %}"""
"""Leaves out the calls of a message."""

WRITES_CALLS = (
    "{% for m in messages %}{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>"
    "{% endfor %}{% endfor %}"
)
"""The calls of a conversation, for templates that show what they are given."""
XML = HERMES.replace('{"name": <name>, "arguments": <object>}', "<function=name>").replace(
    """{"name": "' + call.function.name + '", "arguments": ' }}""", "<function=' + call.function.name + '>' }}"
)
LISTS = HERMES.replace("""<tool_call>\\n{"name": "'""", """<tool_calls>[{"name": "'""").replace(
    "}\\n</tool_call>' }}{% endfor", "}]</tool_calls>' }}{% endfor"
)
"""Writes calls between other tags than those it tells of."""
PLAIN = "{% for message in messages %}{{ message.role + ':' + message.content + '\\n' }}{% endfor %}"
"""Knows no tools, like the built-in base's."""

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["city"],
            "additionalProperties": False,
            "$defs": {"city": {"enum": ["Paris", "Köln"]}},
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}

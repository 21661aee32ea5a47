"""A character card with every field, as JSON and inside a PNG, and the persona that it becomes."""

import base64
import json
import struct
import zlib
from typing import Any

from api.cli.personas.card import PNG

ADA: dict[str, Any] = {
    "name": "Ada",
    "description": "{{Char}} wrote programs for <USER>.",
    "personality": "exact",
    "scenario": "",
    "first_mes": "Good day, {{user}}.",
    "mes_example": (
        "<START>\r\n{{user}}: Hi\r\n{{char}}: Hello\r\nand welcome.\r\n{{char}}: Sit.\r\n<START>\n{{char}}: Lost\n"
        "{{user}}: What?\n{{char}}: Nothing.\n{{user}}: Hm"
    ),
    "creator_notes": "notes",
    "system_prompt": "{{original}} Be {{char}}.",
    "post_history_instructions": "",
    "alternate_greetings": ["Again?", ""],
    "tags": ["x"],
    "extensions": {"depth": 4},
}
EXPECTED = {
    "name": "Ada",
    "system": "Be {{char}}.\n\n{{char}} wrote programs for {{user}}.\n\n{{char}}'s personality: exact",
    "examples": [
        [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello\nand welcome.\nSit."}],
        [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "Nothing."}],
    ],
    "greetings": ["Good day, {{user}}.", "Again?"],
}


def card(spec: str = "chara_card_v2", **fields: Any) -> bytes:
    return json.dumps({"spec": spec, "spec_version": spec[-1] + ".0", "data": {**ADA, **fields}}).encode()


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(**texts: bytes) -> bytes:
    head = struct.pack(">IIBBBBB", 1, 1, 8, 0, 0, 0, 0)
    inner = (chunk(b"tEXt", name.encode() + b"\0" + base64.b64encode(text)) for name, text in texts.items())
    return PNG + chunk(b"IHDR", head) + b"".join(inner) + chunk(b"IDAT", zlib.compress(b"\0\0")) + chunk(b"IEND", b"")

"""What tests read of streams of /v1/responses."""

import json
from typing import Any


def read(answer: Any) -> list[dict[str, Any]]:
    """Return the events of a stream, each named as its type says, numbered from 0."""
    assert answer.status_code == 200, answer.text
    *parts, rest = answer.text.split("\n\n")
    assert rest == ""
    lines = [part.split("\n") for part in parts]
    found = [json.loads(data.removeprefix("data: ")) for _, data in lines]
    assert [name for name, _ in lines] == [f"event: {event['type']}" for event in found]
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def rebuilt(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the items that a client builds of the events, which must tell of each in the right order."""
    items: list[dict[str, Any]] = []
    for event in json.loads(json.dumps(events)):
        match event["type"].removeprefix("response."):
            case "output_item.added":
                assert event["output_index"] == len(items)
                items.append(event["item"])
            case "content_part.added":
                items[-1]["content"].append(event["part"])
            case "output_text.delta":
                items[-1]["content"][event["content_index"]]["text"] += event["delta"]
                items[-1]["content"][event["content_index"]]["logprobs"] += event["logprobs"]
            case "reasoning_text.delta":
                items[-1]["content"][event["content_index"]]["text"] += event["delta"]
            case "output_text.done" | "reasoning_text.done":
                assert items[-1]["content"][0]["text"] == event["text"]
            case "content_part.done":
                assert items[-1]["content"][0] == event["part"]
            case "function_call_arguments.delta":
                items[-1]["arguments"] += event["delta"]
            case "function_call_arguments.done":
                assert items[-1]["arguments"] == event["arguments"]
            case "output_item.done":
                assert event["item"]["status"] in ("completed", "incomplete")
                items[-1]["status"] = event["item"]["status"]
                assert items[-1] == event["item"]
    return items

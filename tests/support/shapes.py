"""What clients ask a model for: a schema as a class and a tool. Short, so that the demo model fills them at once."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class Trip(BaseModel):
    """A trip."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Paris", "Rome"]
    days: Literal[1, 2, 3]


CITIES = ("Paris", "Rome")
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tell the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": list(CITIES)}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
NAMED: dict[str, Any] = {"type": "function", "function": {"name": "weather"}}
ASK: list[Any] = [{"role": "user", "content": "Paris?"}]


def weather(city: Literal["Paris", "Rome"]) -> str:
    """Tell the weather of a city."""
    return f"It is sunny in {city}, and warm."

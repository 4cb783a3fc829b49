"""A tool that the bus runs for clients of the gateway."""


def weather(city: str) -> str:
    return f"Rain in {city}."

"""Tools that the bus runs for clients of the gateway."""


def weather(city: str) -> str:
    return f"Rain in {city}."


def pay(amount: int) -> str:
    return f"Paid {amount}."

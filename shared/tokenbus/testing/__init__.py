"""For tests of services that use the bus: the real bus in the test's process, and a model that says what you script.

    from tokenbus.testing import LocalBus

    def test_a_run_is_answered() -> None:
        with LocalBus() as local:
            local.model_says("greeter", "Hello there.")
            with local.sync_client() as bus:
                assert bus.publish(local.request("greeter")).result().text == "Hello there."

As a pytest fixture: ``pytest_plugins = ["tokenbus.testing.fixtures"]`` in the top `conftest.py`. Needs the extra
`testing` (the services and a server), which nothing else of `tokenbus` does.
"""

try:
    from tokenbus_services.mock_provider import (
        CutOff,
        Delivery,
        ErrorEvent,
        Exchange,
        Fixed,
        HangUp,
        HttpRequest,
        ModelRequest,
        Offsets,
        Picture,
        Random,
        Recording,
        Reply,
        Stall,
        Status,
        ToolCall,
        Turn,
        Whole,
        Wire,
    )
    from tokenbus_services.testing.local_bus import LocalBus, NoSuchModel
except ModuleNotFoundError as e:
    raise ModuleNotFoundError(f"tokenbus.testing needs the extra `testing`: {e}", name=e.name) from e

__all__ = [
    "CutOff",
    "Delivery",
    "ErrorEvent",
    "Exchange",
    "Fixed",
    "HangUp",
    "HttpRequest",
    "LocalBus",
    "ModelRequest",
    "NoSuchModel",
    "Offsets",
    "Picture",
    "Random",
    "Recording",
    "Reply",
    "Stall",
    "Status",
    "ToolCall",
    "Turn",
    "Whole",
    "Wire",
]

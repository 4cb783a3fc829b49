"""Built-in policies that need more than the library's dependencies; the others are in `tokenbus.policy`."""

from tokenbus_services.policy_stage.builtin.json_schema import ArgumentSchemas, ArgumentSchemasOptions

__all__ = ["ArgumentSchemas", "ArgumentSchemasOptions"]

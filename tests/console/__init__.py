"""The console's page: its modules in Node, its vendored packages, and all of it in a real browser."""
